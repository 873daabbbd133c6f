"""Keys and values of the running sequences, and the attention of one decode step over them.

Layers may differ in the number of key heads and in the size of keys and values (latent attention; Gemma 4): all lie in
a table of the largest, padded.

Sequence i of the batch owns slot i; the running ones are slots 0..B-1, so a step reads plain views. When a
sequence ends, the last one moves into its slot: one copy per finished sequence, none per step.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.rollout.native import decode_kernel
from strop.rollout.native.cpu import kernel
from strop.utils.machine_limits import free_bytes

GROW_TOKENS = 64
"""The cache grows along its time axis to multiples of this many tokens ..."""
GROW_SHARE = 1.5
"""... and where there is room at least by this factor, in tokens and in slots, so that copies stay rare."""
HUGE_SHARE = 0.05
"""On a CPU a table of at most this share of the free memory lies in large pages: they are there sooner, but take memory
also for the tokens that a slot has room for and does not use."""
FREE_SHARE = 0.5
"""It grows into at most this share of the memory that is free then; the old table is held until it is copied."""


class SlotCache:
    """[2, L, slots, Hkv, T, D] keys and values, grown to the slots and tokens that sequences really use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Most slots."""
        self._data: Tensor | None = None
        self._expected = (0, 0)  # slots and tokens
        self._used = (0, 0)  # most slots and tokens so far
        # For each slot one with the same first tokens, maybe itself, and how many these are.
        self._sources, self._num_shared = np.arange(capacity), np.zeros(capacity, dtype=np.int64)
        self.reads_padding = False
        """The attention of some layer reads the longest sequence's length of every slot."""
        self.state_bytes = 0
        """Memory that a slot takes elsewhere, however many tokens it has."""
        self.free_bytes: int | None = None
        """Memory that is free on every rank that holds a part of the heads; None: what this process finds free."""

    def expect(self, num_tokens: int, *, num_slots: int) -> None:
        """So many sequences are in sight, and one may get so long: there is room from the beginning, where memory
        allows it. On a CPU pages take memory, and time, when they are written to; on an accelerator a table that grows
        is copied, and steps that were captured over it are lost."""
        slots, tokens = self._expected
        self._expected = max(slots, min(num_slots, self.capacity)), max(tokens, num_tokens)

    def write(self, slots: Sequence[int], key_values: Tensor) -> None:
        """Put a prefix [2, L, Hkv, P, D] at the start of each slot. Slots are taken in order, from 0.

        Raises:
            MemoryError: there is no room for it.
        """
        first, last = slots[0], slots[-1] + 1
        assert list(slots) == list(range(first, last)), "a group's slots are consecutive"
        self.form_like(key_values)
        if not self.reserve(key_values.shape[3], num_slots=last):
            raise MemoryError(f"no memory for {last} sequences of {key_values.shape[3]} tokens")
        assert self._data is not None, "its form is known"
        self._leave(first, last)
        self._sources[first:last], self._num_shared[first:last] = first, key_values.shape[3]
        self._data[:, :, first:last, :, : key_values.shape[3]] = key_values.unsqueeze(2)

    def form_like(self, key_values: Tensor) -> None:
        """Take the layers, heads and precision of keys and values [2, L, Hkv, P, D]."""
        if self._data is None:
            _, layers, heads, _, dim = key_values.shape
            self._data = key_values.new_zeros(2, layers, 0, heads, 0, dim)

    def reserve(self, num_tokens: int, *, num_slots: int) -> bool:
        """Make room for `num_tokens` tokens in each of the first `num_slots` slots; False where memory is short.

        What lies behind these tokens and slots may be lost.
        """
        assert self._data is not None, "its form is known first"
        for size in self._sizes(num_tokens, num_slots):
            if self._resize(*size):
                self._used = (max(self._used[0], num_slots), max(self._used[1], _rounded(num_tokens)))
                return True
        return False

    def _resize(self, num_slots: int, num_tokens: int) -> bool:
        """Move to a table of another size; False where an accelerator has so much only in pieces."""
        assert self._data is not None, "its form is known"
        _, layers, slots, heads, tokens, dim = self._data.shape
        if (num_slots, num_tokens) == (slots, tokens):
            return True
        larger = _zeros((2, layers, num_slots, heads, num_tokens, dim), self._data)
        if larger is None:
            return False
        slots, tokens = min(slots, num_slots), min(tokens, num_tokens)
        larger[:, :, :slots, :, :tokens] = self._data[:, :, :slots, :, :tokens]
        self._data = larger
        return True

    def fits(self, num_tokens: int, *, num_slots: int) -> bool:
        """True if there is room for so much. Before its form is known this is True."""
        return self._data is None or bool(self._sizes(num_tokens, num_slots))

    def _sizes(self, num_tokens: int, num_slots: int) -> list[tuple[int, int]]:
        """Slots and tokens of the tables that hold so much and for which there is memory, with spare room first."""
        assert self._data is not None, "its form is known first"
        slots, tokens = self._data.shape[2], self._data.shape[4]
        if num_slots <= slots and num_tokens <= tokens:
            return [(slots, tokens)]
        spare_slots, spare_tokens = slots, tokens
        if num_slots > slots:
            spare_slots = min(self.capacity, max(num_slots, int(GROW_SHARE * slots)))
        if num_tokens > tokens:
            spare_tokens = _rounded(max(num_tokens, int(GROW_SHARE * tokens)))
        free = free_bytes(self._data.device) if self.free_bytes is None else self.free_bytes
        room = FREE_SHARE * free
        sizes = [(spare_slots, spare_tokens), (num_slots, _rounded(num_tokens))]
        expected_slots, expected_tokens = self._expected
        if self._data.device.type == "cpu":
            expected_slots = self.capacity
        sizes.insert(0, (max(spare_slots, expected_slots), _rounded(max(spare_tokens, expected_tokens))))
        return [size for size in sizes if size[0] * (size[1] * self._token_bytes + self.state_bytes) <= room]

    def read(self, slot: int, length: int) -> Tensor:
        """View [2, L, Hkv, length, D] of the first tokens of a slot."""
        assert self._data is not None, "a slot is read after it was written"
        return self._data[:, :, slot, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        assert self._data is not None, "a moved slot was written before"
        self._leave(target, target + 1)
        self._sources[target], self._num_shared[target] = self._sources[source], self._num_shared[source]
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]

    def shared(self, num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For the first slots, another one with the same first tokens [B], and how many these are [B]: sequences of one
        prompt can read it in one place."""
        return self._sources[:num_slots], self._num_shared[:num_slots]

    def _leave(self, first: int, last: int) -> None:
        """Slots first..last - 1 will hold something else: those that share their first tokens read them elsewhere."""
        goes = (self._sources >= first) & (self._sources < last)
        goes[first:last] = False
        if not goes.any():
            return
        for source in np.unique(self._sources[goes]):
            others = np.flatnonzero(goes & (self._sources == source))
            self._sources[others] = others[0]

    def free(self) -> None:
        """Give the memory back; the form stays known."""
        if self._data is not None:
            self._data = self._data[:, :, :0, :, :0].clone()
            self._expected, self._used = (0, 0), (0, 0)

    @property
    def num_bytes(self) -> int:
        """Memory of the slots and tokens used so far."""
        if self._data is None:
            return 0
        return min(self._data.numel() * self._data.element_size(), math.prod(self._used) * self._token_bytes)

    @property
    def held_bytes(self) -> int:
        """Memory of the whole table, used or not."""
        return 0 if self._data is None else self._data.numel() * self._data.element_size()

    @property
    def _token_bytes(self) -> int:
        """Memory of one token in all layers."""
        assert self._data is not None, "its form is known"
        both, layers, _, heads, _, dim = self._data.shape
        return both * layers * heads * dim * self._data.element_size()

    @property
    def table(self) -> Tensor:
        """All of it: [2, L, slots, Hkv, T, D]."""
        assert self._data is not None, "decode steps follow a prefill"
        return self._data

    def layer(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values [B, Hkv, T, D] of one layer."""
        assert self._data is not None, "decode steps follow a prefill"
        view = self._data[:, layer, :num_slots, :, :num_tokens]
        return view[0], view[1]


class DecodeAttention:
    """One query token per running sequence, over the sequence's own cache."""

    def __init__(self, cache: SlotCache, lengths: Tensor, *, num_tokens: int) -> None:
        """Args:
        cache: keys and values of the sequences.
        lengths: [B] int64, tokens already in each slot; the new token goes behind them.
        num_tokens: the longest one with its new token.
        """
        self._cache = cache
        self._lengths = lengths
        self._slots = torch.arange(len(lengths), device=lengths.device)
        self._num_tokens = num_tokens
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [B, H, Dv] for query [B, H, D]; key [B, Hkv, D] and value [B, Hkv, Dv] enter the cache."""
        b, kv_heads, dim = key.shape
        value_dim = value.shape[2]
        keys, values = self._cache.layer(layer, b, self._num_tokens)  # [B, Hkv, T, D]
        fills = keys.shape[1] == kv_heads and keys.shape[3] == dim == value_dim
        if form.is_fused and form.chunk is None and fills:
            out = kernel.attend(query, key, value, keys, values, self._lengths, form)
            if out is not None:
                return out
        keys, values = keys[:, :kv_heads, :, :dim], values[:, :kv_heads, :, :value_dim]
        if decode_kernel.reads(keys, query, form, value_dim=value_dim):
            return decode_kernel.attend(query, key, value, keys, values, self._lengths, form).to(query.dtype)
        self._cache.reads_padding = True
        keys[self._slots, :, self._lengths] = key.to(keys.dtype)
        values[self._slots, :, self._lengths] = value.to(values.dtype)
        # The cache is read in its own precision: casting it would touch all of it in every step.
        grouped = (query.reshape(b, kv_heads, -1, dim) * form.scaling).to(keys.dtype)  # [B, Hkv, H / Hkv, D]
        scores = torch.matmul(grouped, keys.transpose(-1, -2))
        mask = self._mask(form, grouped)
        if form.is_fused:
            scores += mask
            probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        else:
            probs = form.weights(scores.unsqueeze(3), mask.unsqueeze(3)).squeeze(3)
        output = torch.matmul(probs.to(values.dtype), values)
        return output.view(b, -1, value_dim).to(query.dtype)

    def _mask(self, form: AttentionForm, like: Tensor) -> Tensor:
        """[B, 1, 1, T]: 0 where a key may be seen, -inf where not; made once per step."""
        sizes = form.window, form.chunk
        if sizes not in self._masks:
            at_key = torch.arange(self._num_tokens, device=self._lengths.device)[None]
            at_query = self._lengths[:, None]
            hidden = at_key > at_query
            if form.window is not None:
                hidden = hidden | (at_key <= at_query - form.window)
            if form.chunk is not None:
                hidden = hidden | (at_key < at_query - at_query % form.chunk)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[sizes] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[sizes]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Zeros, because masked positions are multiplied by 0, and 0 * NaN is NaN; on a CPU in pages not touched yet.

    None where an accelerator has so much only in pieces.
    """
    if like.device.type != "cpu":
        try:
            return like.new_zeros(shape)
        except torch.OutOfMemoryError:
            torch.accelerator.empty_cache()
            return None
    num_bytes = math.prod(shape) * like.element_size()
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and num_bytes <= HUGE_SHARE * free_bytes(like.device):
        with contextlib.suppress(OSError):  # of a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // GROW_TOKENS) * GROW_TOKENS
