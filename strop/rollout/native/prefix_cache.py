"""Computed tokens that may begin a later request: prompts, and sequences that ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from strop.rollout.native.key_values import Computed


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens whose keys and values are known."""

    token_ids: tuple[int, ...]
    key_values: Computed


class PrefixStore:
    """The prefixes used last, within a bound, found by the tokens that they share with a sequence.

    Every beginning of a prefix leads to the one of its holders that was used last. So a prefix that is dropped, as the
    one not used for the longest time, leaves no beginning behind that another one has.
    """

    def __init__(self) -> None:
        self._used: dict[Prefix, None] = {}  # the one used last at the end
        self._holder: dict[int, Prefix] = {}  # by the hash of a beginning
        self.num_bytes = 0
        """Memory held."""

    def find(self, token_ids: Sequence[int]) -> tuple[Prefix, int] | None:
        """The prefix that shares most tokens with the beginning of a sequence, and how many; None without any."""
        match = None
        for beginning in beginnings(token_ids):
            holder = self._holder.get(beginning)
            if holder is None:
                break
            match = holder
        if match is None:
            return None
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(match.token_ids, token_ids, strict=False))
        shared = sum(1 for _ in equal)  # hashes may be equal by chance
        self._use(match)
        return (match, shared) if shared else None

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """Number of first tokens that `find` finds, by their hashes alone; no prefix counts as used."""
        return sum(1 for _ in takewhile(self._holder.__contains__, beginnings(token_ids)))

    def add(self, prefix: Prefix, *, max_bytes: int) -> None:
        """Keep a prefix, which needs to hold its own memory, and drop others until `max_bytes` are enough."""
        if prefix.key_values.nbytes > max_bytes:
            return
        self._used[prefix] = None
        self.num_bytes += prefix.key_values.nbytes
        self._use(prefix)
        while self.num_bytes > max_bytes:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the prefix that was not used for the longest time; False without any."""
        oldest = next(iter(self._used), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def clear(self) -> None:
        """Drop all."""
        self._used.clear()
        self._holder.clear()
        self.num_bytes = 0

    def _use(self, prefix: Prefix) -> None:
        self._used[prefix] = self._used.pop(prefix)
        self._holder.update(dict.fromkeys(beginnings(prefix.token_ids), prefix))

    def _drop(self, prefix: Prefix) -> None:
        del self._used[prefix]
        self.num_bytes -= prefix.key_values.nbytes
        for beginning in beginnings(prefix.token_ids):
            if self._holder.get(beginning) is prefix:
                del self._holder[beginning]


def beginnings(token_ids: Sequence[int]) -> Iterator[int]:
    """A hash of the first token, of the first two, and so on."""
    key: Hashable = 0
    for token in token_ids:
        key = hash((key, token))
        yield key
