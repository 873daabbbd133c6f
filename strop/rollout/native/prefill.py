"""The tokens that requests begin with: computed in pieces of bounded size, each distinct beginning once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.causal_lm import CausalLM
from strop.engines.cpu.attention import KEY_BLOCK
from strop.engines.linear_attention.packed import States
from strop.engines.moe.routing import RoutingRecord
from strop.engines.packing import joined_positions, next_position
from strop.engines.segments import Segment, Span
from strop.protocol.routed_experts import TOKEN_DTYPE
from strop.rollout.native.cache import ComputedTensor
from strop.rollout.native.key_values import Computed, KeyValueCache
from strop.rollout.native.prefix_reuse import KeptTurns
from strop.rollout.native.request import Request
from strop.utils.device import sent

PREFILL_TOKENS = 4096
"""Given tokens computed in one step, beside one token of every running sequence; a prompt with media is never cut."""
DEVICE_PREFILL_TOKENS = 16384
"""The same on an accelerator, which fewer leave idle."""
DEVICE_PREFIX_TOKENS = 8 * DEVICE_PREFILL_TOKENS
"""Most tokens that they continue, where those are copied out of pages, unless one request has more: one layer at a
time, which is half a gigabyte of Qwen3-0.6B in bfloat16."""


class PrefillAttention:
    """Packed attention to the tokens of a piece and of the prefixes that they continue; keeps keys and values."""

    def __init__(self, attention: PackedAttention, prefixes: Callable[[int], Tensor] | None = None) -> None:
        """Args:
        attention: of the row.
        prefixes: gives [2, P, Hkv, D] of a layer; they lie in the attention's row behind the tokens.
        """
        self._attention, self._prefixes = attention, prefixes
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [N, H, Dv], as PackedAttention gives it."""
        assert layer == len(self.keys), "layers attend in order, each once"
        self.keys.append(key)
        self.values.append(value)
        if self._prefixes is not None:
            heads, dim, value_dim = *key.shape[1:], value.shape[2]
            keys, values = self._prefixes(layer)
            key = torch.cat([key, keys[:, :heads, :dim].to(key.dtype)])
            value = torch.cat([value, values[:, :heads, :value_dim].to(value.dtype)])
        return self._attention.attend(layer, query, key, value, form)

    def key_values(self, dtype: torch.dtype) -> Tensor:
        """[2, L, Hkv, N, D]: keys and values of all layers and packed tokens."""
        parts = (*self.keys, *self.values)
        heads, dim = max(key.shape[1] for key in self.keys), max(part.shape[2] for part in parts)
        every = torch.stack([_padded(part, heads, dim) for part in parts])  # all tokens of a step: one copy
        return every.view(2, len(self.keys), *every.shape[1:]).transpose(2, 3).to(dtype)


def _padded(part: Tensor, heads: int, dim: int) -> Tensor:
    """[N, heads, dim] of a layer's keys or values, with zeros where it has fewer."""
    missing = (0, dim - part.shape[2], 0, heads - part.shape[1])
    return F.pad(part, missing) if any(missing) else part


@dataclass(frozen=True)
class PrefilledPrompt:
    """Computed beginning of a request: its keys and values and the logits of its next token."""

    token_ids: tuple[int, ...]
    key_values: Computed
    logits: Tensor  # [V]
    shift: int
    """Position of the next token, less the number of tokens: an image has fewer positions than tokens."""
    states: States = ()
    """Of layers that carry a state, behind the last token."""
    routed: tuple[bytes, ...] = ()
    """Experts of each token, where they are recorded (`RoutedExperts.tokens`)."""


@dataclass(frozen=True)
class _Piece:
    """Tokens of one request that are computed in this step."""

    request: Request
    prefix: Computed | None  # computed before
    start: int
    stop: int
    states: States = ()  # computed before
    routed: tuple[bytes, ...] = ()  # computed before


