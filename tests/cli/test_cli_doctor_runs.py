"""`strop doctor RUN`: what the health rules find in the metrics of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cli_calls import cli


def with_metrics(trained: Path, folder: Path, lines: list[dict[str, object]]) -> Path:
    """A copy of a run whose metrics are these."""
    shutil.copytree(trained, folder, symlinks=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_each_rule_is_told_with_the_step_in_which_it_first_applied(trained: Path, tmp_path: Path) -> None:
    lines = [{"step": step, "actor/lr": 0.0, "actor/grad_norm": "nan"} for step in range(1, 7)]
    run = with_metrics(trained, tmp_path / "run", lines)
    result = cli("doctor", run)
    assert result.code == 1
    told = result.out.splitlines()
    assert [line.split(":")[0] for line in told[:-1]] == [
        "step 3  learning_rate_zero", "step 3  gradient_not_finite"
    ]  # fmt: skip
    assert told[-1] == "6 steps; 2 of 20 rules spoke"
    record = cli("doctor", run, "--json").record
    assert (record["run"], record["steps"]) == (str(run), 6)
    assert [(one["step"], one["name"]) for one in record["diagnoses"]] == [
        (3, "learning_rate_zero"), (3, "gradient_not_finite")
    ]  # fmt: skip


def test_a_run_without_a_finding_is_fine(trained: Path) -> None:
    result = cli("doctor", trained)
    assert (result.code, result.out) == (0, "2 steps; none of 20 rules spoke\n")


def test_what_is_no_run_or_does_not_belong_is_refused(trained: Path, tmp_path: Path) -> None:
    assert "does not exist" in cli("doctor", tmp_path / "none").sentence
    assert "so resources.ranks=2 has no place here" in cli("doctor", trained, "resources.ranks=2").sentence
    run = with_metrics(trained, tmp_path / "run", [])
    (run / "metrics.jsonl").unlink()
    assert "has no metrics in metrics.jsonl yet" in cli("doctor", run).sentence
