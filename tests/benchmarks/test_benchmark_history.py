"""Records of measured commits (benchmarks/history.py), in a repository of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import benchmark_module, git

history: Any = benchmark_module("history")

BENCHMARK = """\
import json, sys
import strop_of_this_tree
print("a line for people")
print(json.dumps({"benchmark": "fast", "machine": {"cpu": "x"}, "seconds": 0.5, "cores": 99, "words": sys.argv[1:]}))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with a benchmark."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "fast.py").write_text(BENCHMARK)
    (tmp_path / "benchmarks" / "broken.py").write_text("import sys; print('{}'); sys.exit(3)\n")
    (tmp_path / "benchmarks" / "wordy.py").write_text("print('{\"seconds\": 1}'); print('done')\n")
    (tmp_path / "strop_of_this_tree.py").write_text("")  # beside benchmarks/, as strop is
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path, "first")
    return tmp_path


def commit(root: Path, subject: str) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", subject)
    return git(root, "rev-parse", "HEAD")


def test_a_record_has_the_commit_the_machine_and_the_figures_of_the_benchmark_alone(repository: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    record = history.add("fast", ["--large", "3"], root=repository)
    # `cores` is a fact of the machine, which some benchmarks print beside their figures.
    assert record["figures"] == {"seconds": 0.5, "words": ["--large", "3"]}
    assert (record["commit"], record["benchmark"], record["arguments"]) == (head, "fast", ["--large", "3"])
    assert record["machine"]["load_at_start"] >= 0
    assert record["machine"]["cores"] != 99
    assert list(history.read(repository / "benchmarks" / "history.jsonl")) == [record]


def test_measurements_follow_each_other_though_the_first_one_changes_the_history(repository: Path) -> None:
    for _ in range(2):
        history.add("fast", [], root=repository)
    commit(repository, "measured")
    history.add("fast", [], root=repository)
    lines = list(history.read(repository / "benchmarks" / "history.jsonl"))
    assert [line["commit"] == lines[0]["commit"] for line in lines] == [True, True, False]


@pytest.mark.parametrize("change", ["edited", "untracked", "removed"])
def test_a_tree_with_uncommitted_changes_is_not_recorded(repository: Path, change: str) -> None:
    if change == "edited":
        (repository / "benchmarks" / "fast.py").write_text(BENCHMARK + "# \n")
    elif change == "untracked":
        (repository / "more.py").write_text("")
    else:
        (repository / "benchmarks" / "broken.py").unlink()
    with pytest.raises(history.HistoryError, match=r"has 1 changes that are not committed \(.*: commit them"):
        history.add("fast", [], root=repository)
    assert not (repository / "benchmarks" / "history.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "ended with exit status 3; nothing is recorded"),
        ("wordy", "the last line of a benchmark is one JSON object, but this one's is 'done'"),
        ("none", "there is no benchmark 'none'"),
    ],
)
def test_what_fails_is_not_recorded(repository: Path, name: str, said: str) -> None:
    with pytest.raises(history.HistoryError, match=said):
        history.add(name, [], root=repository)
    assert not (repository / "benchmarks" / "history.jsonl").exists()


def test_a_benchmark_that_moves_the_checkout_is_not_recorded(repository: Path) -> None:
    script = "import subprocess; subprocess.run(['git', 'checkout', '-q', 'HEAD~1']); print('{}')\n"
    (repository / "benchmarks" / "moves.py").write_text(script)
    commit(repository, "second")
    commit(repository, "third")
    with pytest.raises(history.HistoryError, match="another commit than"):
        history.add("moves", [], root=repository)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(json.dumps({"commit": "a", "benchmark": "b", "machine": {}, "figures": {}}) + "\n{}\n")
    with pytest.raises(history.HistoryError, match="line 2 is no record"):
        list(history.read(file))


def test_machines_compare_where_processor_cores_and_torch_are_the_same() -> None:
    one = {
        "cpu": "x",
        "features": ["avx2"],
        "cores": 2,
        "load_at_start": 9.0,
        "versions": {"torch": "2", "strop": "0"},
    }
    assert history.is_like(one, {**one, "load_at_start": 0.0, "versions": {"torch": "2", "strop": "1"}})
    for other in ({"cpu": "y"}, {"features": []}, {"cores": 4}, {"versions": {"torch": "3"}}):
        assert not history.is_like(one, {**one, **other})
