"""Whether this tree is slower than an earlier commit, in two minutes.

    make bench-quick                                   this tree beside the commit that was last measured
    make bench-quick ARGS="--against HEAD~3 --only update packing"

Short fixed workloads (workloads.py) run in processes of both trees in turns, so that the machine's drift hits both: the
earlier tree in a temporary git worktree, each process with one thread. Rounds go through all workloads with a few
repeats of each, and half-way both trees get new processes, a new launch. Counted are processor seconds.

`ratio` is the median of the ratios of neighbours, this tree over the earlier one; `noise` is two standard errors of
that median, or the distance to that of one launch where this is more. A workload is slower where its ratio is beyond
the noise, and beyond 1.05 as that of the shortest repeats is; where that seems so, one more launch has to agree. Exit
status 1: something is slower.

The earlier commit is the last one in history.jsonl that was measured on a machine like this one and is an ancestor of
the commit checked out; else the tenth before it. A workload that the earlier tree does not have is named, not compared.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from history import HISTORY, ROOT, HistoryError, git, is_like, read
from machine import machine

WORKLOADS = ("generation", "log_probs", "update", "packing", "dispatch", "start", "quickstart")
LONG = ("start", "quickstart")
"""Workloads of about a second. A repeat of the others is the least of TRIES, which leaves out most of what other
programs cost them, and a round has as many repeats."""
TRIES = 3
SLOWER = 1.05
"""A ratio below this one is never called slower."""
LAUNCHES, MIN_ROUNDS, MORE_ROUNDS = 2, 2, 4
"""Launches; rounds of each at least; rounds of another one where something seems slower."""
ANSWER_S = 300.0
"""Bound on the start of a process and on a workload."""
SIDES = ("before", "after")
Repeats = tuple[tuple[float, float], ...]
"""Processor seconds of the earlier tree and of this one, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Repeats of a workload."""

    launches: tuple[Repeats, ...]
    """Of each pair of processes."""

    @property
    def _repeats(self) -> Repeats:
        return tuple(repeat for launch in self.launches for repeat in launch)

    @property
    def least(self) -> tuple[float, float]:
        """Shortest repeat of either side."""
        before, after = zip(*self._repeats, strict=True)
        return min(before), min(after)

    @property
    def ratio(self) -> float:
        """Median of the ratios of neighbours."""
        return _median_ratio(self._repeats)

    @property
    def noise(self) -> float:
        """Two standard errors of the median, as normal errors with the same median deviation would have, or the largest
        distance of a launch's median from it."""
        deviations = [abs(after / before - self.ratio) for before, after in self._repeats]
        sigma = statistics.median(deviations) / 0.6745
        error = math.sqrt(math.pi / 2) * sigma / math.sqrt(len(deviations))
        return max(2 * error, *(abs(_median_ratio(launch) - self.ratio) for launch in self.launches))

    @property
    def is_slower(self) -> bool:
        """Beyond the noise, and beyond what is never called slower; one launch says nothing."""
        before, after = self.least
        is_beyond = self.ratio > max(SLOWER, 1 + self.noise)
        return len(self.launches) > 1 and is_beyond and after / before > SLOWER

    def summary(self) -> dict[str, Any]:
        """Numbers of the JSON line."""
        before, after = self.least
        return {
            "seconds": {"before": round(before, 4), "after": round(after, 4)},
            "ratio": round(self.ratio, 3),
            "noise": round(self.noise, 3),
            "repeats": [len(launch) for launch in self.launches],
            "is_slower": self.is_slower,
        }


def _median_ratio(repeats: Repeats) -> float:
    return statistics.median(after / before for before, after in repeats)


