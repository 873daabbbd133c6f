"""What the core asks of a guest that knows adapters: small matrices that are trained in place of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from strop.base.guests import needed
from strop.engines.causal_lm import CausalLM


def has_adapter(model: CausalLM) -> bool:
    """Whether the model has adapters."""
    return hasattr(model.module, "peft_config")


def adapters() -> Any:
    """The module that knows them (strop.engines.lora.adapters).

    Raises:
        ValueError: it is missing from this installation.
    """
    return needed("adapters", "model.lora asks for an adapter")


def merged_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]] | None:
    """Every weight with its adapter added; None where the model has none, and its weights are as they are."""
    return adapters().merged_tensors(model) if has_adapter(model) else None
