"""Placements that a search tries: sizes of pools, axes that the models can be cut into, and the settings of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from strop.engines.parallel.experts import check_expert_parallel
from strop.engines.parallel.stages import check_pipeline_parallel
from strop.engines.parallel.tensor import check_tensor_parallel
from strop.rollout.registry import OWN_PROCESSES
from strop.trainer.config import Config
from strop.trainer.plan.changes import of_engines
from strop.trainer.plan.meta_model import truncated_module
from strop.trainer.plan.roles import RolePlan

TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
EXPERTS = (8, 16, 32, 64)
APART_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the devices, for generation."""
ENGINE_RANKS = (1, 2, 4, 8, 16, 32)
FEWER = (1, 2, 4, 8)
"""Divisors of the number of devices that are tried for the cheapest placement."""
SHARE_APART = 0.85
"""Of the memory of a device that generates alone, for its engine."""
SHARE_KEYS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}


@dataclass(frozen=True, kw_only=True)
class AxisChoices:
    """Sizes of axes that every model can be cut into."""

    tensor: Sequence[int]
    pipeline: Sequence[int]
    experts: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement that is tried."""

    devices: int
    apart: int
    """Of these, for generation alone."""
    tensor: int
    pipeline: int
    experts: int
    checkpointing: bool
    engine_ranks: int
    """Of an engine of the pool apart."""

    @property
    def main(self) -> int:
        """Devices that train."""
        return self.devices - self.apart


def axis_choices(roles: Sequence[RolePlan]) -> AxisChoices:
    """Sizes of the axes that the engine does not refuse for any of the models."""

    def possible(sizes: Sequence[int], check: Callable[[RolePlan, int], None]) -> Sequence[int]:
        kept = []
        for size in sizes:
            with contextlib.suppress(ValueError):
                for role in roles:
                    check(role, size)
                kept.append(size)
        return kept

    def check_stages(role: RolePlan, size: int) -> None:
        engine = dataclasses.replace(role.engine, pipeline_parallel=size, pipeline_layers=())
        check_pipeline_parallel(role.shape.config, engine)

    def check_experts(role: RolePlan, size: int) -> None:
        if size > 1:
            module, _, _ = truncated_module(role.shape.config, role.form)
            check_expert_parallel(role.shape.config, size, module=module)

    return AxisChoices(
        tensor=possible(TENSOR, lambda role, size: check_tensor_parallel(role.shape.config, size)),
        pipeline=possible(PIPELINE, check_stages),
        experts=possible((1, *EXPERTS), check_experts),
    )


def candidates(most: int, choices: AxisChoices) -> Iterator[Candidate]:
    """Placements on so many devices, and on fewer."""
    counts = sorted({max(1, most // divisor) for divisor in FEWER}, reverse=True)
    for devices, tensor, pipeline, experts, checkpointing in itertools.product(
        counts, choices.tensor, choices.pipeline, choices.experts, (False, True)
    ):
        for apart in _parts(devices):
            main = devices - apart
            if main % (tensor * pipeline) or (main // pipeline) % experts or main < tensor * pipeline:
                continue
            for engine_ranks in ENGINE_RANKS if apart else (1,):
                if apart % engine_ranks == 0:
                    yield Candidate(
                        devices=devices, apart=apart, tensor=tensor, pipeline=pipeline, experts=experts,
                        checkpointing=checkpointing, engine_ranks=engine_ranks,
                    )  # fmt: skip


def _parts(devices: int) -> Sequence[int]:
    """Sizes of the pool that generates; 0: together."""
    grain = 8 if devices >= 16 else 1
    return (0, *sorted({int(share * devices) // grain * grain for share in APART_SHARES} - {0}))


def values_of(config: Config, candidate: Candidate, per_node: int) -> dict[str, object]:
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
        **of_engines(config, **axis_values(candidate)),
        **_values_of_generation(config, candidate),
    }


def axis_values(candidate: Candidate) -> dict[str, object]:
    """Values of the engine of every role."""
    return {
        "tensor_parallel": candidate.tensor,
        "pipeline_parallel": candidate.pipeline,
        "expert_parallel": candidate.experts,
        "sequence_parallel": 1,
        "context_parallel": 1,
        "pipeline_layers": (),
    }


def _values_of_generation(config: Config, candidate: Candidate) -> dict[str, object]:
    """An engine over several devices is one in processes of its own."""
    rollout = config.rollout
    values: dict[str, object] = {"rollout.max_staleness": 1.0 if candidate.apart else 0.0}
    if not candidate.apart and rollout.max_staleness > 0 and config.algorithm.old_log_probs == "rollout":
        values["algorithm.old_log_probs"] = None  # as of a run without staleness, which does not set it
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
