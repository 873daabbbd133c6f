"""The smallest change of a configuration with which its memory fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.memory import phases_of
from strop.trainer.plan.roles import planned_roles

GRAIN = 256
"""Budgets are multiples of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which a run fits."""

    settings: tuple[str, ...]
    peak_bytes: int
    """Of a rank, with them."""


def smallest_change(
    config: Config, lengths: Lengths, available: float, *, is_accelerator: bool
) -> Change | None:
    """The first that fits of: half the budget and so on, fewer sequences, gradients summed after each micro-batch,
    checkpointing, all of these, offload, ranks, an adapter.

    Args:
        config: of the run, which does not fit.
        lengths: of prompts and answers.
        available: bytes of a rank.
        is_accelerator: the roles run on one.

    Returns:
        None where none does.
    """
    for settings, changed in _candidates(config, lengths, is_accelerator):
        try:
            roles = planned_roles(changed, lengths, is_accelerator=is_accelerator)
            phases = phases_of(changed, roles, device_bytes=available if is_accelerator else None)
        except ValueError:  # a budget below the longest sequence, or axes that do not divide
            continue
        peak = max(phase.device_bytes for phase in phases)
        if peak <= available:
            return Change(settings=settings, peak_bytes=peak)
    return None


def _candidates(
    config: Config, lengths: Lengths, is_accelerator: bool
) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Changes, the smallest first."""
    budgets = list(_budgets(config, lengths))
    for budget in budgets:
        yield (f"actor.engine.max_tokens_per_device={budget}",), _with_budget(config, budget)
    for running in _halves(config.rollout.max_running):
        yield (f"rollout.max_running={running}",), _replaced(config, "rollout", max_running=running)
    syncs = config.resources.ranks > 1 and config.actor.engine.gradient_sync == "last"
    if syncs:
        yield ("actor.engine.gradient_sync=each",), _with_engine(config, gradient_sync="each")
    checkpointed = _replaced(config, "model", gradient_checkpointing=True)
    if not config.model.gradient_checkpointing:
        yield ("model.gradient_checkpointing=true",), checkpointed
    least = budgets[-1] if budgets else None
    small, settings = checkpointed, ["model.gradient_checkpointing=true"]
    if least is not None:
        small, settings = (
            _with_budget(small, least),
            [*settings, f"actor.engine.max_tokens_per_device={least}"],
        )
        yield tuple(settings), small
    fewest = min(_halves(config.rollout.max_running), default=None)
    if fewest is not None:
        small = _replaced(small, "rollout", max_running=fewest)
        settings.append(f"rollout.max_running={fewest}")
        yield tuple(settings), small
    if syncs:
        small = _with_engine(small, gradient_sync="each")
        settings.append("actor.engine.gradient_sync=each")
        yield tuple(settings), small
    if is_accelerator:
        yield (*settings, "actor.engine.offload=optimizer"), _with_engine(small, offload="optimizer")
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        if is_accelerator and ranks > config.resources.ranks:
            more = dataclasses.replace(config.resources, runtime="ray", ranks=ranks, nodes=max(1, ranks // 8))
            yield (
                ("resources.runtime=ray", f"resources.ranks={ranks}", *settings),
                dataclasses.replace(small, resources=more),
            )
    if not config.model.lora.enabled:
        adapted = dataclasses.replace(small.model, lora=dataclasses.replace(small.model.lora, rank=16))
        yield (*settings, "model.lora.rank=16"), dataclasses.replace(small, model=adapted)


def _budgets(config: Config, lengths: Lengths) -> Iterator[int]:
    """Smaller budgets that still hold the longest sequence."""
    budget = config.actor.engine.max_tokens_per_device
    least = -(-lengths.longest // GRAIN) * GRAIN
    while budget // 2 >= least:
        budget = budget // 2
        yield budget
    if least < budget:
        yield least


def _halves(count: int) -> Iterator[int]:
    while count > 8:
        count //= 2
        yield count


def _with_budget(config: Config, budget: int) -> Config:
    return _with_engine(config, max_tokens_per_device=budget)


def _with_engine(config: Config, **changes: object) -> Config:
    """Changed settings of the engine of every role."""
    for name in config.used_engines:
        section = getattr(config, name)
        engine = dataclasses.replace(section.engine, **changes)
        config = dataclasses.replace(config, **{name: dataclasses.replace(section, engine=engine)})
    return config


def _replaced(config: Config, section: str, **changes: object) -> Config:
    changed = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})
