"""The tensors that a checkpoint of a trained role holds, and their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.lora.adapters import has_adapter
from strop.engines.moe.layers import is_choice_bias
from strop.engines.weights import named_weights, weights_metadata

MODEL, OPTIMIZER = "model/", "optim/"
"""Beginnings of names of saved tensors."""


def role_tensors(model: CausalLM) -> dict[str, Tensor]:
    """The live tensors that a checkpoint of this model holds: all weights, or what is trained beside a frozen base."""
    if has_adapter(model):
        return {MODEL + name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = named_weights(model.module)
    return {MODEL + weight.name: tensors[weight.name] for weight in weights_metadata(model.module)}


def present(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of this stage."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def of_other_stages(model: CausalLM, moments: Collection[str]) -> list[str]:
    """Names, or beginnings of names, in a checkpoint of what other stages have; `moments` are names of this one's."""
    if model.pipeline is None:
        return []
    others = [name for name, tensor in role_tensors(model).items() if tensor.is_meta]
    if not moments:  # a stage without anything trained does not know their kinds
        return [*others, OPTIMIZER]
    kinds = sorted({name.partition("/")[0] for name in moments})
    return others + [f"{OPTIMIZER}{kind}/{weight_of(name)}" for kind in kinds for name in others]


def of_choice_biases(model: CausalLM, moments: Collection[str]) -> list[str]:
    """Names in a checkpoint of moments of biases by which experts are chosen: earlier versions trained these."""
    kinds = sorted({name.partition("/")[0] for name in moments})
    biases = [weight_of(name) for name in role_tensors(model) if is_choice_bias(name)]
    return [f"{OPTIMIZER}{kind}/{name}" for kind in kinds for name in biases]


def weight_of(name: str) -> str:
    """Name of the weight that a saved tensor belongs to."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return name.removeprefix(OPTIMIZER).partition("/")[2]
