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


LONG = (
    "tests/trainer/plan/test_plan_search.py",
    "tests/trainer/test_learning.py",
    "tests/trainer/test_kill_and_resume.py",
    "tests/trainer/test_manager_runs.py",
    "tests/trainer/test_virtual_clock.py",
    "tests/workers/test_agent_workers.py",
    "tests/trainer/test_replays.py",
    "tests/trainer/preference/test_preference_commands.py",
    "tests/trainer/test_ahead_environments.py",
    "tests/trainer/test_changed_inputs.py",
    "tests/trainer/test_longer_runs.py",
    "tests/trainer/test_golden_run.py",
    "tests/engines/test_sharded_checkpoint_crashes.py",
    "tests/trainer/test_group_reward_runs.py",
    "tests/trainer/test_clock_jumps.py",
)
"""Files of few tests that take seconds each. Those with many tests come first, so that these would be the last ones,
when the other processes have nothing left."""


class ByWhatIsShared(LoadFileScheduling):
    """The tests of a file one after the other in one process, as are all files with the same of `SHARED`."""

    def schedule(self) -> None:
        """Give each process something to begin with; `LONG` is next."""
        super().schedule()
        for scope in reversed(LONG):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(super()._split_scope(nodeid), self.config.rootpath)


@cache
def scope_of(file: str, root: Path) -> str:
    """The first of `SHARED` that a test file uses; where it uses none, the file."""
    text = (root / file).read_text(encoding="utf-8")
    return next((shared for shared, uses in SHARED.items() if re.search(uses, text)), file)