class FusedPrefill(Protocol):
    """Prefill in place of the model's own forward pass."""

    def prefill(
        self,
        pieces: Sequence[tuple[Sequence[int], Tensor | None]],
        own: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Logits [P, V] behind each piece, and the keys and values [2, L, Hkv, T, D] of what is before it and its own;
        None where it is not for this model.

        Args:
            pieces: tokens, not none, and the keys and values of those before them.
            own: logits [V] behind the first tokens [N] of a sequence, and their keys and values [2, L, Hkv, N, D], by
                the model's own forward pass.
        """


class Prefill:
    """Computes what requests begin with, each distinct beginning once."""

    def __init__(
        self,
        model: CausalLM,
        cache: KeyValueCache,
        *,
        reuses: bool = True,
        records_routing: bool = False,
        fused: FusedPrefill | None = None,
    ) -> None:
        """With `reuses`, a request may begin with tokens that were computed for others; not where experts are recorded,
        which nobody keeps beside the keys and values of earlier requests. The cache takes what is computed. `fused`
        comes before the model's own forward pass."""
        self._model, self._cache, self._records, self._fused = model, cache, records_routing, fused
        cache.reclaim = self.drop_oldest
        reuses = reuses and model.recurrence is None  # states are known behind the last token alone
        reuses = reuses and not records_routing
        # Ranks are asked in an order of the moment, and another cut would change the last digits of what is behind it.
        self._together = KEY_BLOCK if model.device.type == "cpu" and model.is_sharded else 1
        self._kept = KeptTurns(together=self._together) if reuses else None
        self._done: dict[Hashable, PrefilledPrompt] = {}  # wanted by a request that waits
        # Keys and values, states and experts of the first tokens of what is too long for a step.
        self._begun: dict[Hashable, tuple[Computed, States, tuple[bytes, ...]]] = {}
        self.num_computed = 0
        """Given tokens computed so far."""
        self.num_reused = 0
        """Given tokens that were found computed, with the weights of the same version."""

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept for later requests."""
        return 0 if self._kept is None else self._kept.num_bytes

    def get(self, request: Request) -> PrefilledPrompt | None:
        """Computed beginning of the request; None while it is not computed."""
        return self._done.get(request.given_key)

    def num_computed_of(self, request: Request) -> int:
        """Tokens of a waiting request whose keys and values are in the cache."""
        key = request.given_key
        if not self._cache.holds_computed:
            return 0
        if key in self._done:
            return self._done[key].key_values.num_tokens
        if key in self._begun:
            return self._begun[key][0].num_tokens
        return 0 if self._kept is None or request.media else self._kept.num_shared(request)

    def forget(self) -> None:
        """Drop everything computed."""
        self._done.clear()
        self._begun.clear()
        self.drop_kept()

    def forget_but(self, requests: Iterable[Request]) -> bool:
        """Drop what is computed for no request of these; False where there is nothing."""
        keys, before = {request.given_key for request in requests}, len(self._done) + len(self._begun)
        self._done = {key: prefilled for key, prefilled in self._done.items() if key in keys}
        self._begun = {key: begun for key, begun in self._begun.items() if key in keys}
        return len(self._done) + len(self._begun) < before

    def drop_kept(self) -> None:
        """Drop what only later requests could use."""
        if self._kept is not None:
            self._kept.clear()

    def drop_oldest(self, is_needed: bool) -> bool:
        """Drop some of that, as KeyValueCache.reclaim."""
        return self._kept is not None and self._kept.drop_oldest(is_needed)

    def keep(self, requests: Iterable[Request], *, max_bytes: int) -> None:
        """Drop what none of these requests waits for; later ones may find it."""
        keys = {request.given_key for request in requests}
        for key in self._done.keys() - keys:
            prefilled = self._done.pop(key)
            if self._kept is not None and isinstance(key, bytes):  # without media
                self._kept.keep(prefilled.token_ids, prefilled.key_values, max_bytes=max_bytes)
        self._begun = {key: begun for key, begun in self._begun.items() if key in keys}

    def add(self, request: Request, key_values: Computed, *, max_bytes: int) -> None:
        """Later requests may go on from the keys and values of one that ended."""
        is_whole = key_values.num_tokens == len(request.computed_ids) and request.token_ids
        if self._kept is not None and is_whole and not request.media:
            self._kept.keep_ended(request, key_values, max_bytes=max_bytes)

    def compute(self, requests: Iterable[Request]) -> None:
        """Go on with these requests in their order, of different beginnings, up to PREFILL_TOKENS tokens."""
        room = PREFILL_TOKENS if self._model.device.type == "cpu" else DEVICE_PREFILL_TOKENS
        copied = 0
        pieces: list[_Piece] = []
        for request in requests:
            if request.given_key in self._done:
                continue
            prefix, states, routed = self._begun.get(request.given_key, (None, (), ()))
            if prefix is None and self._kept is not None and not request.media:
                prefix = self._kept.find(request)
            start = 0 if prefix is None else prefix.num_tokens
            copied += start if self._cache.holds_computed else 0
            if pieces and copied > DEVICE_PREFIX_TOKENS:
                break
            size = len(request.given_ids) - start
            if size > room and request.media and pieces:
                break
            if size > room and not request.media:
                size = (start + room) // self._together * self._together - start
                if size <= 0:
                    break
            pieces.append(_Piece(request, prefix, start, start + size, states, routed))
            room -= size
            if room <= 0:
                break
        if pieces:
            self._compute(pieces)

    def _compute(self, pieces: Sequence[_Piece]) -> None:
        """Keys and values of these pieces, and the logits behind those that end a prompt."""
        computed = None
        if self._fused is not None:
            given = [
                (
                    piece.request.given_ids[piece.start : piece.stop],
                    None if piece.prefix is None else piece.prefix.read(),
                )
                for piece in pieces
            ]
            computed = self._fused.prefill(given, self._own)
        if computed is None:
            self._forward(pieces)
        else:
            for piece, logits, key_values in zip(pieces, *computed, strict=True):
                self._note(piece, ComputedTensor(key_values), logits)

    def _own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As the argument `own` of FusedPrefill.prefill."""
        packed = PackedAttention([Segment(start=0, length=len(ids))], device=ids.device)
        attention = PrefillAttention(packed)
        hidden = self._model.hidden(ids[None], torch.arange(len(ids), device=ids.device)[None], attention)
        return self._model.head.logits(hidden[-1:])[0], attention.key_values(self._model.compute_dtype)

    def _note(
        self,
        piece: _Piece,
        key_values: Computed,
        logits: Tensor,
        *,
        shift: int = 0,
        states: States = (),
        routed: tuple[bytes, ...] = (),
    ) -> None:
        """Keep keys and values of all tokens up to the end of a piece, and the logits [V] behind it."""
        request = piece.request
        self.num_computed += piece.stop - piece.start
        if request.given_key not in self._begun:
            self.num_reused += piece.start
        if piece.stop < len(request.given_ids):
            self._begun[request.given_key] = key_values, states, routed
        else:
            self._begun.pop(request.given_key, None)
            self._done[request.given_key] = PrefilledPrompt(
                request.given_ids, key_values, logits.clone(), shift, states, routed
            )

    def _forward(self, pieces: Sequence[_Piece]) -> None:
        """One forward pass of the model over these pieces."""
        model = self._model
        segments, first, behind = [], 0, sum(piece.stop - piece.start for piece in pieces)
        for piece in pieces:
            size = piece.stop - piece.start
            segments.append(
                Segment(start=first, length=size, prefix=((behind, behind + piece.start),))
                if piece.start
                else Segment(start=first, length=size, blocks=self._blocks(piece))
            )
            first, behind = first + size, behind + piece.start
        prefixes = [piece.prefix for piece in pieces if piece.prefix is not None]
        attention = PrefillAttention(
            PackedAttention(segments, device=model.device),
            self._cache.reading(prefixes) if prefixes else None,
        )
        with_states = model.recurrence and model.recurrence.prefilling(
            attention, segments, [piece.states for piece in pieces]
        )
        given = [token for piece in pieces for token in piece.request.given_ids[piece.start : piece.stop]]
        ids = sent(torch.tensor(given), model.device)
        media = [item for piece in pieces for item in piece.request.media]
        arguments = None
        if media and model.media is not None:
            arguments = model.media.arguments(media, device=model.device)
        placed = [self._positions(piece) for piece in pieces]
        positions = sent(joined_positions(placed), model.device)
        record = RoutingRecord() if self._records else None
        hidden = model.hidden(ids[None], positions, with_states or attention, arguments, record)
        chosen = None if record is None else record.chosen()
        last = sent(torch.tensor([segment.start + segment.length - 1 for segment in segments]), model.device)
        logits = model.head.logits(hidden[last])
        key_values = attention.key_values(model.compute_dtype)
        for index, (piece, segment) in enumerate(zip(pieces, segments, strict=True)):
            states = with_states.states(index) if with_states else ()
            computed = self._cache.put(
                key_values[:, :, :, segment.start : segment.start + segment.length],
                before=piece.prefix,
                state_bytes=sum(part.nbytes for parts in states for part in parts),
            )
            if computed is None:  # it waits until there is room, with the pieces before
                continue
            routed = piece.routed
            if chosen is not None:
                of_piece = chosen[segment.start : segment.start + segment.length]
                routed += tuple(token.tobytes() for token in of_piece.numpy().astype(TOKEN_DTYPE))
            shift = next_position(placed[index]) - piece.stop
            self._note(piece, computed, logits[index], shift=shift, states=states, routed=routed)

    def _blocks(self, piece: _Piece) -> tuple[Span, ...]:
        """Runs of tokens of a piece that see each other whatever their order; a prompt with media is one piece."""
        request, media = piece.request, self._model.media
        return media.blocks(torch.tensor(request.given_ids)) if request.media and media is not None else ()

    def _positions(self, piece: _Piece) -> Tensor:
        """Positions [P] of a piece; [3, P] of one with media, if the model counts those along three axes."""
        request = piece.request
        if not request.media or self._model.media is None:
            return torch.arange(piece.start, piece.stop)
        return self._model.media.positions(torch.tensor(request.given_ids), request.media)
