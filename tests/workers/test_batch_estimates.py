"""Advantages of a batch in a worker: columns in, columns out, with all that shapes a reward on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from inline_groups import inline_group

from references import advantages as reference
from references import critics
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.reward_kl import kl_metrics
from strop.protocol import DataProto, columns
from strop.workers.estimates import compute_advantages
from strop.workers.role_metrics import role_metrics

LENGTHS = (3, 1, 2, 4)
UIDS = ("a", "b", "a", "b")
MASK = [[1, 0, 1], [1], [1, 1], [1, 1, 0, 0]]
SCORES = [1.0, 0.0, 3.0, 0.5]


def light_batch(**extra: torch.Tensor) -> DataProto:
    """The columns that advantages are made of: four rows of two prompts, scores on the last response token."""
    scores = []
    for length, score in zip(LENGTHS, SCORES, strict=True):
        row = torch.zeros(length, dtype=torch.float64)
        row[-1] = score
        scores.append(row)
    return DataProto.from_dict(
        {
            "response_mask": columns.jagged([torch.tensor(row, dtype=torch.bool) for row in MASK]),
            "token_level_scores": columns.jagged(scores),
            **extra,
        },
        non_tensors={"uid": np.array(UIDS, dtype=object)},
    )


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return columns.jagged([torch.tensor(row, dtype=torch.float64) for row in rows])


def lists(data: DataProto, name: str) -> list[list[float]]:
    return [row.tolist() for row in columns.rows(data.tensors()[name])]


def test_an_episode_of_several_sequences_counts_once_and_all_of_them_get_its_advantage() -> None:
    # Prompt a: one sample with three sequences (rows 0, 1, 2) and one with one (row 3). Rewards 1 and 0: mean 1/2,
    # sample std 1/sqrt(2), so the advantages are +-(1/2) / (1/sqrt(2)) = +-sqrt(1/2). Counted per row, the mean would
    # be 3/4. Row 2 has no token that is trained, so row 1 speaks for the episode.
    a = 0.5**0.5
    data = DataProto.from_dict(
        {
            "response_mask": columns.jagged(
                [torch.tensor(m, dtype=torch.bool) for m in ([1, 0], [1], [0, 0], [1, 1])]
            ),
            "loss_mask": columns.jagged(
                [torch.tensor(m, dtype=torch.bool) for m in ([1, 0], [1], [0, 0], [1, 1])]
            ),
            "token_level_scores": jagged([[0.0, 1.0], [1.0], [0.0, 1.0], [0.0, 0.0]]),
        },
        non_tensors={
            "uid": np.array(["a"] * 4, dtype=object),
            "episode_id": np.array(["a/0", "a/0", "a/0", "a/1"], dtype=object),
        },
    )
    made = compute_advantages(data, AlgorithmConfig(adv_estimator="grpo"))
    expected = [[a, 0.0], [a], [0.0, 0.0], [-a, -a]]
    for row, want in zip(lists(made, "advantages"), expected, strict=True):
        assert row == pytest.approx(want, abs=1e-5)
    assert lists(made, "returns")[0] == lists(made, "advantages")[0]


OLD = [[-1.0, -9.0, -2.0], [-0.5], [-1.0, -1.0], [-3.0, -2.0, -9.0, -9.0]]
REF = [[-1.5, -1.0, -1.0], [-0.5], [-2.0, -1.5], [-3.0, -4.0, 0.0, 0.0]]


def test_grpo_compares_the_samples_of_a_prompt() -> None:
    done = compute_advantages(light_batch(), AlgorithmConfig())
    groups = [0, 1, 0, 1]
    expected = [
        row[:length]
        for row, length in zip(
            reference.grpo(SCORES, groups, [row + [0] * (4 - len(row)) for row in MASK], True),
            LENGTHS,
            strict=True,
        )
    ]
    for got, row in zip(lists(done, "advantages"), expected, strict=True):
        assert got == pytest.approx(row, abs=1e-12)
    assert lists(done, "token_level_rewards") == lists(light_batch(), "token_level_scores")


def test_gae_takes_values_gamma_and_lambda() -> None:
    values = [[0.5, 9.0, 0.25], [0.1], [0.2, 0.3], [0.4, 0.6, 9.0, 9.0]]
    algorithm = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8)
    done = compute_advantages(light_batch(values=jagged(values)), algorithm)

    def padded(rows: list[list[float]]) -> list[list[float]]:
        return [row + [0.0] * (4 - len(row)) for row in rows]

    rewards = padded(lists(light_batch(), "token_level_scores"))
    mask = [row + [0] * (4 - len(row)) for row in MASK]
    plain = critics.gae(rewards, padded(values), mask, 0.9, 0.8)
    whitened = reference.whiten(plain, mask)
    for row, length in enumerate(LENGTHS):
        assert lists(done, "advantages")[row] == pytest.approx(whitened[row][:length], abs=1e-9)
        returns = [(a + v) * m for a, v, m in zip(plain[row], padded(values)[row], mask[row], strict=True)]
        assert lists(done, "returns")[row] == pytest.approx(returns[:length], abs=1e-12)


def test_kl_and_reward_model_shape_the_rewards() -> None:
    batch = light_batch(
        old_log_probs=jagged(OLD), ref_log_prob=jagged(REF), rm_scores=torch.tensor([0.5, 1.0, -1.0, 2.0])
    )
    algorithm = AlgorithmConfig(use_kl_in_reward=True, norm_adv_by_std=False)
    done = compute_advantages(batch, algorithm, kl_coef=0.1)
    # Scores and the reward model's on the last token; 0.1 * (old - ref) off each sampled token.
    expected = [
        [-0.05, 0.0, 1.0 + 0.5 + 0.1],
        [0.0 + 1.0 - 0.0],
        [-0.1, 3.0 - 1.0 - 0.05],
        [0.0, -0.2, 0.0, 0.5 + 2.0],
    ]
    for got, row in zip(lists(done, "token_level_rewards"), expected, strict=True):
        assert got == pytest.approx(row, abs=1e-12)
    totals = [sum(row) for row in expected]
    first = totals[0] - (totals[0] + totals[2]) / 2
    assert lists(done, "advantages")[0] == pytest.approx([first, 0.0, first], abs=1e-12)
    # Token means of the KL per row: (0.5 - 1) / 2, 0, (1 + 0.5) / 2, (0 + 2) / 2.
    metrics = kl_metrics(batch, algorithm)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((-0.25 + 0 + 0.75 + 1) / 4, abs=1e-12)
    metrics = role_metrics(batch, algorithm)
    assert metrics["reward_model/score/mean"] == pytest.approx(0.625)
    assert (metrics["reward_model/score/max"], metrics["reward_model/score/min"]) == (2.0, -1.0)


def test_truncated_conversations_are_counted() -> None:
    batch = light_batch(rm_scores=torch.zeros(4), rm_cut_tokens=torch.tensor([0, 3, 0, 1]))
    assert role_metrics(batch, AlgorithmConfig())["reward_model/truncated"] == 2.0
    plain = AlgorithmConfig()
    assert kl_metrics(light_batch(), plain) == role_metrics(light_batch(), plain) == {}


def test_row_order_does_not_matter() -> None:
    values = jagged([[0.5, 9.0, 0.25], [0.1], [0.2, 0.3], [0.4, 0.6, 9.0, 9.0]])
    algorithm = AlgorithmConfig(adv_estimator="gae", lam=0.8)
    batch = light_batch(values=values)
    order = [2, 0, 3, 1]
    straight = compute_advantages(batch, algorithm)
    shuffled = compute_advantages(batch.select_idxs(order), algorithm)
    for place, row in enumerate(order):
        for name in ("advantages", "returns", "token_level_rewards"):
            assert lists(shuffled, name)[place] == pytest.approx(lists(straight, name)[row], abs=1e-12)


def test_missing_columns_are_named() -> None:
    with pytest.raises(ValueError, match="'gae' needs the columns values"):
        compute_advantages(light_batch(), AlgorithmConfig(adv_estimator="gae"))
    with pytest.raises(ValueError, match="use_kl_in_reward needs the columns old_log_probs and ref_log_prob"):
        compute_advantages(light_batch(), AlgorithmConfig(use_kl_in_reward=True), kl_coef=0.1)


def test_the_actor_offers_them_with_its_own_settings(tiny_model: Path) -> None:
    algorithm = AlgorithmConfig(norm_adv_by_std=False)
    actor = make_actor(tiny_model, algorithm)
    done = actor.compute_advantages(light_batch(), kl_coef=0.5)
    # Prompt a: scores 1 and 3; prompt b: 0 and 0.5.
    assert lists(done, "advantages") == [[-1.0, 0.0, -1.0], [-0.25], [1.0, 1.0], [0.25, 0.25, 0.0, 0.0]]


def test_a_group_hands_out_futures_for_what_is_as_long_as_the_tokens(tiny_model: Path) -> None:
    algorithm = AlgorithmConfig(norm_adv_by_std=False)
    group = inline_group(lambda: make_actor(tiny_model, algorithm))
    batch = random_batch()
    assert len(group.call.compute_log_prob(batch)) == len(batch)
    advantages = group.call.compute_advantages(light_batch()).get()
    assert lists(advantages, "advantages")[1] == [-0.25]
    seen = group.call.update_policy(batch, totals_of(batch))
    assert [update.skipped for update in seen.metrics] == [""]
    assert seen.batch.get().tensors().keys() == {"log_probs", "entropys"}
