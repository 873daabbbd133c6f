"""Continuous batching: requests enter when there is room and leave when they end.

One call of `step` admits waiting requests (each distinct prompt computed once, whatever the number of samples, and
long ones piece by piece), decodes one token for every running sequence, and ends those that are complete. Where memory
is short, the shortest sequences wait again, with their tokens, until others have ended. On an accelerator a token is
read while the next step runs (unread.py).
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.moe.routing import RoutingRecord
from strop.protocol.routed_experts import TOKEN_DTYPE
from strop.rollout.native.cache import DecodeAttention
from strop.rollout.native.cpu.steps import FusedStep, fused_step
from strop.rollout.native.cuda_graph import static_step
from strop.rollout.native.decode_steps import DecodeSteps
from strop.rollout.native.half_copy import half_copy
from strop.rollout.native.key_values import Entrant, no_room
from strop.rollout.native.prefill import Prefill, PrefilledPrompt
from strop.rollout.native.rank_group import RankGroup
from strop.rollout.native.request import Request
from strop.rollout.native.running import Running
from strop.rollout.native.sampling import next_tokens
from strop.rollout.native.unread import Unread
from strop.utils.device import sent
from strop.utils.machine_limits import free_bytes

logger = logging.getLogger(__name__)


def pick_decode_steps(model: CausalLM) -> DecodeSteps | None:
    """Decode steps on a CPU in C, or captured on a device; None where the model goes through its own forward pass."""
    return fused_step(model) or static_step(model)


class DecodeBatch:
    """The running and waiting sequences of one model."""

    def __init__(
        self, model: CausalLM, *, max_running: int, reuses: bool = True, records_routing: bool = False
    ) -> None:
        """Args:
        model: whose weights are used.
        max_running: sequences decoded together.
        reuses: a sequence may begin with what was computed for others.
        records_routing: note the experts of each token.
        """
        if records_routing and model.routers is None:
            raise ValueError(
                f"rollout.router_replay is true, but {type(model.module).__name__} has no experts, or routers of "
                f"another form: set it to false"
            )
        self._records = records_routing
        self._model = model
        self._max_running = max_running
        divided = None if model.copy_group is None else model.pipeline
        # As many on all ranks where they are not divided.
        self._num_layers = 1 if divided is None else divided.num_own_layers
        self.waiting: deque[Request] = deque()
        self._slots = Running(model, max_running, records_routing=records_routing)
        self._cache = self._slots.cache
        if model.copy_group is not None:
            self._cache.agreed = RankGroup(model.copy_group).least
        self._half = half_copy(model)
        self._decoder = model if self._half is None else self._half.model
        self._steps = None if records_routing else pick_decode_steps(self._decoder)
        fused = self._steps if isinstance(self._steps, FusedStep) else None
        self.prefill = Prefill(
            self._decoder, self._cache, reuses=reuses, records_routing=records_routing, fused=fused
        )
        self._num_changes = model.num_changes
        self._unread: Unread | None = None  # tokens of the last step
        # Ranks compare what they have sampled before each step, and experts are read in it.
        self._reads_behind = self.device.type != "cpu" and model.copy_group is None and not records_routing
        self._is_short = False  # of memory: nothing enters beside those that run, until one of them ends
        self.sampled = 0
        """Checksum of the tokens that were sampled, for ranks that compute the same sequences together."""
        self.num_decoded = 0
        """Tokens sampled so far."""
        self.num_preempted = 0
        """Times that a running sequence was sent back to wait for memory."""

    @property
    def running(self) -> list[Request]:
        """The sequences that run, in the order of their slots."""
        return self._slots.requests

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._model.device

    @property
    def held_bytes(self) -> int:
        """Memory that `free` gives back."""
        unused = self._cache.held_bytes - self._cache.num_bytes
        return self.cache_bytes + unused + (0 if self._half is None else self._half.num_bytes)

    @property
    def cache_bytes(self) -> int:
        """Memory of the running sequences' keys and values, and of those kept for later requests."""
        beside = 0 if self._cache.holds_computed else self.prefill.num_bytes
        return self._slots.num_bytes + beside

    @property
    def free_bytes(self) -> int:
        """Memory that is free on the device, per layer that is here."""
        return free_bytes(self.device) // self._num_layers

    def use_memory(self, free_bytes: int) -> None:
        """Grow as if so much memory were free per layer: ranks that compute the same sequences together grow alike."""
        self._cache.free_bytes = free_bytes * self._num_layers

    @torch.inference_mode()
    def put_back(self) -> None:
        """Forget everything computed: running sequences wait again, first of all, to go on where they are; after
        `read_rest`."""
        assert self._unread is None, "what was sampled has been read"
        for request in self.running:
            request.put_back()
        self.waiting.extendleft(reversed(self._slots.vacate_all()))
        self.prefill.forget()
        self._model.num_changes += 1
        self._num_changes = self._model.num_changes
        self._note_weights_changed()

    def _note_weights_changed(self) -> None:
        """The weights may be others from now on."""
        for part in (self._half, self._steps):
            if part is not None:
                part.weights_changed()

    def free(self) -> None:
        """Give the cache's memory back; no request may be running."""
        assert not self.running, "running sequences need the cache"
        self.prefill.forget()
        self._slots.free()
        for part in (self._steps, self._half):
            if part is not None:
                part.free()

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Admit, decode one token each, and end what is complete; on an accelerator as far as the step before says."""
        try:
            if self._unread is not None and (self._unread.may_end or self._has_free_slots):
                self.read_rest()
            self._admit(version)
            self._make_room()
            if self.running:
                self._decode_one(version)
        except BaseException:
            self._unread = None
            raise

    def _decode_one(self, version: int) -> None:
        """One token of every running sequence: read at once, or in the next step."""
        unread = self._sample(self._decode(), range(len(self.running)), version)
        if not self._reads_behind:
            self._read(unread)
            return
        before, self._unread = self._unread, None
        if before is not None:
            self._read(before, num_behind=1)
        self._unread = unread.of_running(self.running)

    @property
    def _has_free_slots(self) -> bool:
        """Requests wait that might enter."""
        return bool(self.waiting) and len(self.running) < self._max_running and not self._is_short

    @torch.inference_mode()
    def read_rest(self) -> None:
        """Read the tokens of the last step, if that has not been done; what goes wrong is an error of that step."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read(unread)

    @torch.inference_mode()
    def remove(self, requests: Sequence[Request]) -> None:
        """Take requests out of the batch, running or waiting; after `read_rest`."""
        assert self._unread is None, "what was sampled has been read"
        gone = set(map(id, requests))
        self.waiting = deque(r for r in self.waiting if id(r) not in gone)
        self._release([slot for slot, request in enumerate(self.running) if id(request) in gone])

    def clear(self) -> None:
        """Drop all requests and everything computed, after an error: nothing of it is read, for it may be lost."""
        self._unread = None
        self.waiting.clear()
        self._is_short = False
        self.prefill.forget()
        self._slots.free()

    def _admit(self, version: int) -> None:
        """Move waiting requests, of which everything given is computed, into free slots; sample their next token."""
        if not self.running and self._model.num_changes != self._num_changes:
            self.prefill.forget()  # computed with other weights, whether or not somebody has named a version
            self._num_changes = self._model.num_changes
        if not self.running and self.waiting:
            self._note_weights_changed()  # while nothing ran, the weights may have been trained
        if self._half is not None:  # before the cache takes a share of the memory that is free
            self._half.refresh()
        if not self.running and self.waiting:
            self._cache.expect(self.waiting)
        count = self._num_admissible()
        if count == 0:
            return
        # Requests of one prompt take consecutive slots, in the order in which their prompt first came.
        groups: dict[Hashable, list[Request]] = {}
        for _ in range(count):
            request = self.waiting.popleft()
            groups.setdefault(request.given_key, []).append(request)
        first = len(self.running)
        self.prefill.compute(group[0] for group in groups.values())
        logits, remaining = [], []
        for group in groups.values():
            prefilled = self.prefill.get(group[0])
            entered = 0 if prefilled is None else self._enter(group, prefilled)
            remaining += group[entered:]
            if prefilled is not None and entered:
                logits.append(prefilled.logits.expand(entered, -1))
        self.waiting.extendleft(reversed(remaining))
        self.prefill.keep(self.waiting, max_bytes=self._spare_bytes)
        if logits:
            self._read(self._sample(torch.cat(logits), range(first, len(self.running)), version))

    def _enter(self, group: Sequence[Request], prefilled: PrefilledPrompt) -> int:
        """Give slots to requests with the same given tokens; how many found room.

        Raises:
            MemoryError: nothing runs, and there is no room for the first one beside its own computed beginning.
        """
        entered = self._slots.enter(group, prefilled)
        if entered or self.running or self._cache.holds_computed:  # in which the next step counts it
            return entered
        self.prefill.forget()  # of others; this one is held here
        self._cache.free()
        if entered := self._slots.enter(group, prefilled):
            return entered
        raise no_room(len(prefilled.token_ids))

    def _num_admissible(self) -> int:
        """Number of waiting requests that may begin, as far as is known before they are computed.

        Raises:
            MemoryError: nothing runs, and there is no room for the first one alone.
        """
        if self.running and self._is_short:
            return 0
        first = list(itertools.islice(self.waiting, self._max_running - len(self.running)))
        count = self._num_fitting(first)
        if first and count == 0 and self.prefill.num_bytes:
            self.prefill.drop_kept()
            count = self._num_fitting(first)
        if first and count == 0 and not self.running:
            self.prefill.forget_but(first[:1])
            count = self._num_fitting(first)
        if first and count == 0 and not self.running:
            if self._cache.holds_computed:
                self.prefill.forget()
            self._cache.free()
            self._cache.expect(self.waiting)
            count = self._num_fitting(first)
            if count == 0:
                raise no_room(len(first[0].given_ids))
        return count

    def _num_fitting(self, requests: Sequence[Request]) -> int:
        """Number of these sequences, from the first on, with room beside the running ones and a token more."""
        entrants = [Entrant(request, self.prefill.num_computed_of(request)) for request in requests]
        count = self._cache.num_fitting(entrants, self._slots.lengths)
        self._is_short = self._is_short or (bool(requests) and count == 0)
        return count

    def _make_room(self) -> None:
        """Room for one more token of every running sequence.

        While memory is short, what is kept for later requests goes first, then what is computed for waiting ones alone,
        then the shortest sequences, which cost least to compute again.
        """
        while self.running and not self._cache.reserve(self._slots.lengths):
            self._is_short = True
            if self._unread is not None:
                self.read_rest()
                continue
            if self.prefill.num_bytes:
                self.prefill.drop_kept()
                continue
            if self.prefill.forget_but(self.running):
                continue
            slot = int(self._slots.lengths.argmin())
            request = self.running[slot]
            self._slots.vacate(slot)
            request.put_back()
            self.waiting.appendleft(request)
            if self.num_preempted == 0:
                logger.warning(
                    "memory is short: sequences wait with their tokens until others have ended, and are then computed "
                    "again; a smaller rollout.max_running avoids this"
                )
            self.num_preempted += 1

    @property
    def _spare_bytes(self) -> int:
        """Memory for what may begin later requests: as much as the running ones have had, none while it is short."""
        return 0 if self._is_short else self._cache.running_bytes

    def _decode(self) -> Tensor:
        """Logits [B, V] of the next token of every running sequence."""
        model, b = self._decoder, len(self.running)
        rows = self._slots.rows[:b]
        num_tokens = self._slots.longest + 1
        # One copy of all, which stays what it is while the records go on.
        inputs = np.stack([rows["length"], rows["last"], rows["length"] + rows["shift"]])
        lengths, ids, positions = sent(torch.from_numpy(inputs), model.device)
        if self._unread is not None:
            ids = self._unread.tokens
        rows["length"] += 1

        record = RoutingRecord() if self._records else None

        def forward() -> Tensor:
            attention = DecodeAttention(self._cache, lengths, num_tokens=num_tokens)
            states = self._slots.states
            context = states.decoding(attention) if states else attention
            return model.head.logits(model.hidden(ids[None], positions[None], context, routing=record))

        if record is not None:
            logits = forward()
            self._note_routed(record)
            return logits

        if self._steps is None or self._steps.is_disabled:
            return forward()
        return self._steps.logits(
            ids, lengths, positions, self._cache, num_tokens=num_tokens, forward=forward
        )

    def _note_routed(self, record: RoutingRecord) -> None:
        """Enter the experts of the token that each running sequence has just read."""
        chosen = record.chosen()
        for request, token in zip(self.running, chosen.numpy().astype(TOKEN_DTYPE), strict=True):
            request.routed.append(token.tobytes())

    def _sample(self, logits: Tensor, slots: range, version: int) -> Unread:
        """One token for these slots."""
        rows = self._slots.rows[slots.start : slots.stop]
        tokens, log_probs = next_tokens(logits, rows, self._model.vocabulary)
        requests = self.running[slots.start : slots.stop]
        return Unread.of(requests, tokens, log_probs, first=slots.start, version=version)

    def _read(self, unread: Unread, *, num_behind: int = 0) -> None:
        """Record tokens, and release the sequences that ended with them, which have read `num_behind` of their tokens
        too many."""
        tokens, log_probs = unread.read()
        version, slots = unread.version, range(unread.first, unread.first + len(tokens))
        rows = self._slots.rows[slots.start : slots.stop]
        if any(value != value for value in log_probs):  # NaN; everything that runs has the same weights
            dtype = str(self._model.compute_dtype).removeprefix("torch.")
            raise ValueError(
                f"the model gives NaN in place of logits (policy version {version}): its weights are no numbers any "
                f"more, or overflow in {dtype}; look at actor/grad_norm and at actor.optim.lr, and go on from an "
                f"earlier checkpoint"
            )
        rows["last"] = tokens
        self.sampled = zlib.crc32(rows["last"].tobytes(), self.sampled)
        ended = [
            slot
            for slot, token, log_prob in zip(slots, tokens, log_probs, strict=True)
            if self.running[slot].ends_with(token, log_prob, version)
        ]
        self.num_decoded += len(slots)
        self._slots.rows["length"][ended] -= num_behind
        self._release(ended)

    def _release(self, slots: Sequence[int]) -> None:
        """Free these slots of sequences that ended."""
        if slots:
            self._is_short = False
        for slot in sorted(slots, reverse=True):
            computed = self._cache.computed(slot, int(self._slots.lengths[slot]))
            self.prefill.add(self.running[slot], computed, max_bytes=self._spare_bytes)
            self._slots.vacate(slot)
