"""Keys and values of the running sequences on a CPU, each in a slot, and the attention of one decode step over a cache.

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
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.engines.token_budget import is_out_of_memory
from strop.rollout.native.cpu import kernel
from strop.rollout.native.key_values import Computed, Entrant, KeyValueCache
from strop.rollout.native.request import Request
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


class ComputedTensor:
    """Keys and values of a sequence's first tokens, in a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        """[2, L, Hkv, P, D]."""
        self._tensor = tensor

    @property
    def num_tokens(self) -> int:
        """As strop.rollout.native.key_values.Computed has it."""
        return self._tensor.shape[3]

    @property
    def nbytes(self) -> int:
        """As strop.rollout.native.key_values.Computed has it."""
        return self._tensor.nbytes

    def read(self) -> Tensor:
        """As strop.rollout.native.key_values.Computed has it."""
        return self._tensor

    def first(self, num_tokens: int) -> ComputedTensor:
        """As strop.rollout.native.key_values.Computed has it."""
        return ComputedTensor(self._tensor[:, :, :, :num_tokens])

    def kept(self) -> ComputedTensor:
        """As strop.rollout.native.key_values.Computed has it: a copy."""
        return ComputedTensor(self._tensor.clone())


class SlotCache:
    """As strop.rollout.native.key_values.KeyValueCache has it: [2, L, slots, Hkv, T, D], grown to the slots and tokens
    that sequences really use."""

    holds_computed = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Most slots."""
        self._data: Tensor | None = None
        self._expected = (0, 0)  # slots and tokens
        self._used = (0, 0)  # most slots and tokens so far
        # For each slot one with the same first tokens, maybe itself, and how many these are.
        self._sources, self._num_shared = np.arange(capacity), np.zeros(capacity, dtype=np.int64)
        self.state_bytes = 0
        self.free_bytes: int | None = None
        self.agreed: Callable[[int], int] = lambda number: number
        self.reclaim: Callable[[bool], bool] = lambda is_needed: False

    def expect(self, requests: Sequence[Request]) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it. Slots for more than these would lie between their
        keys and values, layer after layer, in the large pages that are taken when something is written."""
        slots, tokens = self._expected
        longest = max(request.max_length for request in requests)
        self._expected = max(slots, min(self.capacity, len(requests))), max(tokens, longest)

    def num_fitting(self, entrants: Sequence[Entrant], lengths: NDArray[np.int64]) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        given = [len(request.given_ids) for request, _ in entrants]
        return self._num_fitting(given, longest=int(lengths.max(initial=0)), running=len(lengths))

    def _num_fitting(self, given: Sequence[int], *, longest: int, running: int) -> int:
        """Number of sequences of so many tokens, beside running ones."""
        for count in range(len(given), 0, -1):
            if self._fits(max(longest, *given[:count]) + 1, num_slots=running + count):
                return count
        return 0

    def put(self, key_values: Tensor, *, before: Computed | None, state_bytes: int) -> Computed:
        """As strop.rollout.native.key_values.KeyValueCache has it; there is always room."""
        self.state_bytes = state_bytes
        if before is None:
            return ComputedTensor(key_values.clone())
        return ComputedTensor(torch.cat([before.read(), key_values], dim=3))

    def reading(self, computed: Sequence[Computed]) -> Callable[[int], Tensor]:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        tensors = [one.read() for one in computed]
        return lambda layer: torch.cat([tensor[:, layer] for tensor in tensors], dim=2).transpose(1, 2)

    def enter(self, slots: range, computed: Computed, *, longest: int) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        length = computed.num_tokens
        self.form_like(computed.read())  # the first time of all, room is known only from here on
        count = self._num_fitting([length] * len(slots), longest=longest, running=slots.start)
        if not count or not self.make_room(max(longest, length), num_slots=slots.start + count):
            return 0
        self.write(slots[:count], computed.read())
        return count

    def reserve(self, lengths: NDArray[np.int64]) -> bool:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        return self.make_room(int(lengths.max(initial=0)) + 1, num_slots=len(lengths))

    def computed(self, slot: int, num_tokens: int) -> ComputedTensor:
        """As strop.rollout.native.key_values.KeyValueCache has it: a view."""
        return ComputedTensor(self.table[:, :, slot, :, :num_tokens])

    def release(self, slot: int) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it: there is nothing to give back."""

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it: a copy."""
        self._leave(target, target + 1)
        self._sources[target], self._num_shared[target] = self._sources[source], self._num_shared[source]
        self.table[:, :, target, :, :num_tokens] = self.table[:, :, source, :, :num_tokens]

    def write(self, slots: Sequence[int], key_values: Tensor) -> None:
        """Put a prefix [2, L, Hkv, P, D] at the start of each of these slots, which follow one another.

        Raises:
            MemoryError: there is no room for it.
        """
        first, last = slots[0], slots[-1] + 1
        self.form_like(key_values)
        if not self.make_room(key_values.shape[3], num_slots=last):
            raise MemoryError(f"no memory for {last} sequences of {key_values.shape[3]} tokens")
        self._leave(first, last)
        self._sources[first:last], self._num_shared[first:last] = first, key_values.shape[3]
        self.table[:, :, first:last, :, : key_values.shape[3]] = key_values.unsqueeze(2)

    def form_like(self, key_values: Tensor) -> None:
        """Take the layers, heads and precision of keys and values [2, L, Hkv, P, D]."""
        if self._data is None:
            _, layers, heads, _, dim = key_values.shape
            self._data = key_values.new_zeros(2, layers, 0, heads, 0, dim)

    def make_room(self, num_tokens: int, *, num_slots: int) -> bool:
        """Make room for `num_tokens` tokens in each of the first `num_slots` slots; False where memory is short.

        What lies behind these tokens and slots may be lost.
        """
        sizes = self._sizes(num_tokens, num_slots)
        if not sizes:
            return False
        self._resize(*sizes[0])
        self._used = (max(self._used[0], num_slots), max(self._used[1], _rounded(num_tokens)))
        return True

    def _resize(self, num_slots: int, num_tokens: int) -> None:
        """Move to a table of another size."""
        _, layers, slots, heads, tokens, dim = self.table.shape
        if (num_slots, num_tokens) == (slots, tokens):
            return
        self._leave(num_slots, slots)  # where memory is short, a table with longer slots has fewer of them
        larger = zeros((2, layers, num_slots, heads, num_tokens, dim), self.table)
        assert larger is not None, "the memory of a CPU is never in pieces"
        slots, tokens = min(slots, num_slots), min(tokens, num_tokens)
        larger[:, :, :slots, :, :tokens] = self.table[:, :, :slots, :, :tokens]
        self._data = larger

    def _fits(self, num_tokens: int, *, num_slots: int) -> bool:
        """True if there is room for so much. Before its form is known this is True."""
        return self._data is None or bool(self._sizes(num_tokens, num_slots))

    def _sizes(self, num_tokens: int, num_slots: int) -> list[tuple[int, int]]:
        """Slots and tokens of the tables that hold so much and for which there is memory, with spare room first."""
        slots, tokens = self.table.shape[2], self.table.shape[4]
        if num_slots <= slots and num_tokens <= tokens:
            return [(slots, tokens)]
        spare_slots, spare_tokens = slots, tokens
        if num_slots > slots:
            spare_slots = min(self.capacity, max(num_slots, int(GROW_SHARE * slots)))
        if num_tokens > tokens:
            spare_tokens = _rounded(max(num_tokens, int(GROW_SHARE * tokens)))
        free = free_bytes(self.table.device) if self.free_bytes is None else self.free_bytes
        room = FREE_SHARE * free
        expected_slots, expected_tokens = self._expected
        if num_slots > expected_slots:  # sequences come one after another
            expected_slots = self.capacity
        sizes = [
            (max(spare_slots, expected_slots), _rounded(max(spare_tokens, expected_tokens))),
            (spare_slots, spare_tokens),
            (num_slots, _rounded(num_tokens)),
        ]
        return [size for size in sizes if size[0] * (size[1] * self._token_bytes + self.state_bytes) <= room]

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
        """As strop.rollout.native.key_values.KeyValueCache has it; the form stays known."""
        if self._data is not None:
            self._data = self._data[:, :, :0, :, :0].clone()
            self._expected = self._used = (0, 0)

    @property
    def num_bytes(self) -> int:
        """Memory of the slots and tokens used so far."""
        if self._data is None:
            return 0
        return min(self._data.nbytes, math.prod(self._used) * self._token_bytes)

    @property
    def running_bytes(self) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        return self.num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of the whole table, used or not."""
        return 0 if self._data is None else self._data.nbytes

    @property
    def _token_bytes(self) -> int:
        """Memory of one token in all layers."""
        both, layers, _, heads, _, dim = self.table.shape
        return both * layers * heads * dim * self.table.element_size()

    @property
    def table(self) -> Tensor:
        """All of it: [2, L, slots, Hkv, T, D]."""
        assert self._data is not None, "its form is known"
        return self._data

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, form: AttentionForm,
        *, num_tokens: int,
    ) -> Tensor | None:  # fmt: skip
        """As strop.rollout.native.key_values.KeyValueCache has it, in C."""
        keys, values = self.layer(layer, len(lengths), num_tokens)
        fills = keys.shape[1] == key.shape[1] and keys.shape[3] == key.shape[2] == value.shape[2]
        if not fills or not form.is_fused or form.chunk is not None:
            return None
        return kernel.attend(query, key, value, keys, values, lengths, form)

    def append(self, layer: int, slots: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        for table, new in zip(self.table[:, layer], (key, value), strict=True):
            table[slots, : new.shape[1], lengths, : new.shape[2]] = new.to(table.dtype)

    def layer(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """As strop.rollout.native.key_values.KeyValueCache has it: views, a little longer. Copies of them that products
        make then fit into the place of those of the step before; each a token longer, they would fill the heap."""
        keys, values = self.table[:, layer, :num_slots, :, : _rounded(num_tokens)]
        return keys, values


class DecodeAttention:
    """One query token per running sequence, over the sequence's own keys and values."""

    def __init__(self, cache: KeyValueCache, lengths: Tensor, *, num_tokens: int) -> None:
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
        out = self._cache.attend(layer, query, key, value, self._lengths, form, num_tokens=self._num_tokens)
        if out is not None:
            return out
        self._cache.append(layer, self._slots, self._lengths, key, value)
        keys, values = self._cache.layer(layer, b, self._num_tokens)  # [B, Hkv, T, D], T at least num_tokens
        value_dim = value.shape[2]
        keys, values = keys[:, :kv_heads, :, :dim], values[:, :kv_heads, :, :value_dim]
        # The cache is read in its own precision: casting it would touch all of it in every step.
        grouped = (query.reshape(b, kv_heads, -1, dim) * form.scaling).to(keys.dtype)  # [B, Hkv, H / Hkv, D]
        scores = torch.matmul(grouped, keys.transpose(-1, -2))
        mask = self._mask(form, grouped, keys.shape[2])
        if form.is_fused:
            scores += mask
            probs = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        else:
            probs = form.weights(scores.unsqueeze(3), mask.unsqueeze(3)).squeeze(3)
        output = torch.matmul(probs.to(values.dtype), values)
        return output.view(b, -1, value_dim).to(query.dtype)

    def _mask(self, form: AttentionForm, like: Tensor, num_keys: int) -> Tensor:
        """[B, 1, 1, num_keys]: 0 where a key may be seen, -inf where not; made once per step."""
        sizes = form.window, form.chunk
        if sizes not in self._masks:
            at_key = torch.arange(num_keys, device=self._lengths.device)[None]
            at_query = self._lengths[:, None]
            hidden = at_key > at_query
            if form.window is not None:
                hidden = hidden | (at_key <= at_query - form.window)
            if form.chunk is not None:
                hidden = hidden | (at_key < at_query - at_query % form.chunk)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[sizes] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[sizes]


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Zeros, because masked positions are multiplied by 0, and 0 * NaN is NaN; on a CPU in pages not touched yet.

    None where an accelerator has so much only in pieces.
    """
    if like.device.type != "cpu":
        try:
            return like.new_zeros(shape)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
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
