"""Rejection sampling in whole runs: what is kept is imitated, nothing else, on any ranks and after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from test_ray_runs import cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.run import RunFolder
from strop.trainer.sample_selection import NOT_KEPT

SHORT = ["trainer.max_steps=1", "data.val_files=[]", "algorithm=raft"]


def test_the_best_answers_are_trained_with_the_loss_of_fine_tuning(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*SHORT))
    check_records(done.folder, num_steps=1)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(1)
    assert Counter((row["fate"], row["fate_reason"]) for row in rows) == {
        ("trained", ""): 4,
        ("filtered", NOT_KEPT): 12,
    }
    trained = [row for row in rows if row["fate"] == "trained"]
    assert len({row["uid"] for row in trained}) == 4
    for row in trained:
        assert row["score"] == max(one["score"] for one in rows if one["uid"] == row["uid"])
    assert {row["fate"]: row["advantage"] for row in rows} == {"trained": 1.0, "filtered": None}
    log_probs = [value for row in trained for value in row["old_log_probs"]]
    numbers = done.steps[0]
    assert numbers["actor/pg_loss"] == pytest.approx(-sum(log_probs) / len(log_probs), abs=1e-4)
    assert numbers["training/keep/samples"] == 4
    assert numbers["training/keep/prompts_without"] == 0
    assert numbers["training/keep/score_mean"] == pytest.approx(sum(row["score"] for row in trained) / 4)


@pytest.mark.slow
def test_a_step_of_which_nothing_is_kept_trains_on_nothing(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*SHORT, "algorithm.keep.min_score=5"))
    check_records(done.folder, num_steps=1)
    numbers = done.steps[0]
    assert (numbers["training/keep/samples"], numbers["training/keep/prompts_without"]) == (0, 4)
    assert "training/keep/score_mean" not in numbers
    assert "actor/grad_norm" not in numbers


@pytest.mark.slow
def test_a_run_with_raft_that_is_resumed_is_the_one_that_was_not(project: Project, tmp_path: Path) -> None:
    settings = ["algorithm=raft_pp", "algorithm.keep.min_score=0.5", "data.val_files=[]", "run.save_every=1"]
    config = project.config(*settings, "run.keep_last=9", "actor.samples_per_update=2")
    whole = train_in(tmp_path / "whole", config)
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]
    assert whole.steps[0]["training/keep/samples"] > 2


@pytest.mark.slow
def test_two_ranks_keep_what_one_keeps(project: Project, tmp_path: Path) -> None:
    one = train_in(tmp_path / "one", project.config(*SHORT))
    ranks = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.5"]
    two = train_in(tmp_path / "two", project.config(*SHORT, *ranks))
    trained = [[record.learned.trained for record in done.records if record.learned] for done in (one, two)]
    assert trained[0] == trained[1]
    for name in ("actor/pg_loss", "actor/grad_norm", "training/keep/score_mean"):
        assert one.steps[0][name] == pytest.approx(two.steps[0][name], rel=1e-4, abs=1e-6), name
