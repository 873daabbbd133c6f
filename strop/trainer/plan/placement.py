"""Search for a placement: together or apart, sizes of pools, parallel axes, staleness, by the cost model of a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strop.trainer.config import Config
from strop.trainer.plan.batches import Lengths
from strop.trainer.plan.devices import Device
from strop.trainer.plan.memory import phases_of
from strop.trainer.plan.roles import planned_roles
from strop.trainer.plan.step_time import StepTime, step_time

TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
EXPERTS = (8, 16, 32, 64)
APART_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices, for generation."""
FEWER = (1, 2, 4, 8)
"""Divisors of the number of devices that are tried for the cheapest placement."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A placement that fits, and what it costs."""

    settings: tuple[str, ...]
    devices: int
    peak_bytes: int
    """Of a rank of the main pool."""
    time: StepTime

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
    tensor: int
    pipeline: int
    experts: int
    checkpointing: bool
    engine_ranks: int
    """Of an engine of the pool apart."""


def search(config: Config, lengths: Lengths, device: Device, *, devices: int, available: float) -> Placements:
    """Try placements on so many devices, and on fewer.

    Args:
        config: of the run; its batch sizes and budgets stay as they are.
        lengths: of prompts and answers.
        device: of every rank.
        devices: most of them.
        available: bytes of each.
    """
    found, num_tried = list[Placement](), 0
    for candidate in _candidates(config, devices):
        num_tried += 1
        placement = _tried(config, candidate, lengths, device, available)
        if placement is not None:
            found.append(placement)
    return Placements(
        fastest=min(found, key=lambda placement: placement.time.step, default=None),
        cheapest=min(found, key=lambda placement: placement.device_hours, default=None),
        num_tried=num_tried,
        num_fitting=len(found),
    )


def _candidates(config: Config, most: int) -> Iterator[_Candidate]:
    has_experts = _has_experts(config)
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


def _has_experts(config: Config) -> bool:
    from strop.engines.model import load_model_config
    from strop.engines.moe.layers import num_experts

    return num_experts(load_model_config(config.model)) > 0


def _parts(devices: int) -> Sequence[int]:
    """Sizes of the pool that generates; 0: together."""
    grain = 8 if devices >= 16 else 1
    return (0, *sorted({int(share * devices) // grain * grain for share in APART_SHARES} - {0}))


def _tried(
    config: Config, candidate: _Candidate, lengths: Lengths, device: Device, available: float
) -> Placement | None:
    """The placement; None where it does not fit, or the settings do not go together."""
    try:
        placed = _placed(config, candidate)
        roles = planned_roles(placed, lengths, is_accelerator=not device.is_cpu)
        memory = None if device.is_cpu else available
        phases = [
            phase
            for phase in phases_of(placed, roles, device_bytes=memory)
            if phase.phase != "rollout (apart)"
        ]
    except ValueError:
        return None
    peak = max(phase.device_bytes for phase in phases)
    sizes, item = roles[0].sizes, roles[0].form.compute_dtype.itemsize
    if peak > available or (
        candidate.apart and 1.2 * sizes.total * item / candidate.engine_ranks > available
    ):
        return None
    time = step_time(
        placed,
        roles,
        device,
        apart=candidate.apart,
        engine_ranks=candidate.engine_ranks if candidate.apart else None,
    )
    return Placement(
        settings=_settings(candidate, placed), devices=candidate.devices, peak_bytes=peak, time=time
    )


def _placed(config: Config, candidate: _Candidate) -> Config:
    main = candidate.devices - candidate.apart
    resources = dataclasses.replace(
        config.resources,
        runtime="ray" if candidate.devices > 1 else config.resources.runtime,
        ranks=main,
        nodes=1,
        apart={"rollout": candidate.apart} if candidate.apart else {},
    )
    engine = dataclasses.replace(
        config.actor.engine,
        tensor_parallel=candidate.tensor,
        pipeline_parallel=candidate.pipeline,
        expert_parallel=candidate.experts,
        sequence_parallel=1,
        context_parallel=1,
        pipeline_layers=(),
    )
    changed = dataclasses.replace(config, resources=resources)
    for role in config.used_engines:
        section = dataclasses.replace(getattr(changed, role), engine=engine)
        changed = dataclasses.replace(changed, **{role: section})
    rollout = dataclasses.replace(config.rollout, max_staleness=1.0 if candidate.apart else 0.0)
    model = dataclasses.replace(config.model, gradient_checkpointing=candidate.checkpointing)
    return dataclasses.replace(changed, rollout=rollout, model=model)


def _settings(candidate: _Candidate, placed: Config) -> tuple[str, ...]:
    """The settings of a placement, those that differ from defaults."""
    sizes = {
        "tensor_parallel": candidate.tensor,
        "pipeline_parallel": candidate.pipeline,
        "expert_parallel": candidate.experts,
    }
    settings = [f"resources.ranks={placed.resources.ranks}"]
    if candidate.apart:
        settings += [f"resources.apart={{rollout: {candidate.apart}}}", "rollout.max_staleness=1"]
        if candidate.engine_ranks > 1:
            settings.append(f"rollout.vllm.tensor_parallel={candidate.engine_ranks}")
    settings += [f"actor.engine.{name}={size}" for name, size in sizes.items() if size > 1]
    if candidate.checkpointing:
        settings.append("model.gradient_checkpointing=true")
    return tuple(settings)
