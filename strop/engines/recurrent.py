"""Layers that carry a state from token to token (linear attention), on packed rows.

Such a layer has no keys to gather: each sequence of a row is given to the layer's own function by itself, the tokens
that it continues before it. In training these are computed again for every sample of a prompt; in rollout the state
behind them is kept (rollout/native/states.py).

Source: Yang et al. 2024, arXiv:2412.06464 (gated delta rule), as Qwen3-Next has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CARRIED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types whose layers of this kind keep a convolution's last inputs and a matrix for each head, and ask for them
in the way of `LayerState`."""
LINEAR = "linear_attention"


class LayerState:
    """What one layer has kept of sequences, in the form in which layers of transformers ask for it.

    The layer is a part of a model; its number there, `layer_idx`, is of no matter.
    """

    def __init__(self, convolution: Tensor | None = None, matrix: Tensor | None = None) -> None:
        """Args:
        convolution: [B, C, K], the last inputs of the convolution; None where nothing came before.
        matrix: [B, H, Dk, Dv], the state behind the last token. Given tensors are written to.
        """
        self.convolution, self.matrix = convolution, matrix

    def kept(self) -> tuple[Tensor, Tensor]:
        """Both parts, after the layer has run."""
        assert self.convolution is not None, "the layer has kept its inputs"
        assert self.matrix is not None, "the layer has kept its state"
        return self.convolution, self.matrix

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of the convolution."""
        return self.convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state behind the last token."""
        return self.matrix

    def is_recording_past(self, layer_idx: int) -> bool:
        """Earlier states are not kept."""
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any) -> Tensor:
        """Inputs [B, C, T] behind the last ones, of which the last ones are kept."""
        joined = inputs if self.convolution is None else torch.cat([self.convolution, inputs], dim=-1)
        missing = max(0, conv_kernel_size - joined.shape[-1])
        self.convolution = F.pad(joined, (missing, 0))[..., -conv_kernel_size:].clone()
        return joined

    def update_recurrent_state(self, matrix: Tensor, layer_idx: int, **_: Any) -> Tensor:
        """Keep the state behind the last token."""
        if self.matrix is None:
            self.matrix = matrix
        else:
            self.matrix.copy_(matrix)
        return self.matrix


Run = Callable[[Tensor, LayerState | None], Tensor]
"""The layer on sequences [B, T, D] behind a state: [B, T, D]."""


def recurrent_layers(module: Any) -> list[nn.Module]:
    """The parts of a model that carry a state, in the order of its layers; none in most models."""
    text = module.config.get_text_config()
    if text.model_type not in CARRIED:
        return []
    return [part for part in module.modules() if _carries_state(part)]


def attend_apart(module: Any) -> int:
    """Let layers that carry a state take packed rows from the context of a forward call; how many there are.

    Without a context they compute what they did.
    """
    layers = recurrent_layers(module)
    for number, part in enumerate(layers):
        if "strop_context" not in inspect.signature(part.forward).parameters:
            part.forward = partial(_forward, number, part.forward)
    return len(layers)


def number_among_attending(config: Any, layer: int) -> int:
    """The number of an attention layer among those of a model that attend."""
    if getattr(config, "model_type", None) not in CARRIED:
        return layer
    before: list[str] = list(config.layer_types[:layer])
    return layer - before.count(LINEAR)


def _carries_state(part: nn.Module) -> bool:
    return type(part).__name__.endswith("GatedDeltaNet")


def _forward(
    number: int,
    own: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    strop_context: Any = None,
    strop_positions: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """The forward call of a layer: as it is without a context, by the context's sequences with one
    (`strop.engines.attention.AttentionContext.recur`)."""
    if strop_context is None:
        return own(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **rest)

    def run(sequences: Tensor, state: LayerState | None) -> Tensor:
        return own(sequences, cache_params=state, attention_mask=None)

    output: Tensor = strop_context.recur(number, run, hidden_states[0])
    return output.unsqueeze(0)
