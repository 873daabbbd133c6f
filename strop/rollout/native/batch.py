"""Continuous batching: requests enter when there is room and leave when they end.

One call of `step` admits waiting requests (each distinct prompt computed once, whatever the number of samples, and
long ones piece by piece), decodes one token for every running sequence, and returns the requests that ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.rollout.native.cache import DecodeAttention, SlotCache
from strop.rollout.native.prefill import Prefill
from strop.rollout.native.request import Request
from strop.rollout.native.sampling import SEQUENCE, next_tokens
from strop.rollout.types import StopReason


class DecodeBatch:
    """The running and waiting sequences of one model."""

    def __init__(self, model: CausalLM, *, max_running: int) -> None:
        self._model = model
        self._max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache = SlotCache(max_running)
        self.prefill = Prefill(model)
        self._rows = np.zeros(max_running, dtype=SEQUENCE)
        self.num_decoded = 0
        """Tokens sampled so far."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    @property
    def cache_bytes(self) -> int:
        """Memory of the running sequences' keys and values, and of those kept for later requests."""
        return self._cache.num_bytes + self.prefill.num_bytes

    def put_back(self) -> None:
        """Forget everything computed: running sequences wait again, first of all, to go on where they are."""
        for request in self.running:
            request.put_back()
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.prefill.forget()

    def free(self) -> None:
        """Give the cache's memory back; no request may be running."""
        assert not self.running, "running sequences need the cache"
        self.prefill.forget()
        self._cache.free()

    @torch.inference_mode()
    def step(self, version: int) -> list[tuple[Request, StopReason]]:
        """Admit, decode one token each, and return what ended."""
        ended = self._admit(version)
        if self.running:
            ended += self._take(self._decode(), range(len(self.running)), version)
        return ended

    @torch.inference_mode()
    def remove(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch, running or waiting."""
        gone = set(map(id, requests))
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        self._release([slot for slot, request in enumerate(self.running) if id(request) in gone])

    def _admit(self, version: int) -> list[tuple[Request, StopReason]]:
        """Move waiting requests, of which everything given is computed, into free slots; sample their next token."""
        count = min(len(self.waiting), self._max_running - len(self.running))
        if count == 0:
            return []
        # Requests of one prompt take consecutive slots, in the order in which their prompt first came.
        groups: dict[Hashable, list[Request]] = {}
        for _ in range(count):
            request = self.waiting.popleft()
            groups.setdefault(request.given_key, []).append(request)
        self.prefill.compute(group[0] for group in groups.values())
        first = len(self.running)
        logits, left = [], []
        for group in groups.values():
            if group[0] not in self.prefill:
                left += group
                continue
            given = self.prefill[group[0]]
            slots = range(len(self.running), len(self.running) + len(group))
            self._cache.write(slots, given.key_values)
            logits.append(given.logits.expand(len(group), -1))
            for slot, request in zip(slots, group, strict=True):
                how, length = request.sampling, len(request.given_ids)
                options = (
                    how.temperature,
                    how.top_p,
                    how.top_k,
                    how.key,
                    how.position + len(request.token_ids),
                )
                self._rows[slot] = (*options, length, given.shift, 0)
            self.running.extend(group)
        self.waiting.extendleft(reversed(left))
        self.prefill.keep(self.waiting, max_bytes=self._cache.num_bytes)
        if not logits:
            return []
        return self._take(torch.cat(logits), range(first, len(self.running)), version)

    def _decode(self) -> Tensor:
        """Logits [B, V] of the next token of every running sequence."""
        model, b = self._model, len(self.running)
        rows = self._rows[:b]
        num_tokens = int(rows["length"].max()) + 1
        self._cache.reserve(num_tokens, num_slots=b)
        # Copies lie closely together, and stay what they are while the records go on.
        lengths = torch.from_numpy(rows["length"].copy()).to(model.device)
        ids = torch.from_numpy(rows["last"].copy()).to(model.device)
        attention = DecodeAttention(self._cache, lengths, num_tokens=num_tokens)
        positions = lengths
        if model.media is not None:
            positions = lengths + torch.from_numpy(rows["shift"].copy()).to(model.device)
        hidden = model.hidden(ids[None], positions[None], attention)
        rows["length"] += 1
        return model.head.logits(hidden)

    def _take(self, logits: Tensor, slots: range, version: int) -> list[tuple[Request, StopReason]]:
        """Sample one token for these slots, record it, and release the sequences that ended with it."""
        rows = self._rows[slots.start : slots.stop]
        tokens, log_probs = next_tokens(logits, rows)
        rows["last"] = tokens.cpu().numpy()
        ended: list[tuple[Request, StopReason]] = []
        released = []
        for slot, token, log_prob in zip(slots, tokens.tolist(), log_probs.tolist(), strict=True):
            request = self.running[slot]
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(version)
            if request.on_token is not None:
                request.on_token(token, log_prob, version)
            if token in request.sampling.stop_token_ids:
                ended.append((request, "stop"))
                released.append(slot)
            elif len(request.token_ids) >= request.sampling.max_tokens:
                ended.append((request, "length"))
                released.append(slot)
        self.num_decoded += len(slots)
        self._release(released)
        return ended

    def _release(self, slots: Sequence[int]) -> None:
        """Free these slots; the last sequences move into the holes."""
        for slot in sorted(slots, reverse=True):
            last = len(self.running) - 1
            length = int(self._rows["length"][slot])
            self.prefill.add(
                self.running[slot], self._cache.read(slot, length), max_bytes=self._cache.num_bytes
            )
            if slot != last:
                self._cache.move(last, slot, int(self._rows["length"][last]))
                self._rows[slot] = self._rows[last]
                self.running[slot] = self.running[last]
            self.running.pop()
