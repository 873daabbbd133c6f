"""PF-PPO in whole runs: what is drawn is trained, nothing else, on any number of ranks and after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from test_ray_runs import cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.resampling import drawn_rows
from strop.config.errors import ConfigError
from strop.run import RunFolder
from strop.trainer.sample_selection import NOT_DRAWN

SHORT = ["trainer.max_steps=2", "data.val_files=[]"]


def test_what_is_not_drawn_is_filtered_and_the_rest_is_trained_once_in_the_ledger(
    project: Project, tmp_path: Path
) -> None:
    config = project.config(*SHORT, "algorithm.resampling=max_min", "algorithm.resampling_within=prompt")
    done = train_in(tmp_path / "run", config)
    check_records(done.folder, num_steps=2)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows, counts = run.samples.read(1), run.ledger.counts()
    fates = Counter((row["fate"], row["fate_reason"]) for row in rows)
    assert set(fates) == {("trained", ""), ("filtered", NOT_DRAWN)}
    assert counts["trained"] + counts["filtered"] == counts["issued"] == 32
    assert done.steps[0]["training/resampling/not_drawn_samples"] == fates["filtered", NOT_DRAWN]
    for row in rows:
        if row["fate"] == "trained":  # neither the best nor the worst of its prompt has a chance of 1e-8
            group = [other["score"] for other in rows if other["uid"] == row["uid"]]
            assert row["score"] in (min(group), max(group))


def test_a_sample_that_was_drawn_twice_counts_twice_in_the_loss(project: Project, tmp_path: Path) -> None:
    # On-policy the loss of token-mean is -sum A_t / sum 1 over the tokens of the drawn rows, with repetition.
    config = project.config(*SHORT, "algorithm.resampling=pow", "trainer.max_steps=1")
    done = train_in(tmp_path / "run", config)
    (record,) = done.records
    assert record.learned is not None
    ids = [report.id for report in record.learned.batch.reports]
    scores = torch.tensor([report.score for report in record.learned.batch.reports], dtype=torch.float64)
    uids = [report.uid for report in record.learned.batch.reports]
    drawn = drawn_rows(scores.float().double(), uids, config.algorithm, seed=0, step=1)
    assert {ids[row] for row in drawn} == record.learned.trained
    assert max(Counter(drawn).values()) > 1
    tokens = torch.tensor([report.num_sampled_tokens for report in record.learned.batch.reports])
    advantages = torch.tensor([record.learned.summary.advantages[name] for name in ids])
    expected = -(advantages * tokens)[drawn].sum() / tokens[drawn].sum()
    assert done.steps[0]["actor/pg_loss"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.slow
def test_a_resampled_run_that_is_resumed_is_the_one_that_was_not(project: Project, tmp_path: Path) -> None:
    config = project.config(
        "algorithm=pf_ppo",
        "data.val_files=[]",
        "run.save_every=1",
        "run.keep_last=9",
        "actor.samples_per_update=8",
    )
    whole = train_in(tmp_path / "whole", config)
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]
    assert whole.steps[0]["training/resampling/not_drawn_samples"] > 0


@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(project: Project, tmp_path: Path) -> None:
    settings = [*SHORT, "algorithm.resampling=max_random"]
    one = train_in(tmp_path / "one", project.config(*settings))
    ranks = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.5"]
    two = train_in(tmp_path / "two", project.config(*settings, *ranks))
    trained = [[record.learned.trained for record in done.records if record.learned] for done in (one, two)]
    assert trained[0] == trained[1]
    for name in ("actor/pg_loss", "actor/grad_norm", "training/resampling/score_mean"):
        assert one.steps[0][name] == pytest.approx(two.steps[0][name], rel=1e-4, abs=1e-6), name


def test_within_prompts_every_prompt_keeps_its_number_of_rows() -> None:
    scores = torch.tensor([1.0, 0.0, 0.5, 3.0, 2.0], dtype=torch.float64)
    uids = ["a", "a", "b", "a", "b"]
    config = AlgorithmConfig(resampling="max_min", resampling_within="prompt")
    seen: Counter[int] = Counter()
    for step in range(50):
        drawn = drawn_rows(scores, uids, config, seed=0, step=step)
        assert Counter(uids[row] for row in drawn) == {"a": 3, "b": 2}
        seen.update(drawn)
    assert set(seen) == {1, 2, 3, 4}, "row 0 is neither the best nor the worst of a"
    # Of 150 draws for a, row 1 and row 3 have half each: 75 with a standard deviation of 6.1.
    assert abs(seen[1] - 75) < 25


def test_resampling_settings_that_cannot_apply_are_refused(project: Project) -> None:
    for words, sentence in {
        (
            "algorithm.resampling_power=3",
        ): "resampling_power is 3.0, but algorithm.resampling=none takes no power",
        ("algorithm.resampling=max_min", "algorithm.resampling_power=3"): "resampling=max_min takes no power",
        (
            "algorithm.resampling=pow",
            "algorithm.resampling_power=-1",
        ): "it needs a finite number of at least 0",
        ("algorithm.resampling_within=prompt",): "algorithm.resampling=none draws nothing",
        ("algorithm.correction.upper=3",): "correction.weights=none has no weights to bound",
        ("algorithm.correction.lower=0.1",): "has no weights: set algorithm.correction.mode=mask",
        (
            "algorithm.correction.weights=token",
            "algorithm.correction.lower=0.1",
        ): "mode=truncate has no lower",
        ("reward.overlong_penalty=2",): "reward.overlong_buffer is 0, so there is no penalty",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            project.config(*words)
