"""The tensors that a checkpoint of a trained role holds, and their names."""

from __future__ import annotations

from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.lora.adapters import has_adapter
from strop.engines.weights import named_weights, weights_metadata

MODEL, OPTIMIZER = "model/", "optim/"
"""Beginnings of names of saved tensors."""


def role_tensors(model: CausalLM) -> dict[str, Tensor]:
    """The live tensors that a checkpoint of this model holds: all weights, or what is trained beside a frozen base."""
    if has_adapter(model):
        return {MODEL + name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = named_weights(model.module)
    return {MODEL + weight.name: tensors[weight.name] for weight in weights_metadata(model.module)}
