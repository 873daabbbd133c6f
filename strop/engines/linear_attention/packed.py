"""Layers that carry a state from token to token (linear attention), on packed rows and in the native engine.

Such a layer has no keys to gather: each sequence of a row is given to the layer's own function by itself. In training
what sequences share is computed again for each of them, in these layers alone; in rollout the state behind a prompt is
kept (states.py).

Source: Yang et al. 2024, arXiv:2412.06464 (gated delta rule), as Qwen3-Next has it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.attention import PackedAttention
from strop.engines.attention_buckets import gather
from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.products import PRODUCTS, matrices
from strop.engines.segments import Segment
from strop.utils.device import sent

CARRIED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Model types whose layers of this kind keep a convolution's last inputs and a matrix for each head, and ask for them
in the way of `LayerState`."""
LINEAR = "linear_attention"
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Names in transformers of layers that attend."""
States: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""Of one sequence: what each layer with a state has kept behind the last token; empty without such layers."""


class LayerState:
    """State that one layer has kept of sequences, in the form in which layers of transformers ask for it.

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


class Context:
    """Attention, and layers that carry a state, each numbered among its own kind."""

    def __init__(self, attention: AttentionContext, numbers: Mapping[int, int]) -> None:
        """Args:
        attention: of the layers that attend.
        numbers: of a layer of the model among those.
        """
        self._attention, self._numbers = attention, numbers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """As `AttentionContext.attend`."""
        return self._attention.attend(self._numbers[layer], query, key, value, form)

    def recur(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        """Output [N, D] of a layer that carries a state, for tokens [N, D].

        Args:
            layer: number among the layers of this kind.
            run: the layer.
            hidden: its input.
        """
        raise NotImplementedError


class PackedContext(Context):
    """A packed row: every sequence by itself from its beginning on, whatever it shares with others."""

    _attention: PackedAttention

    def recur(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        """As `Context.recur`."""
        sequences, buckets, place = self._sequences
        outputs = []
        for (b, q, _), index in buckets:
            out = run(gather(hidden, index).view(b, q, -1), None)  # padding is behind all tokens
            outputs.append(out.reshape(b * q, -1))
        return gather(sequences.joined(outputs), place)

    @cached_property
    def _sequences(self) -> tuple[PackedAttention, list[tuple[tuple[int, int, int], Tensor]], Tensor]:
        """The sequences end to end, [S] tokens; of each call, its shape and the tokens of the row that it is on; and
        of each token of the row, a place [N] among the sequences."""
        segments = self._attention.segments
        continued = {start for segment in segments for start, _ in segment.prefix}
        sequences = [segment.keys() for segment in segments if segment.start not in continued]
        ends = np.cumsum([len(keys) for keys in sequences]).tolist()
        starts = [0, *ends[:-1]]
        of_tokens = np.zeros(sum(segment.length for segment in segments), dtype=np.int64)
        for keys, start, end in zip(sequences, starts, ends, strict=True):
            of_tokens[keys] = np.arange(start, end)
        device = self._attention.device
        tokens, place = (
            sent(torch.from_numpy(index), device) for index in (np.concatenate(sequences), of_tokens)
        )
        laid_out = [Segment(start=start, length=end - start) for start, end in zip(starts, ends, strict=True)]
        end_to_end = PackedAttention(laid_out, device=device)
        buckets = [(bucket.shape, tokens[bucket.query_index]) for bucket in end_to_end.buckets]
        return end_to_end, buckets, place


class PieceContext(Context):
    """Pieces of sequences, of which each goes on from a state and leaves one."""

    def __init__(
        self,
        attention: AttentionContext,
        numbers: Mapping[int, int],
        segments: Sequence[Segment],
        before: Sequence[States],
    ) -> None:
        """Args:
        attention, numbers: as of `Context`.
        segments: the pieces of the row.
        before: of each piece, what it continues; empty where nothing came before.
        """
        super().__init__(attention, numbers)
        self._segments, self._before = segments, before
        self._behind: list[list[tuple[Tensor, Tensor]]] = [[] for _ in segments]

    def recur(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        """As `Context.recur`, of each piece by itself; the states behind them are kept."""
        outputs = []
        for piece, before, behind in zip(self._segments, self._before, self._behind, strict=True):
            assert layer == len(behind), "layers run in order, each once"
            state = LayerState(*(part.clone() for part in before[layer])) if before else LayerState()
            outputs.append(run(hidden[None, piece.start : piece.start + piece.length], state)[0])
            behind.append(state.kept())
        return torch.cat(outputs)

    def states(self, piece: int) -> States:
        """The states behind a piece."""
        return tuple(self._behind[piece])


def _carries_state(part: nn.Module) -> bool:
    return type(part).__name__.endswith("GatedDeltaNet")


def _forward(
    number: int,
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    strop_context: Any = None,
    strop_positions: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """The forward call of a layer: as it is without a context, by the sequences of the context with one."""
    if strop_context is None:
        return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **rest)

    def run(sequences: Tensor, state: LayerState | None) -> Tensor:
        is_rounding = torch.is_autocast_enabled(sequences.device.type)
        with _WideProducts() if is_rounding else contextlib.nullcontext():
            return forward(sequences, cache_params=state, attention_mask=None)

    output: Tensor = strop_context.recur(number, run, hidden_states[0])
    return output.unsqueeze(0)


class _WideProducts(TorchFunctionMode):
    """Products of float32 tensors stay in float32 under autocast.

    The rule that updates the state is written in float32. Over chunks, as in training, it is made of such products;
    token by token, as in rollout, it has none, so that autocast would round one of the two.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            factors = matrices(args, kwargs or {})
            if all(factor.dtype == torch.float32 for factor in factors):
                with torch.autocast(factors[0].device.type, enabled=False):
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
