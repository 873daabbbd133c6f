"""The axes over which a role's ranks divide rows, sequences and the model, compared with their number."""

from __future__ import annotations

from strop.engines.config import EngineConfig
from strop.engines.parallel.stages import check_stage_settings


def check_axes(engine: EngineConfig, num_ranks: int, *, section: str = "engine") -> None:
    """Refuse axes that do not divide the ranks of a role.

    Args:
        engine: says how many ranks each axis has.
        num_ranks: of the role.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: as of `check_stage_settings`; an axis does not divide the ranks that the others leave it; or both of
            two axes share the tokens of a sequence out between layers.
    """
    if engine.sequence_parallel > 1 and engine.tensor_parallel > 1:
        raise ValueError(
            f"{section}.sequence_parallel is {engine.sequence_parallel} and {section}.tensor_parallel is "
            f"{engine.tensor_parallel}, which both share the tokens of a sequence out: set one of them to 1"
        )
    check_stage_settings(engine, section=section)
    remaining = num_ranks
    for key, size in (
        ("pipeline_parallel", engine.pipeline_parallel),
        ("tensor_parallel", engine.tensor_parallel),
        ("sequence_parallel", engine.sequence_parallel),
        ("context_parallel", engine.context_parallel),
    ):
        _check_divides(f"{section}.{key}", size, remaining, num_ranks)
        remaining //= size
    in_stage = num_ranks // engine.pipeline_parallel
    _check_divides(f"{section}.expert_parallel", engine.expert_parallel, in_stage, num_ranks)
    shard_size = engine.shard_size or 1
    _check_divides(f"{section}.shard_size", shard_size, in_stage // engine.tensor_parallel, num_ranks)


def without_adapted_experts(engine: EngineConfig) -> dict[str, tuple[object, object]]:
    """Settings that adapters of experts do not go with unless they have a value: what each is, and that value."""
    return {
        "expert_parallel": (engine.expert_parallel, 1),
        "tensor_parallel": (engine.tensor_parallel, 1),
        # One sum of the adapter and all experts, whose graph is gone after the first weight's gradient.
        "pipeline_schedule": (engine.pipeline_schedule, "1f1b"),
    }


def _check_divides(key: str, size: int, remaining: int, num_ranks: int) -> None:
    if remaining % size:
        others = "" if remaining == num_ranks else f", of which the other axes leave it {remaining}"
        choices = [n for n in range(1, remaining + 1) if remaining % n == 0]
        if num_ranks == 1:
            raise ValueError(
                f"{key} is {size}, but the role has one rank: more of them come with resources.runtime=ray "
                f"resources.ranks={size}"
            )
        raise ValueError(
            f"{key} is {size}, which does not divide the {num_ranks} ranks of the role{others}: choose one of "
            f"{', '.join(map(str, choices))}, or change the number of ranks"
        )
