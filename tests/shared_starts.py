"""Distribution of test files over the processes of `make test`: those that share a costly start go to one of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

SHARED = ("shared_cluster", "run_ranks")
"""Functions that start something at their first call in a process, for all later ones: a Ray cluster, and ranks of
torch.distributed."""


class ByWhatIsShared(LoadFileScheduling):
    """The tests of a file one after the other in one process, as are all files that name a function of `SHARED`."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid), self.config.rootpath)


@cache
def scope_of(file: str, root: Path) -> str:
    """The function of `SHARED` that a test file names; where it names none, the file."""
    text = (root / file).read_text(encoding="utf-8")
    return next((name for name in SHARED if name in text), file)
