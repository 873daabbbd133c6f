"""Frozen weights held in the half precision of computation.

Parameters are float32, so that small steps of the optimizer are not lost, and a pass in half precision rounds those of
products in each product anew. Where nothing is trained they can be rounded once: the same numbers, of half the memory,
without a cast. Norms, embeddings and a head that is tied to them are not rounded by a pass of one process, and stay
wide; FSDP rounds every parameter that it gathers.

A folder that has all its weights in that precision is read so, layer by layer (`linear_layers_in`): matrices of linear
layers, without the head, and of experts are not there in float32. Experts that stay wide (moe/precision.py) are widened
behind it. A folder in float32 is read whole and then rounded, on the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from strop.engines.causal_lm import HALF, CausalLM, head_of
from strop.engines.moe.layers import is_choice_bias, is_class_of_experts, moe_layers
from strop.engines.moe.precision import are_rounded
from strop.engines.multimodal.families import takes_media

_LINEAR = (nn.Linear, Conv1D)


def hold_half(model: CausalLM, *, device: torch.device, is_sharded: bool = False) -> None:
    """Round the weights of a model that is not trained in this process, as its passes do.

    Args:
        model: just loaded.
        device: that computes: on a CPU logits are wide, and so is the head.
        is_sharded: the parameters will be sharded over ranks.
    """
    if model.compute_dtype not in HALF:
        return
    round_weights(
        _all_of(model) if is_sharded else weights_of_products(model.module, device), model.compute_dtype
    )


def round_weights(weights: Iterator[nn.Parameter], dtype: torch.dtype) -> None:
    """Hold weights in this dtype, one after another."""
    for parameter in weights:
        parameter.data = parameter.data.to(dtype)


def hold_base_half(model: CausalLM, *, device: torch.device) -> None:
    """The same of what is frozen beside the adapter of a model that learns, where it loses nothing, as weights of a
    folder in bfloat16 do not: merged and saved weights are then those that were loaded."""
    if model.compute_dtype not in HALF:
        return
    for parameter in weights_of_products(model.module, device):
        if not parameter.requires_grad:
            half = parameter.data.to(model.compute_dtype)
            if torch.equal(half.to(parameter.dtype), parameter.data):
                parameter.data = half


def _all_of(model: CausalLM) -> Iterator[nn.Parameter]:
    named = model.module.named_parameters()
    return (
        parameter for name, parameter in named if parameter.is_floating_point() and not is_choice_bias(name)
    )


def weights_of_products(module: Any, device: torch.device) -> Iterator[nn.Parameter]:
    """Parameters of a model that a pass of one process rounds wherever it reads them."""
    head = head_of(module).weight
    kept = {
        id(weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
    }
    # What reads media asks its weights for their dtype.
    language: nn.Module = module.get_decoder() if takes_media(module.config) else module
    for part in language.modules():
        if not is_multiplied(part):
            continue
        own = list(part.parameters(recurse=False))
        if getattr(part, "weight", None) is not head:
            yield from own
        elif device.type != "cpu" and id(head) not in kept:
            yield from (weight for weight in own if weight is head)  # a bias is added to wide logits


def is_multiplied(part: nn.Module) -> bool:
    """True of a linear layer, and of experts that are rounded."""
    return type(part) in _LINEAR or are_rounded(part)


@contextlib.contextmanager
def linear_layers_in(dtype: torch.dtype, *, vocab_size: int) -> Iterator[None]:
    """Inside, linear layers and experts that this thread makes have parameters of this dtype, in which transformers
    then reads them; the head has not, which may be tied to an embedding. Threads beside it may load models of their
    own."""
    thread = threading.get_ident()

    def registered(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread:  # hooks are of the process
            return None
        if parameter is None or name in layer._parameters:  # later ones come from a file, or are tied
            return None
        is_head = type(layer) in _LINEAR and parameter.shape[0] == vocab_size
        if is_head or not (type(layer) in _LINEAR or is_class_of_experts(type(layer))):
            return None
        return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)

    # torch declares that it takes nothing back, and says that it does.
    handle = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def widen_others(module: Any, dtype: torch.dtype) -> None:
    """Hold in float32 what `linear_layers_in` has read in this dtype and no product reads so: heads of one output, and
    what reads media. Experts stay until it is known how they multiply (moe/precision.py)."""
    of_products = {id(weight) for weight in weights_of_products(module, torch.device("cpu"))}
    of_products |= {id(weight) for layer in moe_layers(module) for weight in layer.experts.parameters()}
    for parameter in module.parameters():
        if parameter.dtype == dtype and id(parameter) not in of_products:
            parameter.data = parameter.data.float()


class WideProducts(TorchFunctionMode):
    """Inside, linear layers compute in float32 with weights that are held in half precision, one layer at a time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func in (F.linear, torch.addmm)
        if is_product and any(isinstance(part, nn.Parameter) and part.dtype in HALF for part in args):
            args = tuple(part.float() if isinstance(part, Tensor) else part for part in args)
        return func(*args, **(kwargs or {}))
