"""Keys and values of the running sequences, and the attention of one decode step over them.

Sequence i of the batch owns slot i; the running ones are slots 0..B-1, so a step reads plain views. When a
sequence ends, the last one moves into its slot: one copy per finished sequence, none per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.engines.attention import PackedAttention

GROW_TOKENS = 64
"""The cache grows along its time axis in steps of this many tokens."""


class PrefillAttention:
    """Packed attention that also keeps every layer's keys and values."""

    def __init__(self, attention: PackedAttention) -> None:
        self._attention = attention
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        assert layer == len(self.keys), "layers attend in order, each once"
        self.keys.append(key)
        self.values.append(value)
        return self._attention.attend(layer, query, key, value, scaling=scaling, window=window)

    def key_values(self) -> Tensor:
        """[2, L, Hkv, N, D]: keys and values of all layers and packed tokens."""
        return torch.stack([torch.stack(self.keys), torch.stack(self.values)]).transpose(2, 3)


class SlotCache:
    """[2, L, slots, Hkv, T, D] keys and values; allocated by the first sequence, grown as sequences grow."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._data: Tensor | None = None

    def write(self, slots: Sequence[int], key_values: Tensor, *, reserve: int) -> None:
        """Put a prefix [2, L, Hkv, P, D] at the start of each slot, with room for `reserve` tokens in all."""
        self._ensure(key_values, max(reserve, key_values.shape[3]))
        assert self._data is not None, "the cache was just allocated"
        first, last = slots[0], slots[-1] + 1
        assert list(slots) == list(range(first, last)), "a group's slots are consecutive"
        self._data[:, :, first:last, :, : key_values.shape[3]] = key_values.unsqueeze(2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        assert self._data is not None, "a moved slot was written before"
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def free(self) -> None:
        """Give the memory back."""
        self._data = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._data is None else self._data.numel() * self._data.element_size()

    def layer(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, Hkv, T, D] of one layer."""
        assert self._data is not None, "decode steps follow a prefill"
        view = self._data[:, layer, :num_slots, :, :num_tokens]
        return view[0], view[1]

    def _ensure(self, like: Tensor, num_tokens: int) -> None:
        old = self._data
        if old is not None and old.shape[4] >= num_tokens:
            return
        length = -(-num_tokens // GROW_TOKENS) * GROW_TOKENS
        _, layers, heads, _, dim = like.shape
        # zeros, not empty: masked positions are multiplied by 0, and 0 * NaN is NaN.
        self._data = like.new_zeros(2, layers, self.capacity, heads, length, dim)
        if old is not None:
            self._data[:, :, :, :, : old.shape[4]] = old


class DecodeAttention:
    """One query token per running sequence, over the sequence's own cache."""

    def __init__(self, cache: SlotCache, lengths: Tensor) -> None:
        """`lengths` [B] int64: tokens already in each slot; the new token goes behind them."""
        self._cache = cache
        self._lengths = lengths
        self._slots = torch.arange(len(lengths), device=lengths.device)
        self._num_tokens = int(lengths.max()) + 1
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        b, kv_heads, dim = key.shape
        keys, values = self._cache.layer(layer, b, self._num_tokens)  # [B, Hkv, T, D]
        keys[self._slots, :, self._lengths] = key.to(keys.dtype)
        values[self._slots, :, self._lengths] = value.to(values.dtype)
        grouped = query.reshape(b, kv_heads, -1, dim) * scaling  # [B, Hkv, H / Hkv, D]
        scores = torch.matmul(grouped, keys.transpose(-1, -2).to(grouped.dtype)) + self._mask(window, grouped)
        probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return torch.matmul(probs.to(values.dtype), values).view(b, -1, dim).to(query.dtype)

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """[B, 1, 1, T]: 0 where a key may be seen, -inf where not; made once per step."""
        if window not in self._masks:
            at_key = torch.arange(self._num_tokens, device=self._lengths.device)[None]
            hidden = at_key > self._lengths[:, None]
            if window is not None:
                hidden = hidden | (at_key <= self._lengths[:, None] - window)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]
