"""What the core asks of a guest that knows adapters: small matrices that are trained in place of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor, nn

from strop.base.guests import needed
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig


class Adapters(Protocol):
    """The module that joins at the place "adapters"."""

    def add_lora(self, model: CausalLM, config: LoraConfig) -> None:
        """Put adapters into a model that was just loaded, and freeze everything else, except a value head."""

    def check_targets(self, module: nn.Module, config: LoraConfig) -> None:
        """Raise a ValueError for names of layers that take no adapter; no weight is looked at."""

    def adapter_off(self, model: CausalLM) -> AbstractContextManager[None]:
        """Inside, the model computes what it did without the adapter."""

    def merged_tensors(self, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
        """Every weight as a full tensor with its adapter added, in the order of `weights.weights_metadata`."""

    def save_merged(self, model: CausalLM, folder: Path, *, write: bool) -> None:
        """Write the model with the adapter added as a Hugging Face folder; False for a rank that helps to gather."""


def has_adapter(model: CausalLM) -> bool:
    """Whether the model has adapters."""
    return hasattr(model.module, "peft_config")


def adapters() -> Adapters:
    """What knows them.

    Raises:
        ValueError: it is missing from this installation.
    """
    return cast(Adapters, needed("adapters", "model.lora asks for an adapter"))


def merged_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]] | None:
    """Every weight with its adapter added; None where the model has none, and its weights are as they are."""
    return adapters().merged_tensors(model) if has_adapter(model) else None
