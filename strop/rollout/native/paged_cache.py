"""Keys and values in pages of one pool: a sequence takes what it has tokens for, and a group one copy of its prompt.

A page has PAGE_TOKENS tokens of all layers. A table on the device says which pages a slot has; the host decides
(pages.py). Sequences that begin alike share their full pages; the last one, which they go on writing, each has for
itself. What ends gives its pages back, and what takes its slot brings its own along: nothing is copied. The pool is as
large as what is in sight when it is first used, within what memory is free; where more comes than was in sight, and
memory is free, a larger one takes its place.

    table   [slots, width] int32    pages of each slot, those behind its end NOBODYS
    pool    [2, L, pages, Hkv, PAGE_TOKENS, D]    a table of the largest layer, the others padded

The Triton kernel reads the table (decode_kernel.py); without it pages are gathered.
Source: Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.rollout.native import decode_kernel
from strop.rollout.native.cache import zeros
from strop.rollout.native.key_values import Computed, Entrant
from strop.rollout.native.pages import NOBODYS, PagePool
from strop.rollout.native.request import Request
from strop.utils.device import sent
from strop.utils.machine_limits import free_bytes

PAGE_TOKENS = 32
"""Tokens of a page. Half of one is unused at the end of a sequence, on average."""
POOL_SHARE = 0.8
"""The pool takes at most this share of the memory that is free; the rest is for prompts and logits."""
GROW_SHARE = 1.5
"""A pool or a table that is too small becomes larger at least by this factor, if there is memory."""


class ComputedPages:
    """Pages with the first tokens of a sequence; they are free once neither this nor a sequence holds them."""

    def __init__(self, cache: PagedCache, pool: PagePool, pages: Sequence[int], num_tokens: int) -> None:
        """Args:
        cache: that has them.
        pool: theirs, of which this holds them from now on.
        pages: in order.
        num_tokens: in them.
        """
        self._cache, self._pool = cache, pool
        self.pages, self.num_tokens = list(pages), num_tokens

    def __del__(self) -> None:
        self._pool.drop(self.pages)

    @property
    def nbytes(self) -> int:
        """As strop.rollout.native.key_values.Computed has it; pages that others hold too are counted."""
        return len(self.pages) * self._cache.page_bytes

    def read(self) -> Tensor:
        """As strop.rollout.native.key_values.Computed has it."""
        pages = self._cache.pool[:, :, self._cache.sent(self.pages)].transpose(2, 3)
        return pages.flatten(3, 4)[:, :, :, : self.num_tokens]

    def first(self, num_tokens: int) -> ComputedPages:
        """As strop.rollout.native.key_values.Computed has it."""
        pages = self.pages[: num_pages(num_tokens)]
        self._pool.share(pages)
        return ComputedPages(self._cache, self._pool, pages, num_tokens)

    def kept(self) -> ComputedPages:
        """As strop.rollout.native.key_values.Computed has it: nobody writes to these pages."""
        return self


class PagedCache:
    """As strop.rollout.native.key_values.KeyValueCache has it, in pages."""

    holds_computed = True

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Args:
        capacity: most slots.
        device: of the pool.
        """
        self.capacity, self._device = capacity, device
        self._data: Tensor | None = None  # a pool without pages has the form
        self._pages = PagePool(0)
        self._rows = np.full((capacity, 1), NOBODYS, dtype=np.int32)  # the table, on the host
        self._counts = np.zeros(capacity, dtype=np.int64)  # pages of each slot
        self._most_running = 0  # of all slots at one time
        self._table: Tensor | None = None
        self._num_changed = 0  # first rows of the table that the device does not have yet
        self._expected = (0, 0)  # sequences and pages
        self.state_bytes = 0
        self.free_bytes: int | None = None
        self.agreed: Callable[[int], int] = lambda number: number
        self.reclaim: Callable[[bool], bool] = lambda is_needed: False
        self.reads_padding = False
        """The attention of some layer gathers the longest sequence's length of every slot."""
        self.num_moves = 0
        """Times that the pool was copied to a larger one."""

    @property
    def pool(self) -> Tensor:
        """All pages."""
        assert self._data is not None, "its form is known"
        return self._data

    @property
    def table(self) -> Tensor:
        """Pages of all slots, on the device."""
        assert self._table is not None, "room was reserved before"
        return self._table

    @property
    def room(self) -> int:
        """Tokens that a row of the table has pages for."""
        return self._rows.shape[1] * PAGE_TOKENS

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of pool and table, and their shapes: while these stay, so does what was captured over them."""
        pool, table = self.pool, self.table
        return (pool.data_ptr(), *pool.shape, table.data_ptr(), *table.shape)

    @property
    def page_bytes(self) -> int:
        """Memory of a page."""
        both, layers, _, heads, tokens, dim = self.pool.shape
        return both * layers * heads * tokens * dim * self.pool.element_size()

    @property
    def num_bytes(self) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        return self._pages.most_used * self.page_bytes if len(self._pages) else 0

    @property
    def running_bytes(self) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        return self._most_running * self.page_bytes if len(self._pages) else 0

    @property
    def held_bytes(self) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        return 0 if self._data is None else self._data.nbytes

    def sent(self, numbers: Sequence[int]) -> Tensor:
        """[n] int64 on the device."""
        return sent(torch.tensor(numbers, dtype=torch.int64), self._device)

    def expect(self, requests: Sequence[Request]) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        sequences, pages = self._expected
        sequences = max(sequences, min(len(requests), self.capacity))
        self._expected = sequences, max(pages, pages_in_sight(requests, self.capacity))
        self._widen(max(num_pages(request.max_length) for request in requests))
        if 0 < GROW_SHARE * len(self._pages) <= self._expected[1]:
            self._resize(int(GROW_SHARE * len(self._pages)))

    def num_fitting(self, entrants: Sequence[Entrant], lengths: NDArray[np.int64]) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        if self._data is None:
            return len(entrants)
        needed = int((lengths // PAGE_TOKENS >= self._counts[: len(lengths)]).sum())
        seen = set()
        for count, (request, num_computed) in enumerate(entrants):
            if request.given_key not in seen:
                seen.add(request.given_key)
                needed += num_pages(len(request.given_ids)) - num_pages(num_computed)
            needed += 1  # to go on in
            if not self._has_free(needed):
                return count
        return len(entrants)

    def put(self, key_values: Tensor, *, before: Computed | None, state_bytes: int) -> Computed | None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        assert before is None or isinstance(before, ComputedPages), "it was put here"
        self.state_bytes = state_bytes
        if self._data is None:
            _, layers, heads, _, dim = key_values.shape
            self._hold(key_values.new_zeros(2, layers, 0, heads, PAGE_TOKENS, dim))
        start = 0 if before is None else before.num_tokens
        stop, whole = start + key_values.shape[3], start // PAGE_TOKENS
        count = num_pages(stop) - whole
        if not self._has_free(count):
            return None
        pages, new = [] if before is None else before.pages[:whole], self._pages.take(count)
        self._pages.share(pages)
        if before is not None and start % PAGE_TOKENS:
            self._copy(before.pages[whole], new[:1])
        at = np.arange(start, stop)
        page = self.sent([new[place] for place in at // PAGE_TOKENS - whole])
        offset = sent(torch.from_numpy(at % PAGE_TOKENS), self._device)
        self.pool[:, :, page, :, offset] = key_values.permute(3, 0, 1, 2, 4)
        return ComputedPages(self, self._pages, [*pages, *new], stop)

    def reading(self, computed: Sequence[Computed]) -> Callable[[int], Tensor]:
        """As strop.rollout.native.key_values.KeyValueCache has it: a copy of one layer at a time."""
        pages, offsets = [], []
        for one in computed:
            assert isinstance(one, ComputedPages), "what is computed lies in pages"
            at = np.arange(one.num_tokens)
            pages.append(np.array(one.pages, dtype=np.int64)[at // PAGE_TOKENS])
            offsets.append(at % PAGE_TOKENS)
        page, offset = sent(
            torch.from_numpy(np.stack([np.concatenate(pages), np.concatenate(offsets)])), self._device
        )
        return lambda layer: self.pool[:, layer][:, page, :, offset].transpose(0, 1)

    def enter(self, slots: range, computed: Computed, *, longest: int) -> int:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        assert isinstance(computed, ComputedPages), "it was put here"
        whole, rest = divmod(computed.num_tokens, PAGE_TOKENS)
        self._widen(whole + 1)
        own: list[int] = []
        for count, slot in enumerate(slots):
            if not self._has_free(1):
                slots = slots[:count]
                break
            self._pages.share(computed.pages[:whole])
            self._append(slot, computed.pages[:whole])
            if rest:
                own += self._pages.take(1)
                self._append(slot, own[-1:])
        if own:
            self._copy(computed.pages[whole], own)
        self._most_running = max(self._most_running, int(self._counts.sum()))
        return len(slots)

    def reserve(self, lengths: NDArray[np.int64]) -> bool:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        full = np.flatnonzero(lengths // PAGE_TOKENS >= self._counts[: len(lengths)])
        if not self._has_free(len(full)):
            return False
        for slot, page in zip(full.tolist(), self._pages.take(len(full)), strict=True):
            self._append(slot, [page])
        self._most_running = max(self._most_running, int(self._counts.sum()))
        self._send()
        return True

    def computed(self, slot: int, num_tokens: int) -> Computed:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        pages = self._rows[slot, : num_pages(num_tokens)].tolist()
        self._pages.share(pages)
        return ComputedPages(self, self._pages, pages, num_tokens)

    def release(self, slot: int) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        self._pages.drop(self._rows[slot, : self._counts[slot]].tolist())
        self._clear(slot)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it: its pages are now those of the other slot."""
        self._rows[target], self._counts[target] = self._rows[source], self._counts[source]
        self._clear(source)

    def free(self) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        if self._data is not None:
            _, layers, _, heads, tokens, dim = self._data.shape
            self._hold(self._data.new_empty(2, layers, 0, heads, tokens, dim))
        self._pages = PagePool(0)
        self._rows, self._counts[:] = np.full((self.capacity, 1), NOBODYS, dtype=np.int32), 0
        self._table, self._num_changed, self._expected, self._most_running = None, 0, (0, 0), 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, form: AttentionForm,
        *, num_tokens: int,
    ) -> Tensor | None:  # fmt: skip
        """As strop.rollout.native.key_values.KeyValueCache has it, in Triton."""
        keys, values = self.pool[:, layer]
        reads = decode_kernel.reads(keys, query, form, value_dim=value.shape[2])
        if not reads or key.shape[1] != keys.shape[1]:
            return None
        out = decode_kernel.attend(query, key, value, keys, values, self.table, lengths, form)
        return out.to(query.dtype)

    def append(self, layer: int, slots: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
        """As strop.rollout.native.key_values.KeyValueCache has it."""
        page, offset = self.table[slots, lengths // PAGE_TOKENS], lengths % PAGE_TOKENS
        for pool, new in zip(self.pool[:, layer], (key, value), strict=True):
            pool[page, : new.shape[1], offset, : new.shape[2]] = new.to(pool.dtype)

    def layer(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """As strop.rollout.native.key_values.KeyValueCache has it: a copy."""
        self.reads_padding = True
        pages = self.table[:num_slots, : num_pages(num_tokens)]
        keys, values = self.pool[:, layer][:, pages].transpose(3, 2).flatten(3, 4)[:, :, :, :num_tokens]
        return keys, values

    @property
    def _free_bytes(self) -> int:
        return free_bytes(self._device) if self.free_bytes is None else self.free_bytes

    def _append(self, slot: int, pages: Sequence[int]) -> None:
        first = int(self._counts[slot])
        self._widen(first + len(pages))
        self._rows[slot, first : first + len(pages)] = pages
        self._counts[slot] += len(pages)
        self._num_changed = max(self._num_changed, slot + 1)

    def _clear(self, slot: int) -> None:
        self._rows[slot], self._counts[slot] = NOBODYS, 0
        self._num_changed = max(self._num_changed, slot + 1)

    def _copy(self, source: int, targets: Sequence[int]) -> None:
        """Copy a page to others."""
        self.pool[:, :, self.sent(targets)] = self.pool[:, :, source].unsqueeze(2)

    def _send(self) -> None:
        """Give the device the table as it is now."""
        if self._table is None or self._table.shape[1] != self._rows.shape[1]:
            self._table = sent(torch.from_numpy(self._rows.copy()), self._device)
        elif self._num_changed:
            rows = torch.from_numpy(self._rows[: self._num_changed])
            self._table[: self._num_changed].copy_(sent(rows, self._device))
        self._num_changed = 0

    def _widen(self, width: int) -> None:
        """Rows of the table with at least so many pages."""
        have = self._rows.shape[1]
        if width > have:
            more = max(width, int(GROW_SHARE * have)) - have if have > 1 else width - have
            self._rows = np.pad(self._rows, ((0, 0), (0, more)), constant_values=NOBODYS)

    def _has_free(self, count: int) -> bool:
        """True if so many pages are free, or what only later requests could use was given up for them, or a larger pool
        has them; what later requests are seen to use is given up last."""
        for is_needed in (False, True):
            while self._pages.num_free < count and self.reclaim(is_needed):
                pass
            missing = count - self._pages.num_free
            if missing <= 0 or (not is_needed and self._resize(max(1, len(self._pages)) + missing)):
                return True
        return False

    def _resize(self, least: int) -> bool:
        """Move to a larger pool of at least so many pages; False where there is no memory for it beside the old one."""
        is_empty = not self._pages.num_used
        sequences, expected = self._expected
        free = self._free_bytes + (self.held_bytes if is_empty else 0)
        most = int(POOL_SHARE * free - sequences * self.state_bytes) // self.page_bytes
        size = self.agreed(min(max(least, expected, int(GROW_SHARE * len(self._pages))), most))
        if is_empty and size >= least:  # nothing is to be moved
            self._pages = PagePool(0, most_used=self._pages.most_used)
            self._hold(self.pool[:, :, :0].clone())
        while size >= least:
            if (larger := self._pool_of(size)) is not None:
                larger[:, :, : len(self._pages)] = self.pool
                self.num_moves += self._pages.num_used > 0
                self._pages.grow(size)
                self._hold(larger)
                return True
            size = max(least, size // 2) if size > least else 0
        return False

    def _pool_of(self, size: int) -> Tensor | None:
        """A pool of so many pages; None where some rank has so much only in pieces."""
        shape = list(self.pool.shape)
        shape[2] = size
        pool = zeros(tuple(shape), self.pool)
        return pool if self.agreed(int(pool is not None)) else None

    def _hold(self, pool: Tensor) -> None:
        """Have this pool in place of the one before."""
        if self.free_bytes is not None:  # that was before this step
            self.free_bytes -= pool.nbytes - self.held_bytes
        self._data = pool


def num_pages(num_tokens: int) -> int:
    """Pages of so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def pages_in_sight(requests: Sequence[Request], capacity: int) -> int:
    """Pages of a pool for these: of each distinct prompt all, since it may be asked for again, and of as many sequences
    at a time as may run, each as long as it may get, those behind the full ones of the prompt. Nobody shares what was
    put back; its last page is there twice while it enters."""
    prompts = {request.given_key: len(request.given_ids) for request in requests if not request.token_ids}
    own = []
    for request in requests:
        shared = -1 if request.token_ids else len(request.given_ids) // PAGE_TOKENS
        own.append(num_pages(request.max_length) - shared)
    at_once = (sum(own[start : start + capacity]) for start in range(0, len(own), capacity))
    return NOBODYS + 1 + sum(map(num_pages, prompts.values())) + max(at_once)
