"""Which samples are trained on where some are chosen, and what greedy baselines are, on numbers small enough to see."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from strop.algorithms.resampling import drawn_rows
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome
from strop.rollout.types import Sampling
from strop.trainer.collectors.greedy_baselines import greedy_baselines
from strop.trainer.config import Config
from strop.trainer.loading import load
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.sample_selection import NOT_DRAWN, NOT_KEPT, chosen
from strop.workers.episodes import Episode, episode_rows
from strop.workers.estimator_columns import part_columns, reward_parts
from strop.workers.reports import episode_report


def episode(uid: str, index: int, score: float | None, *, num_rows: int = 1, num_tokens: int = 1) -> Episode:
    """Without a score, the scorer failed."""
    empty = Trajectory(uid=uid, sample_index=index, prompt_ids=(3,))
    said = empty.with_sampled([7] * num_tokens, [-1.0] * num_tokens, [0] * num_tokens).finish("stop")
    return Episode(
        prompt=Prompt(uid=uid, row=0, token_ids=(3,), messages=(), data_source="", ground_truth=""),
        sample_index=index,
        trajectory=said,
        earlier=(said,) * (num_rows - 1),
        outcome=Outcome(kind="error", error="no") if score is None else Outcome(kind="score", score=score),
    )


def experience(episodes: Sequence[Episode], *, rejected: Sequence[int] = ()) -> RolloutBatch:
    """Rows of the episodes; of those rejected, a correction left no token."""
    scores = [one.outcome.score for one in episodes if one.outcome is not None]
    reports = tuple(row for one in episodes for row in episode_report(one).rows())
    rows = episode_rows(episodes, [score or 0.0 for score in scores], temperature=1.0)
    return RolloutBatch(
        rows=rows,
        reports=reports,
        column_names=frozenset(rows.tensors()),
        num_trained=tuple(0 if row in rejected else 1 for row in range(len(reports))),
        metrics={"before": 1.0},
    )


def config(*overrides: str) -> Config:
    return load(overrides=["model.path=model", "data.train_files=[train.jsonl]", *overrides])


def ids(one: RolloutBatch) -> list[str]:
    return [report.id for report in one.reports]


SAMPLES = [
    episode("a", 0, 0.25, num_rows=2), episode("a", 1, 1.0), episode("a", 2, 0.5), episode("b", 0, 0.0),
    episode("b", 1, 0.25),
]  # fmt: skip


def test_the_best_of_each_prompt_are_kept_with_all_their_rows() -> None:
    made = experience(SAMPLES)
    taken, left_out = chosen(made, config("algorithm.keep.best=2", "algorithm.keep.min_score=0.125"), 3)
    assert [report.episode_id for report in taken.reports] == ["a/1", "a/2", "b/1"]
    assert left_out == {"a/0": NOT_KEPT, "b/0": NOT_KEPT}
    assert taken.metrics == {
        "before": 1.0,
        "training/keep/samples": 3.0,
        "training/keep/prompts_without": 0.0,
        "training/keep/score_mean": pytest.approx(1.75 / 3),
    }
    assert columns.rows(taken.rows.get().tensors()["token_level_scores"])[1].tolist() == [0.5]

    taken, left_out = chosen(made, config("algorithm.keep.min_score=0.25"), 3)
    assert [report.episode_id for report in taken.reports] == ["a/0", "a/0", "a/1", "a/2", "b/1"]
    assert left_out == {"b/0": NOT_KEPT}


def test_answers_that_stand_alone_are_kept_by_what_their_sample_is_worth() -> None:
    empty = Trajectory(uid="a", sample_index=0, prompt_ids=(3,))
    answer = replace(
        empty.with_sampled([7], [-1.0], [0]).finish("stop"), turn_rewards=((0, 0.5),), stands_alone=True
    )
    long = replace(SAMPLES[0], trajectory=answer, earlier=(answer,) * 3)
    long = replace(long, outcome=Outcome(kind="score", score=2.0))
    taken, left_out = chosen(experience([long, SAMPLES[1]]), config("algorithm.keep.best=1"), 1)
    assert ids(taken) == ["a/0.0", "a/0.1", "a/0.2", "a/0"]
    assert (left_out, taken.metrics["training/keep/score_mean"]) == ({"a/1": NOT_KEPT}, 2.0)


def test_prompts_of_which_none_is_left_are_counted_and_a_mean_of_nothing_is_not_given() -> None:
    taken, left_out = chosen(experience(SAMPLES), config("algorithm.keep.min_score=0.75"), 1)
    assert ids(taken) == ["a/1"]
    assert (taken.metrics["training/keep/prompts_without"], len(left_out)) == (1.0, 4)
    nothing, left_out = chosen(experience(SAMPLES), config("algorithm.keep.min_score=2"), 1)
    assert (len(nothing), len(left_out)) == (0, 5)
    assert nothing.metrics == {
        "before": 1.0, "training/keep/samples": 0.0, "training/keep/prompts_without": 2.0
    }  # fmt: skip


def test_rows_without_a_trained_token_cannot_be_chosen() -> None:
    made = experience(SAMPLES[1:3], rejected=[0])
    taken, left_out = chosen(made, config("algorithm.keep.best=1"), 1)
    assert (ids(taken), left_out) == (["a/2"], {})
    taken, left_out = chosen(experience(SAMPLES[1:3], rejected=[0, 1]), config("algorithm.keep.best=1"), 1)
    assert (ids(taken), left_out) == ([], {})


def test_samples_are_drawn_by_their_scores_as_often_as_it_says() -> None:
    made = experience(SAMPLES[1:])
    settings = config("algorithm.resampling=pow", "trainer.seed=5")
    scores = made.rows.get().tensors()["token_level_scores"]
    totals = [float(row.sum()) for row in columns.rows(scores)]
    taken, left_out = chosen(made, settings, 7)
    drawn = drawn_rows(
        columns.rows(scores)[0].new_tensor(totals), ["a", "a", "b", "b"], settings.algorithm, seed=5, step=7
    )
    assert ids(taken) == [made.reports[row].id for row in drawn]
    assert len(taken) == 4
    counts = [drawn.count(row) for row in range(4)]
    assert counts[2] == 0, "the one with score 0"
    assert left_out == {made.reports[row].episode_id: NOT_DRAWN for row in range(4) if not counts[row]}
    assert taken.metrics == {
        "before": 1.0,
        "training/resampling/not_drawn_samples": float(counts.count(0)),
        "training/resampling/max_draws": float(max(counts)),
        "training/resampling/score_mean": pytest.approx(sum(totals[row] for row in drawn) / 4),
    }


def test_parts_of_rewards_are_those_that_were_returned(caplog: pytest.LogCaptureFixture) -> None:
    told = episode("a", 0, 0.5)
    told = replace(
        told, outcome=Outcome(kind="score", score=0.5, parts={"form": 1, "why": "x", "bad": float("nan")})
    )
    assert reward_parts(told, ["score", "form"]) == [0.5, 1.0]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert reward_parts(told, ["bad", "form"]) == [0.0, 1.0]
    assert "a/0: a part of algorithm.reward_keys is no finite number (bad: nan, form: 1)" in caplog.text
    for key in ("missing", "why"):
        with pytest.raises(ValueError, match=f"names '{key}'.* it returned bad, form, score, why"):
            reward_parts(told, [key])
    failed = replace(told, outcome=Outcome(kind="error", error="no", fallback_score=-1.0))
    assert reward_parts(failed, ["form", "why"]) == [-1.0, -1.0]
    assert reward_parts(replace(told, outcome=Outcome(kind="error", error="no")), ["form"]) == [0.0]
    assert reward_parts(replace(told, outcome=None), ["form"]) == [0.0]
    column = part_columns([told, failed], ["form", "score"]).tensors()["reward_parts"]
    assert column.tolist() == [[1.0, 0.5], [-1.0, -1.0]]
    assert part_columns([], ["form", "score"]).tensors()["reward_parts"].shape == (0, 2)


class Greedy:
    """Roles that play these episodes; `asked` says how."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._reports = tuple(map(episode_report, episodes))
        self.asked: list[tuple[Sequence[Prompt], int, Sampling]] = []

    def run_episodes(self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling) -> Any:
        self.asked.append((prompts, samples_per_prompt, sampling))
        return SimpleNamespace(reports=self._reports)


