"""Search for a placement: together or apart, sizes of pools, parallel axes, staleness, by the cost model of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from strop.config.difference import overrides_between
from strop.trainer.config import Config
from strop.trainer.plan.candidates import Candidate, axis_choices, candidates, values_of
from strop.trainer.plan.changes import with_values
from strop.trainer.plan.devices import Device
from strop.trainer.plan.memory import least_bytes, phases_of
from strop.trainer.plan.placement_prices import Prices
from strop.trainer.plan.roles import RolePlan, planned_roles, shapes_of
from strop.trainer.plan.step_time import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A placement that fits, and what it costs."""

    before: Config
    """The run's configuration."""
    config: Config
    """The same, placed."""
    devices: int
    peak_bytes: int
    """Of a rank."""
    time: StepTime

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides that place it, on top of the run's configuration."""
        return overrides_between(self.before, self.config)

    @property
    def device_hours(self) -> float:
        """Of a step."""
        return self.time.step * self.devices / 3600


@dataclass(frozen=True, kw_only=True)
class Placements:
    """The best ones that were found."""

    fastest: Placement | None
    cheapest: Placement | None
    """By device-hours of a step."""
    num_tried: int
    num_fitting: int
    """Of these, whose memory fits."""


def search(
    config: Config, roles: Sequence[RolePlan], device: Device, *, devices: int, available: float
) -> Placements:
    """Try placements on so many devices, and on fewer.

    Args:
        config: of the run; its batch sizes and budgets stay as they are.
        roles: of the run, with their models and lengths.
        device: of every rank, an accelerator.
        devices: most of them.
        available: bytes of each.
    """
    prices, priced, num_tried = Prices(config, roles, device, available), list[tuple[Candidate, float]](), 0
    for candidate in candidates(devices, axis_choices(roles)):
        num_tried += 1
        seconds = prices.step_seconds(candidate)
        if seconds is not None:
            priced.append((candidate, seconds))
    tried = partial(placed_run, config, roles, device=device, available=available)
    return Placements(
        fastest=_first(tried, sorted(priced, key=lambda price: price[1])),
        cheapest=_first(tried, sorted(priced, key=lambda price: price[1] * price[0].devices)),
        num_tried=num_tried,
        num_fitting=len(priced),
    )


def _first(
    tried: Callable[[Candidate], Placement | None], priced: Iterable[tuple[Candidate, float]]
) -> Placement | None:
    """The first one that is a run's configuration: settings that do not go together are found when they are read."""
    return next((placement for candidate, _ in priced if (placement := tried(candidate)) is not None), None)


def placed_run(
    config: Config, roles: Sequence[RolePlan], candidate: Candidate, *, device: Device, available: float
) -> Placement | None:
    """A run that is placed so, planned like any other; None where it does not fit, or its settings do not go
    together."""
    lengths, shapes = roles[0].lengths, shapes_of(roles)
    try:
        placed = with_values(config, values_of(config, candidate, device.per_node))
        planned = planned_roles(placed, lengths, is_accelerator=True, shapes=shapes)
        if least_bytes(placed, planned, device_bytes=available) > available:
            return None
        phases = phases_of(placed, planned, device_bytes=available)
    except ValueError:
        return None
    peak = max(phase.device_bytes for phase in phases)
    if peak > available:
        return None
    return Placement(
        before=config,
        config=placed,
        devices=candidate.devices,
        peak_bytes=peak,
        time=step_time(placed, planned, device, phases),
    )
