"""Numbers of layers of pipeline stages: as many for all, those of engine.pipeline_layers, or those that follow from
fields of megatron-core's TransformerConfig. All of them reach megatron-core as a layout.

megatron-core itself is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.engines.config import EngineConfig
from strop.engines.parallel.stages import check_has_stages, check_stage_layers
from strop.utils.setting_text import setting_text

_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
STAGE_FIELDS = (_FIRST, _LAST, _EMBEDDING, _LOSS)
"""Fields of TransformerConfig that say how many layers stages have."""


def check_stage_fields(engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse fields that do not go together, or not with the rest of the engine's settings, whatever the model.

    Args:
        engine: settings of the role.
        section: what the sentence calls them.

    Raises:
        ValueError: the sentence names them.
    """
    fields = _set_fields(engine)
    key = f"{section}.megatron.transformer_config"
    for name in (_FIRST, _LAST):
        value = fields.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{key} sets {name} to {setting_text(value, quotes=True)}, but it needs a whole number of at least 1; "
                f"null is none"
            )
    if fields:
        check_has_stages(engine, f"{key} sets {_said(fields)}", section=section)
    if fields and engine.pipeline_layers:
        raise ValueError(
            f"{key} sets {_said(fields)}, and {section}.pipeline_layers is {list(engine.pipeline_layers)}, which both "
            f"say how many layers stages have: leave one of them out"
        )
    if {_FIRST, _LAST} & fields.keys() and {_EMBEDDING, _LOSS} & fields.keys():
        raise ValueError(
            f"{key} sets {_said(fields)}, of which megatron-core takes either numbers of layers or what counts as one: "
            f"leave one of them out"
        )


def stage_sizes(engine: EngineConfig, num_layers: int, *, section: str = "engine") -> tuple[int, ...]:
    """Layers of each stage, in the order in which tokens pass them; empty where all have as many.

    The first and the last number are those of a rank, which has pipeline_chunks stages of one size.

    Args:
        engine: settings of the role, as `check_stage_fields` leaves them.
        num_layers: of the model.
        section: what the sentence calls the settings.

    Raises:
        ValueError: the model has another number of layers, or they do not divide over what is left.
    """
    fields = _set_fields(engine)
    if engine.pipeline_layers:
        check_stage_layers(engine, num_layers, section=section)
        return engine.pipeline_layers
    if not fields:
        return ()
    if _FIRST in fields or _LAST in fields:
        return _around_the_middle(engine, fields, num_layers, section)
    return _counting_others(engine, fields, num_layers, section)


def stage_layout(sizes: Sequence[int]) -> list[list[str]]:
    """The stages of a model as megatron-core's `pipeline_model_parallel_layout`."""
    stages = [["decoder"] * size for size in sizes]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _around_the_middle(
    engine: EngineConfig, fields: Mapping[str, Any], num_layers: int, section: str
) -> tuple[int, ...]:
    """Stages by the layers of the first and the last rank; the ranks between them have as many each."""
    ranks, chunks = engine.pipeline_parallel, engine.pipeline_chunks
    left = num_layers - fields.get(_FIRST, 0) - fields.get(_LAST, 0)
    num_others = ranks - (_FIRST in fields) - (_LAST in fields)
    each = left // num_others if num_others else 0
    of_ranks = [fields.get(_FIRST, each), *[each] * (ranks - 2), fields.get(_LAST, each)]
    if sum(of_ranks) != num_layers or min(of_ranks) < 1:
        raise ValueError(
            f"{section}.megatron.transformer_config sets {_said(fields)}, which leaves {left} of the {num_layers} "
            f"layers of the model to {num_others} other ranks of {section}.pipeline_parallel={ranks}: choose numbers "
            f"that leave each of them as many, {_alternative(section)}"
        )
    if odd := [size for size in of_ranks if size % chunks]:
        raise ValueError(
            f"{section}.megatron.transformer_config sets {_said(fields)}, which gives a rank {odd[0]} layers, but "
            f"{section}.pipeline_chunks is {chunks}: choose multiples of it, {_alternative(section)}"
        )
    return tuple(size // chunks for size in of_ranks) * chunks


def _counting_others(
    engine: EngineConfig, fields: Mapping[str, Any], num_layers: int, section: str
) -> tuple[int, ...]:
    """Stages of one size, in which the embedding, the loss, or both count as a layer."""
    num_stages = engine.pipeline_parallel * engine.pipeline_chunks
    each, rest = divmod(num_layers + len(fields), num_stages)
    sizes = [each] * num_stages
    sizes[0] -= _EMBEDDING in fields
    sizes[-1] -= _LOSS in fields
    if rest or min(sizes) < 1:
        raise ValueError(
            f"{section}.megatron.transformer_config sets {_said(fields)}, by which the {num_layers} layers of the "
            f"model count as {num_layers + len(fields)}, and {section}.pipeline_parallel times "
            f"{section}.pipeline_chunks is {num_stages}: choose a divisor that leaves every stage a layer, "
            f"{_alternative(section)}"
        )
    return tuple(sizes)


def _set_fields(engine: EngineConfig) -> dict[str, Any]:
    """The stage fields that are set; null and false are not."""
    fields = engine.megatron.transformer_config
    return {
        name: fields[name]
        for name in STAGE_FIELDS
        if fields.get(name) is not None and fields[name] is not False
    }


def _alternative(section: str) -> str:
    return f"or name the layers of every stage in {section}.pipeline_layers instead"


def _said(fields: Mapping[str, Any]) -> str:
    return " and ".join(f"{name}={setting_text(value)}" for name, value in fields.items())
