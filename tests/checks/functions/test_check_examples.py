"""The batches on which losses and estimators are checked hold the cases that the rules ask about."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from strop.cli.check_functions.estimator_batches import COLUMNS, Batch, random_batch
from strop.cli.check_functions.loss_probe import Seen, example_batch, gap_between

SEEDS = range(100)


def batches() -> list[Batch]:
    return [random_batch(torch.Generator().manual_seed(seed)) for seed in SEEDS]


def seen_values(tensors: list[Tensor]) -> set[float]:
    return set(torch.cat([one.flatten() for one in tensors]).tolist())


def test_shapes_and_types_of_random_batches() -> None:
    found = set()
    for batch in batches():
        num_rows, width = batch.response_mask.shape
        found.add((num_rows, width))
        assert batch.response_mask.dtype == torch.bool
        assert batch.group_ids.dtype == torch.int64
        columns = batch.columns()
        assert set(columns) == COLUMNS
        per_token = ("token_level_rewards", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared")
        for name in (*per_token, "rollout_is_weights"):
            assert columns[name].shape == (num_rows, width)
            assert columns[name].dtype == torch.float64
        assert (
            batch.reward_baselines.shape == batch.group_ids.shape == columns["rewards"].shape == (num_rows,)
        )
        assert batch.reward_parts.shape == (num_rows, 3)
    # Four to nine rows of two to five tokens, all of them somewhere.
    assert {rows for rows, _ in found} == {4, 5, 6, 7, 8, 9}
    assert {width for _, width in found} == {2, 3, 4, 5}


def test_rewards_of_random_batches() -> None:
    for batch in batches():
        # Only tokens after the first sampled one, and some on given tokens.
        assert not batch.token_level_rewards[batch.response_mask.cumsum(dim=-1) == 0].any()
        torch.testing.assert_close(batch.columns()["rewards"], batch.token_level_rewards.sum(dim=1))
    eighths = {number / 8 for number in range(9)}
    rewards = [batch.token_level_rewards for batch in batches()]
    assert seen_values(rewards) == eighths
    assert seen_values([batch.reward_baselines for batch in batches()]) == eighths
    given = [batch.token_level_rewards[~batch.response_mask] for batch in batches()]
    assert torch.cat(given).count_nonzero() > 20
    # About half of the places where a reward may be hold one that is not 0: a half by chance, 8 of 9 values.
    places = torch.cat([b.token_level_rewards[b.response_mask] for b in batches()])
    assert 0.35 < float((places != 0).double().mean()) < 0.55
    for batch in batches():
        for part in batch.reward_parts.unbind(dim=1):
            assert sorted((8 * part).tolist()) == list(range(len(part)))  # distinct


def test_masks_of_random_batches() -> None:
    empty, gaps, full = 0, 0, 0
    for batch in batches():
        mask = batch.response_mask
        assert mask[:2, 0].all()
        lengths = torch.where(mask, torch.arange(mask.shape[1]) + 1, 0).amax(dim=1)
        empty += int((lengths == 0).sum())
        gaps += int((mask.sum(dim=1) < lengths).sum())
        full += int(mask.all(dim=1).sum())
    assert min(empty, gaps, full) > 30
    # Of the rows after the first two, some reach the right end, and some the place before it but not the end.
    tails = torch.cat([batch.response_mask[2:, -2:] for batch in batches()])
    assert int(tails[:, 1].sum()) > 30
    assert int((tails[:, 0] & ~tails[:, 1]).sum()) > 30
    inside = torch.cat([batch.response_mask[:2, 1:].flatten() for batch in batches()])
    assert 0.65 < float(inside.double().mean()) < 0.85


def test_groups_of_random_batches() -> None:
    lone, several = 0, 0
    for batch in batches():
        assert batch.group_ids[0] == batch.group_ids[1]
        _, counts = torch.unique(batch.group_ids, return_counts=True)
        lone += int((counts == 1).any())
        several += int(len(counts) > 1)
        # Names, not numbers: neither from 0 nor one after another.
        assert set(batch.group_ids.tolist()) <= {5, 8, 11, 14}
    assert min(lone, several) > 30
    assert {int(id_) for batch in batches() for id_ in batch.group_ids} == {5, 8, 11, 14}


def test_probabilities_of_random_batches_can_be() -> None:
    for batch in batches():
        columns = batch.columns()
        assert float(batch.log_probs.max()) <= -0.05
        assert float(batch.log_probs.min()) >= -2.05
        torch.testing.assert_close(columns["ref_log_prob"], batch.log_probs - 0.25)
        assert columns["old_log_probs"] is batch.log_probs
        # The sum over the vocabulary is at least the token's own share, and not above 1 by much.
        rest = batch.sum_pi_squared - (2 * batch.log_probs).exp()
        assert 0 <= float(rest.min()) <= float(rest.max()) <= 0.1
        assert 0.5 <= float(batch.rollout_is_weights.min()) <= float(batch.rollout_is_weights.max()) <= 1.5
        assert 0 <= float(batch.values.min()) <= float(batch.values.max()) <= 1
    logs = torch.cat([batch.log_probs.flatten() for batch in batches()])
    assert float(logs.max()) > -0.1
    assert float(logs.min()) < -2.0
    weights = torch.cat([batch.rollout_is_weights.flatten() for batch in batches()])
    assert float(weights.max()) > 1.4
    rest = torch.cat([(b.sum_pi_squared - (2 * b.log_probs).exp()).flatten() for b in batches()])
    assert float(rest.max()) > 0.09


def test_a_batch_beside_another_has_its_width_and_other_groups() -> None:
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        first = random_batch(generator)
        second = random_batch(generator, like=first)
        assert second.response_mask.shape[1] == first.response_mask.shape[1]
        assert not set(second.group_ids.tolist()) & set(first.group_ids.tolist())


def test_a_change_of_rows_is_one_of_every_column() -> None:
    batch = random_batch(torch.Generator().manual_seed(0))
    order = torch.arange(len(batch.group_ids)).flip(0)
    turned = batch.map(lambda column: column[order])
    for name, column in batch.columns().items():
        assert torch.equal(turned.columns()[name], column[order]), name


def test_the_batch_of_the_loss_check() -> None:
    ratios, advantages = [], []
    for seed in range(20):
        batch = example_batch(seed)
        mask = batch.mask
        assert mask.sum(dim=1).tolist() == [4, 6, 1, 3, 3]
        assert mask[0].tolist() == [True, True, False, True, True, False]  # a gap, and an early end
        assert not mask[3, 0]  # a response that begins with a given token
        for name, column in batch.columns.items():
            assert column.dtype == torch.float64
            assert not column[~mask].any(), name
        log_probs, old = batch.columns["log_probs"][mask], batch.columns["old_log_probs"][mask]
        assert float(old.max()) <= -0.2
        assert float(log_probs.max()) <= -0.01
        ratios.append((log_probs - old).exp())
        advantages.append(batch.columns["advantages"])
        for name, scale in (("ref_log_prob", 0.1), ("rollout_log_probs", 0.01)):
            apart = (batch.columns[name][mask] - old).abs()
            assert 0 < float(apart.max()) < 5 * scale
    moved = torch.cat(ratios)
    outside = float(((moved < 0.8) | (moved > 1.2)).double().mean())
    assert 0.1 < outside < 0.25  # some leave PPO's range, most do not; 0.15 sigma: about 0.18
    # Around one number per response, of both signs, with a spread of 0.2.
    mean = torch.stack(advantages).sum(dim=(0, 2)) / (20 * torch.tensor([4, 6, 1, 3, 3]))
    torch.testing.assert_close(
        mean, torch.tensor([1.0, -0.75, 0.5, -1.5, 2.0], dtype=torch.float64), atol=0.12, rtol=0
    )
    for first, second in itertools.pairwise(advantages):
        assert not torch.equal(first, second)


def test_the_on_policy_batch_has_one_advantage_per_response() -> None:
    batch = example_batch(0, on_policy=True)
    assert torch.equal(batch.columns["log_probs"], batch.columns["old_log_probs"])
    per_row = [
        row[keep].unique().tolist() for row, keep in zip(batch.columns["advantages"], batch.mask, strict=True)
    ]
    assert per_row == [[1.0], [-0.75], [0.5], [-1.5], [2.0]]


def test_batches_are_cut_widened_and_converted_as_wholes() -> None:
    batch = example_batch(3)
    part = batch.rows(torch.tensor([4, 1]))
    assert torch.equal(part.mask, batch.mask[[4, 1]])
    assert torch.equal(part.columns["advantages"], batch.columns["advantages"][[4, 1]])
    wide = batch.widened(2)
    assert wide.mask.shape == wide.columns["log_probs"].shape == (5, 8)
    assert not wide.mask[:, 6:].any()
    assert not wide.columns["log_probs"][:, 6:].any()
    single = batch.replaced(row_ids=torch.arange(5)).to(torch.float32)
    assert {key: column.dtype for key, column in single.columns.items()} == {
        **dict.fromkeys(batch.columns, torch.float32),
        "row_ids": torch.int64,
    }
    assert torch.equal(single.mask, batch.mask)
    assert set(batch.columns) == {
        "log_probs",
        "old_log_probs",
        "advantages",
        "ref_log_prob",
        "rollout_log_probs",
    }


def test_two_results_are_equal_up_to_rounding() -> None:
    gradient = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    base = Seen(0.5, gradient)
    # Within 1e-11 + 1e-8 * max(1, |loss|), and 1e-11 + 1e-8 * the largest entry of the gradient.
    assert gap_between(base, Seen(0.5 + 0.9e-8, gradient)) is None
    assert gap_between(base, Seen(0.5 - 0.9e-8, gradient + 1.9e-8)) is None
    assert gap_between(base, Seen(0.5 + 1.1e-8, gradient)) == "the loss is 0.5 and not 0.5"
    assert gap_between(base, Seen(0.5 - 1.1e-8, gradient)) == "the loss is 0.5 and not 0.5"
    changed = gap_between(base, Seen(0.5, gradient - 2.2e-8))
    assert changed is not None
    assert changed.startswith(
        "the loss stays 0.5, but its gradient changes by up to 2.2e-08 (its largest entry is 2)"
    )
    large = Seen(-100.0, gradient)
    assert gap_between(large, Seen(-100.0 + 0.9e-6, gradient)) is None
    assert gap_between(large, Seen(-100.0 + 1.1e-6, gradient)) is not None
    flat = Seen(0.0, torch.zeros(1, 2, dtype=torch.float64))
    assert gap_between(flat, Seen(0.0, torch.full((1, 2), 0.9e-11, dtype=torch.float64))) is None
    assert gap_between(flat, Seen(0.0, torch.full((1, 2), 1.1e-11, dtype=torch.float64))) is not None
    assert gap_between(base, Seen(float("nan"), gradient)) is not None
    assert gap_between(base, Seen(0.5, gradient * float("nan"))) is not None
