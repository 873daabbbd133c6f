"""The smallest change of a configuration with which its memory fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.config.difference import overrides_between
from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.candidates import axis_choices
from strop.trainer.plan.changes import of_engines, with_values
from strop.trainer.plan.memory import least_bytes, phases_of
from strop.trainer.plan.roles import RolePlan, planned_roles, shapes_of

GRAIN = 256
"""Budgets are multiples of so many tokens."""
LARGEST = 4096
"""Most ranks that are tried."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which a run fits."""

    settings: tuple[str, ...]
    """Overrides, on top of the run's configuration."""
    peak_bytes: int
    """Of a rank, with them."""


def smallest_change(
    config: Config,
    roles: Sequence[RolePlan],
    available: float,
    *,
    is_accelerator: bool,
    per_node: int,
) -> Change | None:
    """The first that fits of: half the budget and so on, fewer sequences, gradients summed after each micro-batch,
    checkpointing, all of these, offload, ranks that share matrices, more ranks (of each number first those that share
    none), an adapter.

    Args:
        config: of the run, which does not fit.
        roles: of the run.
        available: bytes of a rank.
        is_accelerator: the roles run on one.
        per_node: devices of a node.

    Returns:
        None where none does.
    """
    lengths, shapes = roles[0].lengths, shapes_of(roles)
    device_bytes = available if is_accelerator else None
    is_whole = all(engine.tensor_parallel == 1 for engine in config.used_engines.values())
    sizes = axis_choices(roles).tensor if is_accelerator and is_whole else (1,)
    tensor_parallel = [size for size in sizes if size <= per_node]
    for values in _candidates(config, lengths, is_accelerator, per_node, tensor_parallel):
        try:
            changed = with_values(config, values)
            planned = planned_roles(changed, lengths, is_accelerator=is_accelerator, shapes=shapes)
            if least_bytes(changed, planned, device_bytes=device_bytes) > available:
                continue
            phases = phases_of(changed, planned, device_bytes=device_bytes)
        except ValueError:  # a budget below the longest sequence, or settings that do not go together
            continue
        peak = max(phase.device_bytes for phase in phases)
        if peak <= available:
            return Change(settings=overrides_between(config, changed), peak_bytes=peak)
    return None


def _candidates(
    config: Config, lengths: Lengths, is_accelerator: bool, per_node: int, tensor_parallel: Sequence[int]
) -> Iterator[Mapping[str, object]]:
    """Changed values by their full keys, the smallest change first; arguments as of `smallest_change`, and the sizes of
    tensor parallelism that ranks are tried with, 1 for none."""
    budgets = [of_engines(config, max_tokens_per_device=budget) for budget in _budgets(config, lengths)]
    running = [{"rollout.max_running": count} for count in _halves(config.rollout.max_running)]
    syncs = []
    if config.resources.ranks > 1 and config.actor.engine.gradient_sync == "last":
        syncs = [of_engines(config, gradient_sync="each")]
    checkpointing: dict[str, object] = {"model.gradient_checkpointing": True}
    yield from budgets
    yield from running
    yield from syncs
    if not config.model.gradient_checkpointing:
        yield checkpointing
    small = checkpointing
    for part in (budgets[-1:], running[-1:], syncs):
        if part:
            small = {**small, **part[0]}
            yield small
    if is_accelerator:
        yield {**small, **of_engines(config, offload="optimizer")}
        own = config.resources.ranks
        for ranks in (own, *_doubled(own)):
            nodes = config.resources.nodes if ranks == own else max(1, ranks // per_node)
            more: dict[str, object] = {}
            if ranks > own:
                more = {"resources.runtime": "ray", "resources.ranks": ranks, "resources.nodes": nodes}
            for tensor in tensor_parallel:
                if ranks // nodes % tensor == 0 and (more or tensor > 1):
                    cut = of_engines(config, tensor_parallel=tensor) if tensor > 1 else {}
                    yield {**small, **cut, **more}
    if not config.model.lora.enabled:
        yield {**small, "model.lora.rank": 16}


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


def _doubled(own: int) -> Iterator[int]:
    """Powers of two that are more ranks than these."""
    ranks = 2
    while ranks <= LARGEST:
        if ranks > own:
            yield ranks
        ranks *= 2