class Side:
    """A process of workloads.py with the strop of one tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        path = os.environ.get("PYTHONPATH", "")
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree}{os.pathsep}{path}", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # else every import of a command compiles
        self._errors = (folder / "errors.txt").open("a")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("workloads.py")), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env, cwd=folder,
        )  # fmt: skip
        self._tree = tree

    def wait(self) -> None:
        """Wait until it has started.

        Raises:
            HistoryError: it imports the strop of another tree.
        """
        found = Path(self._read()["strop"])
        if found != self._tree / "strop":
            raise HistoryError(
                f"the process for {self._tree} imports {found}: its PYTHONPATH does not come first"
            )

    def seconds(self, name: str) -> float | str:
        """Processor seconds of a workload, or its error."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        answer = self._read()
        found: float | str = answer["seconds"] if "seconds" in answer else answer["error"]
        return found

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # No answer lies in the buffer: there is one to each question.
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise HistoryError(f"a process of workloads.py gave no answer within {ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._errors.flush()
            said = Path(self._errors.name).read_text()[-2000:]
            raise HistoryError(f"a process of workloads.py ended:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class Sitting:
    """Launches of workloads on two trees."""

    def __init__(self, trees: Mapping[str, Path], folder: Path) -> None:
        self._trees, self._folder = trees, folder
        self._launches: dict[str, list[list[tuple[float, float]]]] = {}
        self.failed: dict[str, str] = {}

    def launch(self, names: Sequence[str], *, limit_s: float, rounds: int) -> None:
        """New processes of both trees, and rounds in them: so many at least, and more while they end in time.

        Args:
            names: of workloads; those that fail are left out from then on.
            limit_s: from the start of the processes on.
            rounds: at least.
        """
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            sides: dict[str, Side] = {}
            for side in SIDES:
                sides[side] = Side(self._trees[side], self._folder)
                stack.callback(sides[side].close)
            for started in sides.values():  # both at once
                started.wait()
            for name in names:
                self._repeat(name, sides, 0)  # warms up
                self._launches.setdefault(name, []).append([])
            number, longest = 0, 0.0
            while number < rounds or time.monotonic() - begun + longest < limit_s:
                start = time.monotonic()
                for name in names:
                    for repeat in range(2 if name in LONG else TRIES):
                        self._launches[name][-1] += self._repeat(name, sides, repeat)
                longest = max(longest, time.monotonic() - start)
                number += 1

    def _repeat(self, name: str, sides: Mapping[str, Side], number: int) -> list[tuple[float, float]]:
        """Processor seconds of both sides, of which the odd repeats begin with the other one; none where one fails."""
        taken: dict[str, float] = {}
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            if name in self.failed:
                return []
            for _ in range(1 if name in LONG else TRIES):
                seconds = sides[side].seconds(name)
                if isinstance(seconds, str):
                    self.failed[name] = f"{side}: {seconds}"
                    return []
                taken[side] = min(seconds, taken.get(side, math.inf))
        return [(taken["before"], taken["after"])]

    def comparisons(self) -> dict[str, Comparison]:
        """By workload."""
        return {
            name: Comparison(launches=tuple(tuple(launch) for launch in launches))
            for name, launches in self._launches.items()
            if name not in self.failed
        }


def earlier_commit(root: Path, lines: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> str:
    """The last measured ancestor of HEAD on a like machine; else the tenth commit before HEAD, or the first one.

    Args:
        root: of the checkout.
        lines: of the history.
        where: facts of this machine.
    """
    before = git(root, "rev-list", "HEAD").splitlines()[1:]
    ancestors = set(before)
    for line in reversed(lines):
        if line["commit"] in ancestors and is_like(line["machine"], where):
            commit: str = line["commit"]
            return commit
    if not before:
        raise HistoryError(f"{root} has no commit before HEAD to compare with")
    return before[min(9, len(before) - 1)]


@contextlib.contextmanager
def checked_out(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    """A commit in a worktree of its own, which is removed afterwards."""
    tree = folder / "before"
    git(root, "worktree", "add", "--detach", str(tree), commit)
    try:
        yield tree
    finally:
        git(root, "worktree", "remove", "--force", str(tree))


def compare(names: Sequence[str], trees: Mapping[str, Path], folder: Path, limit_s: float) -> Sitting:
    """Launches that share the time, and another one for what seems slower."""
    sitting = Sitting(trees, folder)
    for _ in range(LAUNCHES):
        sitting.launch(names, limit_s=limit_s / LAUNCHES, rounds=MIN_ROUNDS)
    slower = [name for name, of in sitting.comparisons().items() if of.is_slower]
    if slower:
        sitting.launch(slower, limit_s=0, rounds=MORE_ROUNDS)
    return sitting


def main() -> None:
    """Compare, print, and end with 1 where something is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--against", metavar="COMMIT", help="the earlier commit")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=WORKLOADS, metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=100.0, help="of all rounds but the last ones")
    options = parser.parse_args()
    where = machine()
    try:
        if options.against:
            commit = git(ROOT, "rev-parse", "--verify", f"{options.against}^{{commit}}")
        else:
            commit = earlier_commit(ROOT, list(read(HISTORY)), where)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            with checked_out(ROOT, commit, folder) as tree:
                sitting = compare(options.only, {"before": tree, "after": ROOT}, folder, options.limit_s)
    except HistoryError as error:
        sys.exit(str(error))
    comparisons = sitting.comparisons()
    if not options.json:
        print(table(comparisons, commit))
        for workload, error in sitting.failed.items():
            print(f"{workload:12}not compared: {error}")
    slower = [workload for workload, of in comparisons.items() if of.is_slower]
    line = {
        "benchmark": "quick", "against": commit, "slower": slower,
        "workloads": {workload: of.summary() for workload, of in comparisons.items()},
        "failed": sitting.failed, "machine": where,
    }  # fmt: skip
    print(json.dumps(line))
    sys.exit(1 if slower else 0)


def table(comparisons: Mapping[str, Comparison], commit: str) -> str:
    """Lines for a person."""
    lines = [f"{'processor s':12}{commit[:10]:>12}{'this tree':>12}{'ratio':>9}{'noise':>9}"]
    for name, of in comparisons.items():
        (before, after), verdict = of.least, "  slower" if of.is_slower else ""
        lines.append(f"{name:12}{before:12.4f}{after:12.4f}{of.ratio:9.3f}{of.noise:9.1%}{verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
