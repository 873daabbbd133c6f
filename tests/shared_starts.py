"""Distribution of test files over the processes of `make test`: those that share something costly go to one of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

SHARED = {
    "a cluster of Ray": r"\bshared_cluster\b",
    "the server of processes, and ranks": r"\b(run_ranks|run_program|start_program|replica_processes|doc_pages)\b",
    "runs of the command line": r"\b(trained|interrupted|other_seed|tuned): Path\b",
    "a run of three steps": r"\bon_policy: Done\b",
}
"""What is started or made at its first use in a process, for all later ones; and what a file that uses it has in its
text."""


class ByWhatIsShared(LoadFileScheduling):
    """The tests of a file one after the other in one process, as are all files with the same of `SHARED`."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid), self.config.rootpath)


@cache
def scope_of(file: str, root: Path) -> str:
    """The first of `SHARED` that a test file uses; where it uses none, the file."""
    text = (root / file).read_text(encoding="utf-8")
    return next((shared for shared, uses in SHARED.items() if re.search(uses, text)), file)
