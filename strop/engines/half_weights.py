"""Frozen weights held in the half precision of computation.

Parameters are float32, so that small steps of the optimizer are not lost, and a pass in half precision rounds those of
products in each product anew. Where nothing is trained they can be rounded once: the same numbers, of half the memory,
without a cast. Norms, embeddings, a head that is tied to them, and experts are not rounded by a pass of one process,
and stay wide; FSDP rounds every parameter that it gathers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from strop.engines.causal_lm import HALF, CausalLM


def hold_half(model: CausalLM, *, device: torch.device, is_sharded: bool = False) -> None:
    """Round the weights of a model that is not trained in this process, as its passes do.

    Args:
        model: just loaded.
        device: that computes: on a CPU logits are wide, and so is the head.
        is_sharded: the parameters will be sharded over ranks.
    """
    if model.compute_dtype not in HALF:
        return
    rounded = _all_of(model) if is_sharded else weights_of_products(model, device)
    for parameter in rounded:
        parameter.data = parameter.data.to(model.compute_dtype)


def hold_base_half(model: CausalLM, *, device: torch.device) -> None:
    """The same of what is frozen beside the adapter of a model that learns, where it loses nothing, as weights of a
    folder in bfloat16 do not: merged and saved weights are then those that were loaded."""
    if model.compute_dtype not in HALF:
        return
    for parameter in weights_of_products(model, device):
        if not parameter.requires_grad:
            half = parameter.data.to(model.compute_dtype)
            if torch.equal(half.to(parameter.dtype), parameter.data):
                parameter.data = half


def _all_of(model: CausalLM) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.module.parameters() if parameter.is_floating_point())


def weights_of_products(model: CausalLM, device: torch.device) -> Iterator[nn.Parameter]:
    """Parameters that a pass of one process rounds wherever it reads them."""
    head = model.head_weight
    kept = {
        id(weight)
        for part in model.module.modules()
        if isinstance(part, nn.Embedding)
        for weight in part.parameters(recurse=False)
    }
    # What reads media asks its weights for their dtype.
    language: nn.Module = model.module if model.media is None else model.module.get_decoder()  # type: ignore[operator]
    for part in language.modules():
        if type(part) is not nn.Linear and type(part) is not Conv1D:
            continue
        own = list(part.parameters(recurse=False))
        if part.weight is not head:
            yield from own
        elif device.type != "cpu" and id(head) not in kept:
            yield from (weight for weight in own if weight is head)  # a bias is added to wide logits
