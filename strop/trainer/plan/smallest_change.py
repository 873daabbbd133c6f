"""The smallest change of a configuration with which its memory fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.config.difference import overrides_between
from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.candidates import SHARE_KEYS, axis_choices
from strop.trainer.plan.changes import of_engines, with_values
from strop.trainer.plan.memory import least_bytes, phases_of
from strop.trainer.plan.roles import RolePlan, planned_roles, shapes_of

GRAIN = 256
"""Budgets are multiples of so many tokens."""
LARGEST = 4096
"""Most ranks that are tried."""
ENGINE_SHARES = (0.6, 0.7, 0.8, 0.9)
"""Of a device, for an engine in processes of its own, that are tried."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which a run fits."""

    settings: tuple[str, ...]
    """Overrides, on top of the run's configuration."""
    config: Config
    """The run with them."""
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
    checkpointing, a larger share of the device for an engine of its own, all of these but that, offload, that with
    them, ranks that share matrices, more ranks (of each number first those that share none), an adapter. Of several at
    once, each that is not needed is left out, or is as mild as it may be.

    Args:
        config: of the run, which does not fit.
        roles: of the run.
        available: bytes of a rank.
        is_accelerator: the roles run on one.
        per_node: devices of a node.

    Returns:
        None where none does.
    """
    pricing = _Pricing(config, roles, available, is_accelerator=is_accelerator)
    parts = _parts(config, roles[0].lengths)
    shares = _shares(config) if is_accelerator else []
    for part in (*parts, shares):
        for values in part:
            if change := pricing.change(values):
                return change
    is_whole = all(engine.tensor_parallel == 1 for engine in config.used_engines.values())
    sizes = axis_choices(roles).tensor if is_accelerator and is_whole else (1,)
    tensor_parallel = [size for size in sizes if size <= per_node]
    for values in _together(config, parts, is_accelerator, per_node, tensor_parallel, shares):
        if change := pricing.change(values):
            return _without_the_needless(values, parts, pricing, change)
    return None


Values = Mapping[str, object]
"""Changed values by their full keys."""


class _Pricing:
    """Prices changes of a configuration; arguments as of `smallest_change`."""

    def __init__(
        self, config: Config, roles: Sequence[RolePlan], available: float, *, is_accelerator: bool
    ) -> None:
        self._config, self._available, self._is_accelerator = config, available, is_accelerator
        self._lengths, self._shapes = roles[0].lengths, shapes_of(roles)

    def change(self, values: Values) -> Change | None:
        """The change to these values; None where the run does not fit with them, or they do not go together."""
        device_bytes = self._available if self._is_accelerator else None
        try:
            changed = with_values(self._config, values)
            planned = planned_roles(
                changed, self._lengths, is_accelerator=self._is_accelerator, shapes=self._shapes
            )
            if least_bytes(changed, planned, device_bytes=device_bytes) > self._available:
                return None
            phases = phases_of(changed, planned, device_bytes=device_bytes)
        except ValueError:  # a budget below the longest sequence, or settings that do not go together
            return None
        peak = max(phase.device_bytes for phase in phases)
        if peak > self._available:
            return None
        settings = overrides_between(self._config, changed)
        return Change(settings=settings, config=changed, peak_bytes=peak)


def _parts(config: Config, lengths: Lengths) -> list[list[Values]]:
    """Changes that cost time alone, the smallest part first: of each part the values, the mildest first."""
    budgets: list[Values] = [
        of_engines(config, max_tokens_per_device=budget) for budget in _budgets(config, lengths)
    ]
    running: list[Values] = [{"rollout.max_running": count} for count in _halves(config.rollout.max_running)]
    syncs: list[Values] = []
    if config.resources.ranks > 1 and config.actor.engine.gradient_sync == "last":
        syncs = [of_engines(config, gradient_sync="each")]
    checkpointing: list[Values] = []
    if not config.model.gradient_checkpointing:
        checkpointing = [{"model.gradient_checkpointing": True}]
    return [part for part in (budgets, running, syncs, checkpointing) if part]


def _shares(config: Config) -> list[Values]:
    """Larger shares of the device for an engine in processes of its own, the smallest first."""
    own, engine = config.rollout.own_processes, config.rollout.engine
    if own is None:
        return []
    key = f"rollout.{engine}.{SHARE_KEYS[engine]}"
    return [{key: share} for share in ENGINE_SHARES if share > own.memory_share]


def _together(
    config: Config,
    parts: Sequence[Sequence[Values]],
    is_accelerator: bool,
    per_node: int,
    tensor_parallel: Sequence[int],
    shares: Sequence[Values],
) -> Iterator[Values]:
    """Several changes at once, the smallest first: the strongest of all parts, then with offload, ranks, an adapter.

    Args:
        config, is_accelerator, per_node: as of `smallest_change`.
        parts: as of `_parts`.
        tensor_parallel: sizes that ranks are tried with, 1 for none.
        shares: as of `_shares`.
    """
    small: dict[str, object] = {}
    for part in parts:
        small |= part[-1]
    yield small
    if is_accelerator:
        offloaded: list[Values] = [of_engines(config, offload=kind) for kind in ("optimizer", "all")]
        yield {**small, **offloaded[0]}
        for moved in ({}, *offloaded):
            yield from ({**small, **moved, **share} for share in shares)
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


def _without_the_needless(
    values: Values, parts: Sequence[Sequence[Values]], pricing: _Pricing, change: Change
) -> Change:
    """The mildest values of each part with which the run fits still, the largest part first.

    Args:
        values: with the strongest of all parts, that fit.
        parts: as of `_parts`.
        pricing: of the run.
        change: the one to these values.
    """
    for part in reversed(parts):
        others = {key: value for key, value in values.items() if key not in part[-1]}
        for milder in ({}, *part[:-1]):
            kept = {**others, **milder}
            if fitting := pricing.change(kept):
                values, change = kept, fitting
                break
    return change


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
