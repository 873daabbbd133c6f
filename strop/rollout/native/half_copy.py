"""Copy of a model that generates on an accelerator, with weights of products in half precision.

Parameters are float32, so that small steps of the optimizer are not lost, and a forward pass rounds each to half
precision first. In training that is little beside the products; in a decode step it is half of all kernels, and three
times the bytes, and a short prompt that enters beside others is no better. The copy has the rounded weights once,
shares everything else with the policy, and gives the same numbers.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.causal_lm import HALF, CausalLM
from strop.engines.moe.precision import are_rounded


class HalfCopy:
    """A policy whose linear layers, experts and head are rounded copies of another's."""

    def __init__(self, model: CausalLM) -> None:
        """Nothing is copied before `refresh`."""
        self._trained, self._num_changes = model, model.num_changes
        head: Any = model.module.get_output_embeddings()  # type: ignore[operator]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        shared: list[Any] = [*model.module.parameters(), *model.module.buffers()]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
        for part in model.module.modules():
            is_layer = type(part) is nn.Linear and part is not head
            if is_layer or are_rounded(part):
                for tensor in part.parameters(recurse=False):
                    if tensor.dtype != model.compute_dtype:
                        memo[id(tensor)] = self._half_of(tensor, model.compute_dtype)
        module: nn.Module = deepcopy(model.module, memo)
        copied: Any = module.get_output_embeddings()  # type: ignore[operator]
        if head.weight.dtype != model.compute_dtype:  # not tied: rows of embeddings stay wide
            copied.weight = self._half_of(head.weight, model.compute_dtype)
        self.model = CausalLM(module, compute_dtype=model.compute_dtype)
        """The model that generates; only after `refresh`."""
        self.model.unused_tokens = model.unused_tokens
        self._is_current = False

    def _half_of(self, tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
        half = nn.Parameter(torch.empty(0, dtype=dtype, device=tensor.device), requires_grad=False)
        self._pairs.append((tensor, half))
        return half

    @property
    def is_other(self) -> bool:
        """There are rounded weights."""
        return bool(self._pairs)

    @property
    def num_bytes(self) -> int:
        """Memory of the rounded weights, when they are there."""
        return sum(tensor.numel() * half.element_size() for tensor, half in self._pairs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights again if they may have changed. What was captured over the copies stays valid."""
        if self._is_current and self._trained.num_changes == self._num_changes:
            return
        for tensor, half in self._pairs:
            if half.numel() == 0:
                half.data = torch.empty_like(tensor, dtype=half.dtype)
        torch._foreach_copy_([half for _, half in self._pairs], [tensor for tensor, _ in self._pairs])
        self._is_current, self._num_changes = True, self._trained.num_changes

    def weights_changed(self) -> None:
        """The weights may be others from now on."""
        self._is_current = False

    def free(self) -> None:
        """Give the memory back."""
        for _, half in self._pairs:
            half.data = half.data.new_empty(0)
        self._is_current = False


def half_copy(model: CausalLM) -> HalfCopy | None:
    """The copy of a model; None where its decode steps round nothing, as where it was rounded when it was loaded
    (engines/half_weights.py), or where it cannot be copied."""
    if model.device.type == "cpu" or not _rounds(model):
        return None
    half = HalfCopy(model)
    return half if half.is_other else None


def _rounds(model: CausalLM) -> bool:
    """Products round the weights of linear layers and experts, and nothing else reads them: sharded parameters are
    gathered anew, layers with a state and models of media are used through functions that know the module itself."""
    is_plain = model.recurrence is None and model.media is None and not model.is_sharded
    return model.compute_dtype in HALF and is_plain
