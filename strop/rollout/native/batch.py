"""Continuous batching: requests enter when there is room and leave when they end.

One call of `step` admits waiting requests (each distinct prompt computed once, whatever the number of
samples), decodes one token for every running sequence, and returns the requests that ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from strop.engines.attention import PackedAttention, Segment
from strop.engines.causal_lm import CausalLM
from strop.engines.packing import joined_positions, next_position
from strop.rollout.native.cache import DecodeAttention, PrefillAttention, SlotCache
from strop.rollout.native.sampling import SEQUENCE, next_tokens
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput
from strop.trajectory import Media

PREFILL_TOKENS = 4096
"""Prompt tokens computed in one forward pass; a longer prompt runs alone."""


@dataclass(eq=False)
class Request:
    """One sequence: what was asked, and the tokens so far."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    media: tuple[Media, ...] = ()
    """Images and videos that tokens of the prompt stand for."""
    on_token: OnToken | None = None
    """Hears of each token."""
    prompt_key: Hashable = field(init=False)
    """Equal for equal prompts with equal media; unlike a tuple of tokens it is hashed only once."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_key = np.array(self.prompt_ids, dtype=np.int64).tobytes()
        if self.media:
            self.prompt_key = (self.prompt_key, *(one.key for one in self.media))

    def output(self, stop_reason: StopReason) -> TokenOutput:
        """What was generated so far."""
        return TokenOutput(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
        )


@dataclass(frozen=True)
class _Prefix:
    """A computed prompt: its keys and values and the logits of its next token."""

    key_values: Tensor  # [2, L, Hkv, P, D]
    logits: Tensor  # [V]
    shift: int
    """Position of the next token, less the number of tokens: an image has fewer positions than tokens."""


class DecodeBatch:
    """The running and waiting sequences of one model."""

    def __init__(self, model: CausalLM, *, max_running: int) -> None:
        self._model = model
        self._max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache = SlotCache(max_running)
        self._prefixes: dict[Hashable, _Prefix] = {}
        self._rows = np.zeros(max_running, dtype=SEQUENCE)
        self.num_prefilled = 0
        """Prompt tokens computed so far."""
        self.num_decoded = 0
        """Tokens sampled so far."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    @property
    def cache_bytes(self) -> int:
        """Memory of the running sequences' keys and values."""
        return self._cache.num_bytes

    def forget(self) -> None:
        """Drop computed prompts; sequences that run keep theirs."""
        self._prefixes.clear()

    def free(self) -> None:
        """Give the cache's memory back; no request may be running."""
        assert not self.running, "running sequences need the cache"
        self.forget()
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
        """Move waiting requests into free slots and sample their first token from the prompt's logits."""
        count = min(len(self.waiting), self._max_running - len(self.running))
        if count == 0:
            return []
        # Requests of one prompt take consecutive slots, in the order in which their prompt first came.
        groups: dict[Hashable, list[Request]] = {}
        for _ in range(count):
            request = self.waiting.popleft()
            groups.setdefault(request.prompt_key, []).append(request)
        self._prefill([group[0] for key, group in groups.items() if key not in self._prefixes])
        first = len(self.running)
        logits = []
        for key, requests in groups.items():
            prefix = self._prefixes[key]
            slots = range(len(self.running), len(self.running) + len(requests))
            self._cache.write(slots, prefix.key_values)
            logits.append(prefix.logits.expand(len(requests), -1))
            for slot, request in zip(slots, requests, strict=True):
                how, length = request.sampling, len(request.prompt_ids)
                options = how.temperature, how.top_p, how.top_k, how.key, how.position
                self._rows[slot] = (*options, length, prefix.shift, 0)
            self.running.extend(requests)
        if self._prefixes:
            still_wanted = {request.prompt_key for request in self.waiting}
            self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key in still_wanted}
        return self._take(torch.cat(logits), range(first, len(self.running)), version)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Compute the prompts of these requests, all different, packed under a token bound."""
        chunk: list[Request] = []
        size = 0
        for request in requests:
            if chunk and size + len(request.prompt_ids) > PREFILL_TOKENS:
                self._prefill_chunk(chunk)
                chunk, size = [], 0
            chunk.append(request)
            size += len(request.prompt_ids)
        if chunk:
            self._prefill_chunk(chunk)

    def _prefill_chunk(self, requests: Sequence[Request]) -> None:
        model = self._model
        lengths = [len(request.prompt_ids) for request in requests]
        ends = np.cumsum(lengths)
        segments = [Segment(start=int(end) - n, length=n) for end, n in zip(ends, lengths, strict=True)]
        attention = PrefillAttention(PackedAttention(segments, device=model.device))
        ids = torch.tensor([token for r in requests for token in r.prompt_ids], device=model.device)
        media = [one for request in requests for one in request.media]
        placed = [self._positions(request) for request in requests]
        shifts = [next_position(one) - n for one, n in zip(placed, lengths, strict=True)]
        arguments = None
        if media and model.media is not None:
            arguments = model.media.arguments(media, device=model.device)
        hidden = model.hidden(ids[None], joined_positions(placed).to(model.device), attention, arguments)
        logits = self._logits(hidden[torch.from_numpy(ends - 1).to(model.device)])
        key_values = attention.key_values(model.compute_dtype)
        for index, (request, segment) in enumerate(zip(requests, segments, strict=True)):
            tokens = key_values[:, :, :, segment.start : segment.start + segment.length]
            self._prefixes[request.prompt_key] = _Prefix(tokens, logits[index], shifts[index])
        self.num_prefilled += int(ends[-1])

    def _positions(self, request: Request) -> Tensor:
        """Positions [P] of a prompt; [3, P] of one with media."""
        if not request.media or self._model.media is None:
            return torch.arange(len(request.prompt_ids))
        return self._model.media.positions(torch.tensor(request.prompt_ids), request.media)

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
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.head.logits(hidden)

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
            if slot != last:
                self._cache.move(last, slot, int(self._rows["length"][last]))
                self._rows[slot] = self._rows[last]
                self.running[slot] = self.running[last]
            self.running.pop()
