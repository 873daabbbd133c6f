"""Reductions of one token, one sample and nothing, where a count that is off by one shows most."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strop.algorithms.aggregation import (
    BatchTotals,
    batch_totals,
    row_numbers,
    token_weights,
    valid_tokens_per_row,
    weighted_sum,
)
from strop.algorithms.names import AGGREGATION_MODES
from strop.algorithms.verl_aggregation import agg_loss
from strop.engines.parallel.balance import (
    UNBALANCE,
    _halves,
    _Loads,
    balance_parts,
    get_seqlen_balanced_partitions,
    sequence_workload,
)

NORM = "seq-mean-token-sum-norm"


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_one_token_is_the_whole_loss(mode: str) -> None:
    scale = 4.0 if mode == NORM else None
    expected = 3.0 / 4 if mode == NORM else 3.0
    for mask in ([[1]], [[0, 1]], [[0, 0], [1, 0]]):
        where = torch.tensor(mask)
        terms = torch.where(where.bool(), 3.0, math.nan).double()
        assert agg_loss(terms, where, mode, loss_scale_factor=scale).item() == expected
        weights = token_weights(mode, where, num_tokens=1, num_samples=1, scale=scale)
        assert weights.tolist() == (where * expected / 3).tolist()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_a_part_without_tokens_adds_nothing(mode: str) -> None:
    scale = 4.0 if mode == NORM else None
    mask = torch.zeros(2, 3)
    terms = torch.full((2, 3), math.nan)
    assert agg_loss(terms, mask, mode, loss_scale_factor=scale).item() == 0.0
    assert batch_totals(mask) == BatchTotals(num_tokens=0, num_samples=0)


@pytest.mark.parametrize(("tokens", "samples"), [(0, 1), (1, 0), (0, 0), (-1, 1)])
def test_a_batch_without_tokens_or_samples_is_refused(tokens: int, samples: int) -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        with pytest.raises(
            ValueError, match=f"of {samples} samples and {tokens} tokens has nothing to train on"
        ):
            token_weights(mode, torch.tensor([[1]]), num_tokens=tokens, num_samples=samples)


def test_a_scale_is_for_one_mode_and_above_0() -> None:
    one = torch.tensor([[1]])
    assert token_weights(NORM, one, num_tokens=1, num_samples=1, scale=1e-9).item() == pytest.approx(1e9)
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="divides by its scale, which is .*: use one above 0"):
            token_weights(NORM, one, num_tokens=1, num_samples=1, scale=scale)
    with pytest.raises(ValueError, match="divides by a constant: set algorithm.loss_scale_factor"):
        token_weights(NORM, one, num_tokens=1, num_samples=1)
    for mode in AGGREGATION_MODES:
        if mode != NORM:
            with pytest.raises(
                ValueError, match=f"a scale of 2.0 was given, but {mode} does not divide by one"
            ):
                token_weights(mode, one, num_tokens=1, num_samples=1, scale=2.0)
    with pytest.raises(ValueError, match="unknown loss aggregation mode 'mean'; known: token-mean"):
        token_weights("mean", one, num_tokens=1, num_samples=1)


def test_weights_of_samples_by_hand() -> None:
    # Three samples of 2, 0 and 3 tokens, of a batch of 10 tokens and 4 samples.
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    expected = {
        "token-mean": [0.1, 0.1, 0.1],
        "token-sum": [1.0, 1.0, 1.0],
        "seq-mean-token-sum": [0.25, 0.25, 0.25],
        NORM: [0.05, 0.05, 0.05],
        "seq-mean-token-mean": [1 / 8, 1 / 4, 1 / 12],
    }
    for mode, weights in expected.items():
        scale = 5.0 if mode == NORM else None
        got = token_weights(mode, mask, num_tokens=10, num_samples=4, scale=scale, dtype=torch.float64)
        torch.testing.assert_close(got, double(weights)[:, None] * mask)
        assert token_weights(mode, mask, num_tokens=10, num_samples=4, scale=scale).dtype == torch.float32


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_the_mean_over_ranks_of_verls_losses_is_the_loss_of_the_batch(mode: str) -> None:
    # Two ranks, one row each: 2 of 3 tokens, 1 of 3. Each multiplies by 2, and the framework takes the mean.
    terms, masks = double([[1.0, 2.0, 9.0], [5.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    scale = 4.0 if mode == NORM else None
    whole = agg_loss(terms, masks, mode, loss_scale_factor=scale)
    parts = [
        agg_loss(
            terms[row : row + 1],
            masks[row : row + 1],
            mode,
            dp_size=2,
            batch_num_tokens=3,
            global_batch_size=2,
            loss_scale_factor=scale,
        )
        for row in range(2)
    ]
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole)


def test_ranks_need_the_total_that_the_mode_divides_by_and_no_other() -> None:
    ones = torch.ones(1, 2)
    for mode, given, name in (
        ("token-mean", {"batch_num_tokens": 2}, "batch_num_tokens"),
        ("seq-mean-token-sum", {"global_batch_size": 1}, "global_batch_size"),
        ("seq-mean-token-mean", {"global_batch_size": 1}, "global_batch_size"),
    ):
        assert agg_loss(ones, ones, mode, dp_size=2, **given).item() > 0
        with pytest.raises(ValueError, match=f"{mode} over 2 ranks needs {name}, the count over all ranks"):
            agg_loss(ones, ones, mode, dp_size=2)
        assert agg_loss(ones, ones, mode, dp_size=1).item() > 0
    assert agg_loss(ones, ones, "token-sum", dp_size=2).item() == 4.0
    # A scale that the mode does not take is not an error here: verl passes it always.
    assert agg_loss(ones, ones, "token-mean", loss_scale_factor=7.0).item() == 1.0


def test_terms_of_weight_0_never_matter() -> None:
    terms, weights = double([math.nan, 2.0, -3.0]).requires_grad_(), double([0.0, 0.5, -1.0])
    total = weighted_sum(terms, weights)
    assert total.item() == 4.0
    (gradient,) = torch.autograd.grad(total, terms)
    assert gradient.tolist() == [0.0, 0.5, -1.0]


def test_rows_of_a_flat_layout() -> None:
    lengths = torch.tensor([2, 0, 3])
    assert row_numbers(lengths).tolist() == [0, 0, 2, 2, 2]
    mask = torch.tensor([1, 0, 1, 1, 0])
    assert valid_tokens_per_row(mask, lengths).tolist() == [1, 0, 2]
    assert batch_totals(mask, lengths) == BatchTotals(num_tokens=3, num_samples=2)
    with pytest.raises(ValueError, match="row_lengths add up to 5 tokens, but the flat mask has shape"):
        valid_tokens_per_row(mask[:4], lengths)
    for flat in (mask, mask[None, None]):
        with pytest.raises(ValueError, match="is flat: pass row_lengths, the tokens of each row"):
            valid_tokens_per_row(flat)


# ------------------------------------------------------------------------------------- rows over ranks


def largest(workloads: list[int], parts: list[list[int]]) -> int:
    return max(sum(workloads[row] for row in part) for part in parts)


def test_samples_of_a_prompt_stay_together_up_to_the_limit_and_not_beyond() -> None:
    # Rows one by one: 100 and 100. Two prompts of 100 + x and 100 - x: the limit is 105.
    assert UNBALANCE == 1.05
    for over, together in ((5, True), (6, False)):
        workloads = [50 + over, 50, 50, 50 - over]
        parts = balance_parts(workloads, [0, 0, 1, 1], 2)
        assert (parts == [[0, 1], [2, 3]]) == together
        assert largest(workloads, parts) <= 105


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance_parts([1, 2], [0], 1), "2 rows have 1 groups"),
        (lambda: balance_parts([1], [0, 0], 1), "1 rows have 2 groups"),
        (lambda: balance_parts([1], [0], 0), "rows cannot go into 0 parts; use at least 1"),
        (lambda: balance_parts([-1], [0], 1), "a sequence has length -1"),
        (
            lambda: get_seqlen_balanced_partitions([1], 0),
            "1 sequences cannot fill 0 partitions",
        ),
        (
            lambda: get_seqlen_balanced_partitions([], 1),
            "0 sequences cannot fill 1 partitions",
        ),
        (lambda: get_seqlen_balanced_partitions([0, -2], 1), "a sequence has length -2"),
    ],
)
def test_partitions_that_cannot_be(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_of_0_and_parts_of_one() -> None:
    assert get_seqlen_balanced_partitions([0], 1) == [[0]]
    assert get_seqlen_balanced_partitions([0, 0, 0], 3) == [[0], [1], [2]]
    assert get_seqlen_balanced_partitions([5, 1, 3], 3) == [[0], [1], [2]]
    assert get_seqlen_balanced_partitions([5, 1, 3], 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("lengths", "k", "sums"),
    [
        # Differencing by hand: the two largest differences are joined until one is left.
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # 1, 1, 4 -> 3 and 1 -> 2
        ([10, 8, 5, 3], 2, [13, 13]),  # 10-8 = 2, 5-3 = 2 -> 0
        ([9, 1, 1, 1], 2, [3, 9]),
        ([4, 4, 4, 4], 2, [8, 8]),
        ([5, 5, 4, 3, 3], 3, [5, 7, 8]),  # (5,5) -> 5,5,0; with 4: 5,5,4; 3 and 3 -> 3,3,0; 5+0, 5+3, 4+3
    ],
)
def test_differencing_by_hand_on_more_lists(lengths: list[int], k: int, sums: list[int]) -> None:
    parts = get_seqlen_balanced_partitions(lengths, k)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == sums


def test_the_work_of_a_sequence_grows_faster_than_its_length() -> None:
    assert sequence_workload(1) == 24_577
    assert sequence_workload(24_576) == 2 * 24_576**2


def test_a_heavy_unit_is_cut_by_its_load() -> None:
    loads = _Loads([3, 1, 1, 1, 9], [0] * 5)
    assert _halves([0, 1, 2, 3], loads, heavy=5) == [[0], [1, 2, 3]]
    assert _halves([0, 1, 2, 3], loads, heavy=6) == [[0, 1, 2, 3]]  # not above
    assert _halves([4], loads, heavy=1) == [[4]]  # one row cannot be cut
    assert _halves([3, 4], loads, heavy=1) == [[3], [4]]


@pytest.mark.parametrize("parts", [8, 16])
def test_a_prompt_over_many_ranks_is_cut_no_finer_than_balance_asks_for(parts: int) -> None:
    # Two prompts of equal rows: each rank has rows of one prompt.
    groups = [0] * 32 + [1] * 32
    got = balance_parts([5] * 64, groups, parts)
    assert all(len({groups[row] for row in part}) == 1 for part in got)
    assert largest([5] * 64, got) == 320 // parts
