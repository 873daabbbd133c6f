"""Comparison of two trees (benchmarks/quick.py)."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import BENCHMARKS, benchmark_module, git

quick: Any = benchmark_module("quick")

MACHINE = {"cpu": "x", "features": [], "cores": 2, "versions": {"torch": "2"}}


def compared(*launches: list[float], before: float = 1.0) -> Any:
    """A comparison in which the earlier tree always takes the same time, and this one these multiples of it."""
    return quick.Comparison(
        launches=tuple(tuple((before, ratio * before) for ratio in launch) for launch in launches)
    )


def test_the_ratio_is_the_median_of_neighbours() -> None:
    # The machine gets twice as slow on the way: neighbours do not see it.
    launches = ((0.5, 0.55), (1.0, 1.1)), ((1.0, 1.1), (1.1, 1.0), (9.0, 1.0))
    assert quick.Comparison(launches=launches).ratio == pytest.approx(1.1)
    assert quick.Comparison(launches=launches).least == (0.5, 0.55)


def test_noise_is_two_standard_errors_of_the_median() -> None:
    # Deviations 0.04, 0.02, 0, 0.02, 0.04: the median one is 0.02, which is 0.6745 sigma.
    four = compared([1.06, 1.08, 1.1, 1.12, 1.14])
    assert four.noise == pytest.approx(2 * math.sqrt(math.pi / 2 / 5) * 0.02 / 0.6745)


def test_noise_is_the_distance_of_a_launch_from_the_others_where_that_is_more() -> None:
    # 1.0 three times and 1.2 four times: the median is 1.2, and the first launch is 0.2 away from it.
    apart = compared([1.0] * 3, [1.2] * 4)
    assert apart.noise == pytest.approx(0.2)
    assert not apart.is_slower


@pytest.mark.parametrize(
    ("launches", "is_slower"),
    [
        (([1.1, 1.1], [1.1, 1.1]), True),
        (([1.1, 1.1, 9.0], [0.2, 1.1, 1.1]), False),  # the shortest repeats do not agree
        (([1.1, 1.1, 9.0], [1.1, 1.1]), True),  # one bad repeat says nothing
        (([1.04, 1.04], [1.04, 1.04]), False),  # beyond the noise, but small
        (([1.0, 1.0], [1.2, 1.2]), False),  # launches disagree
        (([1.0, 1.06, 1.12], [1.0, 1.06, 1.12]), False),  # within the noise
        (([1.1, 1.1, 1.1],), False),  # one launch
        (([0.5, 0.5], [0.5, 0.5]), False),
    ],
)
def test_slower_is_beyond_the_noise_and_a_twentieth(
    launches: tuple[list[float], ...], is_slower: bool
) -> None:
    assert compared(*launches).is_slower is is_slower


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Fourteen commits, and a branch beside them."""
    git(tmp_path, "init", "-q", "-b", "main")
    for number in range(14):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", f"{number}")
        if number == 5:
            git(tmp_path, "branch", "beside")
    git(tmp_path, "checkout", "-q", "beside")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "elsewhere")
    git(tmp_path, "checkout", "-q", "main")
    return tmp_path


def line(root: Path, commit: str, **machine: Any) -> dict[str, Any]:
    return {"commit": git(root, "rev-parse", commit), "machine": {**MACHINE, **machine}}


def test_the_earlier_commit_is_the_last_measured_ancestor_on_a_like_machine(repository: Path) -> None:
    lines = [
        line(repository, "main~7"),
        line(repository, "main~4", load_at_start=3.0),
        line(repository, "main~3", cpu="y"),
        line(repository, "beside"),
        line(repository, "main"),
    ]
    assert quick.earlier_commit(repository, lines, MACHINE) == git(repository, "rev-parse", "main~4")
    assert quick.earlier_commit(repository, lines[2:], MACHINE) == git(repository, "rev-parse", "main~10")


def test_without_ten_commits_it_is_the_first_one(repository: Path) -> None:
    git(repository, "checkout", "-q", "main~11")
    assert quick.earlier_commit(repository, [], MACHINE) == git(repository, "rev-parse", "main~13")
    git(repository, "checkout", "-q", "main~13")
    with pytest.raises(quick.HistoryError, match="no commit before HEAD"):
        quick.earlier_commit(repository, [], MACHINE)


def test_the_earlier_tree_is_gone_afterwards(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    with quick.checked_out(repository, "main~3", tmp_path / "aside") as tree:
        assert git(tree, "log", "-1", "--format=%s") == "10"
        (tree / "left.txt").write_text("not committed")
    assert not tree.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_tree_that_lacks_what_a_workload_calls_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "strop").mkdir()
    (tmp_path / "strop" / "__init__.py").touch()
    side = quick.Side(tmp_path, tmp_path)
    try:
        side.wait()
        said = {name: side.seconds(name) for name in quick.WORKLOADS}
    finally:
        side.close()
    assert said.pop("start").startswith("CalledProcessError: ")
    assert {answer.partition(":")[0] for answer in said.values()} == {"ModuleNotFoundError"}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "sum(range(8_000_000))\n"])
def test_work_that_one_tree_has_more_is_found_and_nothing_else(tmp_path: Path, extra: str) -> None:
    trees = {"before": BENCHMARKS.parent, "after": tmp_path / "after"}
    shutil.copytree(BENCHMARKS.parent / "strop", trees["after"] / "strop")
    with (trees["after"] / "strop" / "__init__.py").open("a") as file:
        file.write(extra)  # in every command
    sitting = quick.compare(("start", "nothing_of_the_kind"), trees, tmp_path, 0.0)
    assert sitting.failed.keys() == {"nothing_of_the_kind"}
    assert sitting.comparisons()["start"].is_slower == bool(extra), sitting.comparisons()["start"]
