"""Selection of computed tokens that are kept for later requests."""

from __future__ import annotations

from strop.rollout.native.key_values import Computed
from strop.rollout.native.prefix_cache import Prefix, PrefixStore, beginnings
from strop.rollout.native.request import Request

ENDED = 4096
"""Sequences that ended are remembered by a number each, so many of them, until one is continued for the first time."""


class KeptTurns:
    """Prompts, and the whole of sequences that ended once a request has continued one of them.

    Before, only the beginning of a sequence that ended is remembered: where episodes have one turn, nothing would ever
    use the copies.
    """

    def __init__(self, *, together: int = 1) -> None:
        """With `together`, a request begins with a multiple of so many tokens."""
        self._store, self._together = PrefixStore(), together
        # Hashes of the prompts of ended sequences, each with the first token behind it; the last one at the end.
        self._ended: dict[int, None] = {}
        self._goes_on = False  # a request has continued one that ended, so these are worth their copies

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._store.num_bytes

    def find(self, request: Request) -> Computed | None:
        """Keys and values of most first tokens of a request; the last one is always computed, for its logits."""
        if not self._goes_on and any(
            beginning in self._ended for beginning in beginnings(request.prompt_ids)
        ):
            self._goes_on = True
            self._ended.clear()
        kept_prefix = self._store.find(request.given_ids)
        if kept_prefix is None:
            return None
        prefix, shared = kept_prefix
        shared = self._begun(shared, request)
        return prefix.key_values.first(shared) if shared else None

    def num_shared(self, request: Request) -> int:
        """Number of first tokens of a request whose keys and values `find` gives, which stay as old as they are."""
        return self._begun(self._store.num_shared(request.given_ids), request)

    def _begun(self, shared: int, request: Request) -> int:
        """Tokens that a request begins with, of so many that are known."""
        return min(shared, len(request.given_ids) - 1) // self._together * self._together

    def keep(self, token_ids: tuple[int, ...], key_values: Computed, *, max_bytes: int) -> None:
        """Keep what a request began with, unless it is known with others behind it, or too short to begin with."""
        if len(token_ids) < self._together:
            return
        prefix = self._store.find(token_ids)
        if prefix is None or prefix[1] < len(token_ids):
            self._store.add(Prefix(token_ids, key_values), max_bytes=max_bytes)

    def keep_ended(self, request: Request, key_values: Computed, *, max_bytes: int) -> None:
        """Keep a sequence that ended, whose slot is used again, unless it is too short to begin with."""
        if len(request.computed_ids) < self._together:
            return
        if self._goes_on:
            self._store.add(Prefix(request.computed_ids, key_values.kept()), max_bytes=max_bytes)
            return
        *_, beginning = beginnings((*request.prompt_ids, request.token_ids[0]))
        self._ended[beginning] = None
        if len(self._ended) > ENDED:
            del self._ended[next(iter(self._ended))]

    def drop_oldest(self, is_needed: bool) -> bool:
        """Give the memory back of what was not used for the longest time, once a request has gone on from such only if
        it is needed; False where there is nothing."""
        return (is_needed or not self._goes_on) and self._store.drop_oldest()

    def clear(self) -> None:
        """Give the memory back."""
        self._store.clear()
