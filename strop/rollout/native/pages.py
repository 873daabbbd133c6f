"""The pages of a cache of keys and values: which are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Sequence

NOBODYS = 0
"""The page of slots in which nothing runs: decode steps of a fixed shape write to it."""


class PagePool:
    """Numbers of pages, on the host. A page is free when nobody holds it any more."""

    def __init__(self, num_pages: int, *, most_used: int = 0) -> None:
        """All are free but NOBODYS; as many were held at one time in the pool before this one."""
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, NOBODYS, -1))
        self.most_used = most_used
        """Pages that were held at one time."""

    def __len__(self) -> int:
        """All pages."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages that may be taken."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return max(0, len(self) - 1 - len(self._free))

    def take(self, count: int) -> list[int]:
        """So many free pages, which the caller holds."""
        assert count <= len(self._free), "there is room for them"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        self.most_used = max(self.most_used, self.num_used)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holds each of these."""
        for page in pages:
            assert self._holders[page] > 0, "somebody holds it"
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One fewer holds each of these."""
        for page in pages:
            assert self._holders[page] > 0, "somebody holds it"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def grow(self, num_pages: int) -> None:
        """From now on there are so many."""
        first = max(len(self), NOBODYS + 1)
        self._holders += [0] * (num_pages - len(self))
        self._free[:0] = range(num_pages - 1, first - 1, -1)