def test_baselines_are_the_greedy_answers_or_the_mean_of_those_that_could_be_scored() -> None:
    roles: Any = Greedy([episode("a", 0, 0.5, num_tokens=4), episode("b", 0, None)])
    sampling = Sampling(key=1, temperature=0.7, top_p=0.9, top_k=5, max_tokens=4)
    settings = config("reward.weight=2", "reward.overlong_buffer=2", "reward.overlong_penalty=1")
    prompts = [one.prompt for one in (SAMPLES[0], SAMPLES[3])]
    column = greedy_baselines(settings, roles, prompts, sampling)
    assert roles.asked == [(prompts, 1, replace(sampling, temperature=0.0, top_p=1.0, top_k=0))]
    played = [episode("a", 0, 1.0), episode("b", 0, 0.0), episode("a", 1, 0.0), episode("b", 1, 0.25)]
    made: DataProto = column([episode_report(one) for one in played])
    # Greedy a: twice 0.5, less the whole penalty of 1. Of b the mean of 0 and twice 0.25.
    assert made.tensors()["reward_baselines"].tolist() == [0.0, 0.25, 0.0, 0.25]


def test_a_sample_is_worth_the_same_where_a_correction_left_no_token_of_its_first_answer() -> None:
    empty = Trajectory(uid="a", sample_index=0, prompt_ids=(3,))
    answer = replace(
        empty.with_sampled([7], [-1.0], [0]).finish("stop"), turn_rewards=((0, 1.0),), stands_alone=True
    )
    long = replace(SAMPLES[0], trajectory=answer, earlier=(answer,))
    long = replace(long, outcome=Outcome(kind="score", score=2.0))
    made = experience([long, episode("a", 1, 1.5)], rejected=[0])
    taken, left_out = chosen(made, config("algorithm.keep.best=1"), 1)
    assert (ids(taken), left_out) == (["a/0"], {"a/1": NOT_KEPT})
    assert taken.metrics["training/keep/score_mean"] == 2.0


def test_samples_begin_where_they_do_also_where_the_last_row_of_one_is_left_out() -> None:
    made = experience([SAMPLES[0], SAMPLES[1], SAMPLES[2]], rejected=[1])
    taken, _ = chosen(made, config("algorithm.keep.min_score=0"), 1)
    assert (ids(taken), taken.sample_starts) == (["a/0.0", "a/1", "a/2"], [0, 1, 2])
