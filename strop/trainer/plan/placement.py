"""Search for a placement: together or apart, sizes of pools, parallel axes, staleness, by the cost model of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.config.difference import overrides_between
from strop.engines.moe.layers import num_experts
from strop.rollout.registry import OWN_PROCESSES
from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.changes import of_engines, with_values
from strop.trainer.plan.devices import Device
from strop.trainer.plan.memory import least_bytes, phases_of
from strop.trainer.plan.roles import RolePlan, Shape, planned_roles, shapes_of
from strop.trainer.plan.step_time import StepTime, step_time

TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
EXPERTS = (8, 16, 32, 64)
APART_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices, for generation."""
FEWER = (1, 2, 4, 8)
"""Divisors of the number of devices that are tried for the cheapest placement."""
SHARE_APART = 0.85
"""Of the memory of a device that generates alone, for its engine."""
SHARE_KEYS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}


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


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    devices: int
    apart: int
    """Of these, for generation alone."""
    tensor: int
    pipeline: int
    experts: int
    checkpointing: bool
    engine_ranks: int
    """Of an engine of the pool apart."""


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
    found, num_tried = list[Placement](), 0
    lengths, shapes = roles[0].lengths, shapes_of(roles)
    has_experts = num_experts(roles[0].shape.config) > 0
    for candidate in _candidates(devices, has_experts=has_experts):
        num_tried += 1
        placement = _tried(config, candidate, device, lengths=lengths, shapes=shapes, available=available)
        if placement is not None:
            found.append(placement)
    return Placements(
        fastest=min(found, key=lambda placement: placement.time.step, default=None),
        cheapest=min(found, key=lambda placement: placement.device_hours, default=None),
        num_tried=num_tried,
        num_fitting=len(found),
    )


def _candidates(most: int, *, has_experts: bool) -> Iterator[_Candidate]:
    counts = sorted({max(1, most // divisor) for divisor in FEWER}, reverse=True)
    for devices, tensor, pipeline, experts, checkpointing in itertools.product(
        counts, TENSOR, PIPELINE, (1, *EXPERTS) if has_experts else (1,), (False, True)
    ):
        for apart in _parts(devices):
            main = devices - apart
            if main % (tensor * pipeline) or (main // pipeline) % experts or main < tensor * pipeline:
                continue
            for engine_ranks in (1, 2, 4, 8, 16, 32) if apart else (1,):
                if apart % engine_ranks == 0 and apart >= engine_ranks:
                    yield _Candidate(
                        devices=devices, apart=apart, tensor=tensor, pipeline=pipeline, experts=experts,
                        checkpointing=checkpointing, engine_ranks=engine_ranks,
                    )  # fmt: skip


def _parts(devices: int) -> Sequence[int]:
    """Sizes of the pool that generates; 0: together."""
    grain = 8 if devices >= 16 else 1
    return (0, *sorted({int(share * devices) // grain * grain for share in APART_SHARES} - {0}))


def _tried(
    config: Config,
    candidate: _Candidate,
    device: Device,
    *,
    lengths: Lengths,
    shapes: Mapping[str, Shape],
    available: float,
) -> Placement | None:
    """The placement; None where it does not fit, or the settings do not go together."""
    try:
        placed = with_values(config, _values(config, candidate, device.per_node))
        roles = planned_roles(placed, lengths, is_accelerator=True, shapes=shapes)
        if least_bytes(placed, roles, device_bytes=available) > available:
            return None
        phases = phases_of(placed, roles, device_bytes=available)
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
        time=step_time(placed, roles, device),
    )


def _values(config: Config, candidate: _Candidate, per_node: int) -> dict[str, object]:
    """Values of a candidate by their full keys, those of all that is searched included."""
    main = candidate.devices - candidate.apart
    nodes = -(-main // per_node)
    return {
        "resources.runtime": "ray" if candidate.devices > 1 else config.resources.runtime,
        "resources.ranks": main,
        "resources.nodes": nodes,
        "resources.min_nodes": min(config.resources.min_nodes, nodes),
        "resources.apart": {"rollout": candidate.apart // candidate.engine_ranks} if candidate.apart else {},
        "model.gradient_checkpointing": candidate.checkpointing,
        **of_engines(
            config,
            tensor_parallel=candidate.tensor,
            pipeline_parallel=candidate.pipeline,
            expert_parallel=candidate.experts,
            sequence_parallel=1,
            context_parallel=1,
            pipeline_layers=(),
        ),
        **_values_of_generation(config, candidate),
    }


def _values_of_generation(config: Config, candidate: _Candidate) -> dict[str, object]:
    """An engine over several devices is one in processes of its own."""
    rollout = config.rollout
    values: dict[str, object] = {"rollout.max_staleness": 1.0 if candidate.apart else 0.0}
    engine = rollout.engine
    if candidate.engine_ranks > 1 and rollout.own_processes is None:
        values["rollout.engine"] = engine = "vllm"
    if candidate.apart:
        values["rollout.replicas"] = 1  # each process has one engine
    if engine in OWN_PROCESSES:
        values[f"rollout.{engine}.tensor_parallel"] = candidate.engine_ranks
        values[f"rollout.{engine}.pipeline_parallel"] = 1
        if candidate.apart:
            values[f"rollout.{engine}.{SHARE_KEYS[engine]}"] = SHARE_APART
    return values
