"""From episodes to the rows of optimizer steps, on numbers small enough to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from strop.algorithms.aggregation import BatchTotals
from strop.controller import Mesh, Partition
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome
from strop.trainer.rollout_batch import RolloutBatch, optimizer_batches
from strop.workers.episodes import Episode, episode_rows
from strop.workers.reports import episode_report


def episode(
    uid: str, index: int, *, sampled: Sequence[int], given: Sequence[int] = (), score: float | None = 0.0
) -> Episode:
    """Sampled tokens with log-probs -0.1, -0.2, ..., then given ones; without a score, the scorer failed."""
    trajectory = Trajectory(uid=uid, sample_index=index, prompt_ids=(3, 4))
    log_probs = [-(i + 1) / 10 for i in range(len(sampled))]
    trajectory = trajectory.with_sampled(sampled, log_probs, [0] * len(sampled))
    if given:
        trajectory = trajectory.with_given(given)
    prompt = Prompt(uid=uid, row=0, token_ids=(3, 4), messages=(), data_source="", ground_truth="")
    return Episode(
        prompt=prompt,
        sample_index=index,
        trajectory=trajectory.finish("stop"),
        outcome=Outcome(kind="error", error="no") if score is None else Outcome(kind="score", score=score),
    )


EPISODES = [
    episode("a", 0, sampled=(5, 6), score=1.0),
    episode("a", 1, sampled=(7,), given=(8, 9), score=0.25),
    episode("b", 0, sampled=(5, 5, 5), score=0.5),
]


def lists(batch: DataProto, name: str) -> list[list[float]]:
    return [row.tolist() for row in columns.rows(batch.tensors()[name])]


def rows_of(*rewards: float) -> DataProto:
    return episode_rows(EPISODES, rewards, temperature=0.7)


def experience(episodes: Sequence[Episode] = EPISODES) -> RolloutBatch:
    reports = [episode_report(one) for one in episodes]
    rewards = [report.reward() for report in reports]
    kept = [(one, reward) for one, reward in zip(episodes, rewards, strict=True) if reward is not None]
    rows = episode_rows([one for one, _ in kept], [reward for _, reward in kept], temperature=0.7)
    kept_reports = [row for report in reports if report.reward() is not None for row in report.rows()]
    return RolloutBatch(
        rows=rows,
        reports=tuple(kept_reports),
        column_names=frozenset(rows.tensors()),
        num_trained=tuple(report.num_sampled_tokens for report in kept_reports),
    )


def test_rows_hold_the_tokens_as_they_were_sampled() -> None:
    rows = rows_of(1.0, 0.0, 0.5)
    assert lists(rows, "prompts") == [[3, 4]] * 3
    assert lists(rows, "responses") == [[5, 6], [7, 8, 9], [5, 5, 5]]
    assert lists(rows, "response_mask") == [[True, True], [True, False, False], [True] * 3]
    recorded = [[-0.1, -0.2], [-0.1, 0.0, 0.0], [-0.1, -0.2, -0.3]]
    assert lists(rows, "rollout_log_probs") == [pytest.approx(row) for row in recorded]
    assert rows.non_tensor_batch["uid"].tolist() == ["a", "a", "b"]
    assert rows.non_tensor_batch["id"].tolist() == ["a/0", "a/1", "b/0"]
    assert rows.meta_info["temperature"] == 0.7


def test_the_reward_stands_on_the_last_response_token() -> None:
    assert lists(rows_of(1.0, 0.25, 0.5), "token_level_scores") == [
        [0.0, 1.0],
        [0.0, 0.0, 0.25],
        [0.0, 0.0, 0.5],
    ]


def test_rows_without_any_episode_join_those_of_other_workers() -> None:
    none, some = episode_rows([], [], temperature=0.7), rows_of(1.0, 0.0, 0.5)
    assert len(none) == 0
    joined = DataProto.concat([none, some, none])
    assert lists(joined, "responses") == lists(some, "responses")
    assert {name: c.dtype for name, c in none.tensors().items()} == {
        name: c.dtype for name, c in some.tensors().items()
    }


def test_a_sample_without_score_is_left_out_or_counts_as_zero() -> None:
    episodes = [*EPISODES, episode("c", 0, sampled=(5,), score=None), episode("c", 1, sampled=(), given=(4,))]
    zeroes = [
        replace(one, outcome=replace(one.outcome, fallback_score=0.0))
        if one.outcome is not None and one.outcome.score is None
        else one
        for one in episodes
    ]
    dropped, zeroed = experience(episodes), experience(zeroes)
    assert [report.id for report in dropped.reports] == ["a/0", "a/1", "b/0"]
    assert [report.id for report in zeroed.reports] == ["a/0", "a/1", "b/0", "c/0"], "c/1 sampled nothing"
    assert lists(zeroed.rows.get(), "token_level_scores")[-1] == [0.0]


def test_optimizer_batches_follow_the_order_and_count_their_own_tokens() -> None:
    parts = list(optimizer_batches(experience(), samples_per_update=2, epochs=2))
    assert [part.rows.get().non_tensor_batch["id"].tolist() for part in parts] == [
        ["a/0", "a/1"],
        ["b/0"],
    ] * 2
    assert [part.totals() for part in parts[:2]] == [
        BatchTotals(num_tokens=3, num_samples=2),  # two sampled tokens and one, not the two given ones
        BatchTotals(num_tokens=3, num_samples=1),
    ]


def test_a_remainder_is_shared_by_all_optimizer_steps() -> None:
    many = experience([episode(f"p{number}", 0, sampled=(5,)) for number in range(21)])
    assert [len(part) for part in optimizer_batches(many, samples_per_update=10, epochs=1)] == [7, 7, 7]
    assert list(optimizer_batches(many.take([]), samples_per_update=10, epochs=2)) == []


def test_rows_are_cut_so_that_a_prompt_stays_together() -> None:
    one = experience()
    assert one.partition(Mesh()) is one.rows
    partition = one.partition(Mesh(dp=2, sp=2))
    assert isinstance(partition, Partition)
    assert sorted(sorted(part) for part in partition.parts) == [[0, 1], [2]]
    assert [sorted(part) for part in one.partition(Mesh(dp=5)).parts].count([]) == 2


def test_the_balance_of_the_groups_is_measured_in_tokens() -> None:
    """Prompts of 2 tokens, and answers of 8, 7, 1 and 1: in order 10 + 9 and 3 + 3, as cut 10 + 3 and 9 + 3."""
    answers = zip("abcd", (8, 7, 1, 1), strict=True)
    one = experience([episode(uid, 0, sampled=(5,) * count, score=1.0) for uid, count in answers])
    numbers = {name: mean.value for name, mean in one.balance(one.partition(Mesh(dp=2))).items()}
    assert numbers == {
        "global_seqlen/min": 6.0,
        "global_seqlen/max": 19.0,
        "global_seqlen/minmax_diff": 13.0,
        "global_seqlen/balanced_min": 12.0,
        "global_seqlen/balanced_max": 13.0,
        "global_seqlen/mean": 12.5,
    }
    assert one.balance(one.partition(Mesh())) == {}, "one group has all rows"


def test_turns_weigh_what_they_add_to_those_before() -> None:
    """Ten turns of one episode, each behind all before it, weigh as much as the last one alone: the other rank gets one
    sequence of that length, and not half of the turns."""
    whole = tuple(range(100, 1100))
    turns = [
        Trajectory(uid="a", sample_index=0, prompt_ids=whole[: end - 100])
        .with_sampled(whole[end - 100 : end], [-1.0] * 100, [0] * 100)
        .finish("stop")
        for end in range(200, 1100, 100)
    ]
    prompt = episode("a", 0, sampled=(5,), score=1.0).prompt
    outcome = Outcome(kind="score", score=1.0)
    played = Episode(
        prompt=prompt, sample_index=0, trajectory=turns[-1], earlier=tuple(turns[:-1]), outcome=outcome
    )
    long = episode("b", 0, sampled=tuple(range(998)), score=0.5)
    one = experience([played, long])
    assert [report.num_shared_tokens for report in one.reports] == [0, *range(200, 1000, 100), 0]
    partition = one.partition(Mesh(dp=2))
    assert isinstance(partition, Partition)
    assert [sorted(part) for part in partition.parts] == [list(range(9)), [9]]
    # Without every second turn, a turn begins with none of the turns that are left: 200, 400 ... 1,000 tokens of one
    # episode, each computed whole, beside the 1,000 of the other one.
    left = one.take([0, 2, 4, 6, 8, 9]).partition(Mesh(dp=2))
    assert isinstance(left, Partition)
    assert [sorted(part) for part in left.parts] == [[0, 3, 5], [1, 2, 4]]


def test_a_rewritten_history_shares_what_is_before_it() -> None:
    first = Trajectory(uid="a", sample_index=0, prompt_ids=(1, 2, 3)).with_sampled(
        [4, 5], [-1.0] * 2, [0] * 2
    )
    then = Trajectory(uid="a", sample_index=0, prompt_ids=(1, 2, 3, 4, 6)).with_sampled([5], [-1.0], [0])
    again = replace(then, response_ids=(5,), prompt_ids=(9, 2, 3))
    other = episode("a", 0, sampled=(5,), score=1.0)
    played = replace(other, trajectory=again, earlier=(first, then))
    assert [size.num_shared_tokens for size in episode_report(played).sequences] == [0, 4, 0]


def test_columns_are_added_by_reference_and_light_ones_leave_the_tokens_out() -> None:
    one = experience()
    values = columns.jagged_like(
        one.rows.get().tensors()["responses"], columns.flat(one.rows.get().tensors()["rollout_log_probs"])
    )
    more = one.union(DataProto.from_dict({"values": values}), "values")
    assert set(more.columns_for("advantages").get().tensors()) == {
        "response_mask", "token_level_scores", "rollout_log_probs", "values"
    }  # fmt: skip
    assert set(more.columns_for("advantages").get().non_tensor_batch) == {"uid", "id", "episode_id"}
    assert lists(more.take([1, 2]).rows.get(), "values") == [
        pytest.approx([-0.1, 0.0, 0.0]),
        pytest.approx([-0.1, -0.2, -0.3]),
    ]
