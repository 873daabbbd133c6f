"""Stages of a pipeline: the layers of each, and settings that say how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.engines.config import EngineConfig


def check_stage_settings(engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse settings of stages that do not go together, whatever the model.

    Args:
        engine: of the role.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: stages, or their order, are described where there is one; or the order does not go with interleaved
            stages.
    """
    described = []
    if engine.pipeline_chunks > 1:
        described.append(f"{section}.pipeline_chunks={engine.pipeline_chunks}")
    if engine.pipeline_layers:
        described.append(f"{section}.pipeline_layers={list(engine.pipeline_layers)}")
    if described:
        check_has_stages(engine, f"{' and '.join(described)} says how stages are made", section=section)
    if engine.pipeline_schedule != "zero_bubble":
        return
    chosen = f"{section}.pipeline_schedule is zero_bubble"
    check_has_stages(engine, f"{chosen}, an order of the passes of several stages", section=section)
    if engine.pipeline_chunks > 1:
        raise ValueError(
            f"{chosen} and {section}.pipeline_chunks is {engine.pipeline_chunks}, but it is an order for one run of "
            f"layers on each rank: set {section}.pipeline_schedule=1f1b, or {section}.pipeline_chunks=1"
        )


def check_has_stages(engine: EngineConfig, described: str, *, section: str) -> None:
    """Refuse a setting of stages where there is one; `described` is the beginning of the sentence, which names it."""
    if engine.pipeline_parallel == 1:
        raise ValueError(f"{described}, but {section}.pipeline_parallel is 1: leave it out, or set that")


def check_pipeline_parallel(config: Any, engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse a model whose layers cannot be divided into stages.

    Args:
        config: the model's configuration as transformers reads it.
        engine: of the role.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: fewer layers than stages, other numbers of layers than the model has, or transformers does not say
            where the model can be divided.
    """
    num_ranks = engine.pipeline_parallel
    if num_ranks == 1:
        return
    text = config.get_text_config()
    key = f"{section}.pipeline_parallel"
    num_layers, num_stages = int(text.num_hidden_layers), num_ranks * engine.pipeline_chunks
    if text is not config:
        raise ValueError(f"{key} is {num_ranks}, but {config.model_type} reads images; use {key}=1")
    if len(getattr(config, "base_model_pp_plan", None) or {}) != 3:
        raise ValueError(
            f"{key} is {num_ranks}, but transformers does not divide {config.model_type} into an embedding, layers and "
            f"a norm; use {key}=1"
        )
    if num_layers < num_stages:
        raise ValueError(
            f"{key} is {num_ranks} with {section}.pipeline_chunks={engine.pipeline_chunks}, which makes {num_stages} "
            f"stages, but the model has {num_layers} layers; use at most one stage per layer"
        )
    check_stage_layers(engine, num_layers, section=section)


def check_stage_layers(engine: EngineConfig, num_layers: int, *, section: str = "engine") -> None:
    """Refuse numbers of layers of stages that are not those of the model.

    Args:
        engine: says how many each stage has, where `pipeline_layers` is set.
        num_layers: of the model.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: another number of stages, or of layers.
    """
    sizes, num_stages = engine.pipeline_layers, engine.pipeline_parallel * engine.pipeline_chunks
    if sizes and (len(sizes), sum(sizes)) != (num_stages, num_layers):
        raise ValueError(
            f"{section}.pipeline_layers is {list(sizes)}, {sum(sizes)} layers in {len(sizes)} stages, but the model "
            f"has {num_layers} layers and the engine {num_stages} stages"
        )


def stage_layers(num_layers: int, num_stages: int, sizes: Sequence[int] = ()) -> list[range]:
    """Layers of each stage: of these sizes, else as evenly as they can, stages in the middle first, as the first and
    the last one have embedding and head."""
    if not sizes:
        each, remaining = divmod(num_layers, num_stages)
        middle_first = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
        sizes = [each + (middle_first.index(stage) < remaining) for stage in range(num_stages)]
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
