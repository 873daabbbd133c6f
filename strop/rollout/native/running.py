"""The running sequences of a batch: each in a slot, with its record, its keys and values and its states.

The running ones are slots 0..B-1: when a sequence ends, the last one takes its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from strop.engines.causal_lm import CausalLM
from strop.rollout.native.cache import SlotCache
from strop.rollout.native.key_values import KeyValueCache
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.prefill import PrefilledPrompt
from strop.rollout.native.request import Request
from strop.rollout.native.sampling import SEQUENCE


class Running:
    """The running sequences of one model."""

    def __init__(self, model: CausalLM, capacity: int, *, records_routing: bool) -> None:
        """Args:
        model: whose sequences they are.
        capacity: most slots.
        records_routing: note the experts of each token.
        """
        self._routers = model.routers if records_routing else None
        self.requests: list[Request] = []
        self.cache = new_cache(model.device, capacity)
        self.states = None if model.recurrence is None else model.recurrence.slots(capacity)
        self.rows = np.zeros(capacity, dtype=SEQUENCE)
        """Records of all slots."""

    def __len__(self) -> int:
        """B."""
        return len(self.requests)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] tokens in the cache; a view."""
        lengths: NDArray[np.int64] = self.rows["length"][: len(self)]
        return lengths

    @property
    def longest(self) -> int:
        """Tokens in the cache of the longest one."""
        return int(self.lengths.max(initial=0))

    def enter(self, group: Sequence[Request], prefilled: PrefilledPrompt) -> int:
        """Give slots to requests with the same given tokens; how many found room."""
        first = len(self)
        slots = range(first, first + len(group))
        count = self.cache.enter(slots, prefilled.key_values, longest=self.longest)
        if not count:
            return 0
        slots, length = slots[:count], len(prefilled.token_ids)
        if self.states:
            self.states.write(slots, prefilled.states)
        for slot, request in zip(slots, group, strict=False):
            sampling = request.sampling
            position = sampling.position + len(request.token_ids)
            options = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.key, position)
            self.rows[slot] = (*options, length, prefilled.shift, 0)
            if self._routers is not None:
                request.routed += prefilled.routed[len(request.routed) :]  # the first reading counts
                request.num_routed_layers = self._routers.num_layers
        self.requests.extend(group[:count])
        return count

    def vacate(self, slot: int) -> None:
        """Free a slot; the last sequence goes on in it."""
        last = len(self) - 1
        self.cache.release(slot)
        if slot != last:
            self.cache.move(last, slot, int(self.rows["length"][last]))
            if self.states:
                self.states.move(last, slot)
            self.rows[slot] = self.rows[last]
            self.requests[slot] = self.requests[last]
        self.requests.pop()

    def vacate_all(self) -> list[Request]:
        """Free all slots; what ran in them, in order."""
        requests = list(self.requests)
        for slot in reversed(range(len(self))):
            self.vacate(slot)
        return requests

    def free(self) -> None:
        """Give the memory back; nothing runs any more."""
        self.requests.clear()
        self.cache.free()
        if self.states:
            self.states.free()

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values and states that were used at one time so far."""
        return self.cache.num_bytes + (self.states.num_bytes if self.states else 0)


def new_cache(device: torch.device, capacity: int) -> KeyValueCache:
    """The cache that suits a device (key_values.py)."""
    return SlotCache(capacity) if device.type == "cpu" else PagedCache(capacity, device)
