from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import losses as reference
from strop.algorithms.aggregation import (
    BatchTotals,
    batch_totals,
    token_weights,
    valid_tokens_per_row,
    weighted_sum,
)
from strop.algorithms.names import AGGREGATION_MODES
from strop.algorithms.verl_aggregation import agg_loss

SCALE = {mode: 16.0 if mode.endswith("norm") else None for mode in AGGREGATION_MODES}
Rows = list[tuple[list[float], list[int]]]


@st.composite
def ragged(draw: st.DrawFn) -> Rows:
    """Rows of terms and their masks; at least one token is valid."""
    rows: Rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 5))
        terms = draw(st.lists(st.floats(-5, 5), min_size=length, max_size=length))
        rows.append((terms, draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))))
    rows[0][1][0] = 1
    return rows


def padded(rows: Rows, junk: float = math.nan) -> tuple[Tensor, Tensor]:
    """[B, R] terms and mask, padded to the longest row, with `junk` wherever the mask is 0."""
    width = max(len(terms) for terms, _ in rows)
    terms = [
        [x if m else junk for x, m in zip(xs, ms, strict=True)] + [junk] * (width - len(xs))
        for xs, ms in rows
    ]
    mask = [ms + [0] * (width - len(ms)) for _, ms in rows]
    return torch.tensor(terms, dtype=torch.float64), torch.tensor(mask)


def flat(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    terms = torch.tensor([x for xs, _ in rows for x in xs], dtype=torch.float64)
    mask = torch.tensor([m for _, ms in rows for m in ms])
    return terms, mask, torch.tensor([len(ms) for _, ms in rows])


def counts(rows: Rows) -> dict[str, int]:
    return {
        "num_tokens": sum(sum(ms) for _, ms in rows),
        "num_samples": sum(any(ms) for _, ms in rows),
    }


def expected_loss(rows: Rows, mode: str) -> float:
    return reference.reduce_terms([xs for xs, _ in rows], [ms for _, ms in rows], mode, SCALE[mode])


def part_loss(rows: Rows, part: list[int], theta: Tensor, mode: str, *, is_flat: bool) -> float:
    """Loss of one micro-batch, with the counts of all rows, added to the gradient of theta."""
    chosen = [rows[i] for i in part]
    terms, mask, lengths = flat(chosen) if is_flat else (*padded(chosen, junk=0.0), None)
    factor = theta[part][:, None] if lengths is None else theta[part].repeat_interleave(lengths)
    weights = token_weights(
        mode, mask, **counts(rows), scale=SCALE[mode], row_lengths=lengths, dtype=torch.float64
    )
    loss = weighted_sum(torch.where(mask.bool(), terms * factor, math.nan), weights)
    loss.backward()
    return loss.item()


# Rows (1, 2, masked 100) and (6): three valid tokens, two samples.
EXAMPLE: Rows = [([1.0, 2.0, 100.0], [1, 1, 0]), ([6.0], [1])]


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", 9 / 3),
        ("token-sum", 9.0),
        ("seq-mean-token-sum", (3 + 6) / 2),
        ("seq-mean-token-sum-norm", (3 + 6) / 2 / 16),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
    ],
)
def test_each_mode_by_hand(mode: str, loss: float) -> None:
    terms, mask = padded(EXAMPLE)
    weights = token_weights(mode, mask, num_tokens=3, num_samples=2, scale=SCALE[mode], dtype=torch.float64)
    assert weighted_sum(terms, weights).item() == pytest.approx(loss, abs=1e-12)
    assert agg_loss(terms, mask, mode, loss_scale_factor=16.0).item() == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(rows=ragged(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_cut_and_either_layout_give_one_loss_and_gradient(
    mode: str, rows: Rows, data: st.DataObject
) -> None:
    # theta_i multiplies the terms of row i, so its gradient is the loss with every other row at 0.
    zeroed = [
        [(xs if i == j else [0.0] * len(xs), ms) for j, (xs, ms) in enumerate(rows)] for i in range(len(rows))
    ]
    gradient = torch.tensor([expected_loss(only, mode) for only in zeroed], dtype=torch.float64)
    for is_flat in (False, True):
        order = data.draw(st.permutations(range(len(rows))))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(rows)))))
        parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True) if order[a:b]]
        theta = torch.ones(len(rows), dtype=torch.float64, requires_grad=True)
        loss = sum(part_loss(rows, part, theta, mode, is_flat=is_flat) for part in parts)
        assert loss == pytest.approx(expected_loss(rows, mode), abs=1e-10)
        assert theta.grad is not None
        torch.testing.assert_close(theta.grad, gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(rows=ragged(), data=st.data())
@settings(max_examples=20, deadline=None)
def test_agg_loss_summed_over_micro_batches_and_averaged_over_ranks(
    mode: str, rows: Rows, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    totals = counts(rows)
    ranks = [part for part in (rows[:cut], rows[cut:]) if part]
    losses = [
        agg_loss(
            *padded(part),
            mode,
            dp_size=len(ranks),
            batch_num_tokens=totals["num_tokens"],
            global_batch_size=totals["num_samples"],
            loss_scale_factor=16.0,
        ).item()
        for part in ranks
    ]
    assert sum(losses) / len(ranks) == pytest.approx(expected_loss(rows, mode), abs=1e-10)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_masked_terms_get_no_weight_and_no_gradient(mode: str) -> None:
    terms, mask = padded(EXAMPLE)
    terms.requires_grad_()
    weights = token_weights(mode, mask, num_tokens=3, num_samples=2, scale=SCALE[mode], dtype=torch.float64)
    weighted_sum(terms, weights).backward()
    assert terms.grad is not None
    assert torch.equal(terms.grad, weights)
    assert (weights[mask == 0] == 0).all()


def test_a_wider_padding_does_not_change_the_constant_divisor() -> None:
    # Divided by the padded width, the same rows would give 0.5 at width 8 and 1.0 at width 4.
    terms = torch.ones(2, 4)
    wide, wide_mask = torch.zeros(2, 8), torch.zeros(2, 8)
    wide[:, :4], wide_mask[:, :4] = terms, 1.0
    losses = {
        agg_loss(x, m, "seq-mean-token-sum-norm", loss_scale_factor=8.0).item()
        for x, m in ((terms, torch.ones(2, 4)), (wide, wide_mask))
    }
    assert losses == {0.5}
    with pytest.raises(ValueError, match="set algorithm.loss_scale_factor"):
        agg_loss(terms, torch.ones(2, 4), "seq-mean-token-sum-norm")


def test_a_rejected_token_leaves_numerator_and_denominator() -> None:
    # Tokens 1, 2, 6; rejecting the 2 leaves a mean of 7/2 over two tokens.
    terms, mask = torch.tensor([[1.0, 2.0], [6.0, 0.0]]), torch.tensor([[1, 0], [1, 0]])
    totals = batch_totals(mask)
    assert totals == BatchTotals(num_tokens=2, num_samples=2)
    weights = token_weights("token-mean", mask, num_tokens=totals.num_tokens, num_samples=totals.num_samples)
    assert weighted_sum(terms, weights).item() == 3.5


def test_totals_are_counted_in_either_layout() -> None:
    left = batch_totals(torch.tensor([[1, 1, 0], [0, 0, 0]]))
    right = batch_totals(torch.tensor([1, 0, 1]), row_lengths=torch.tensor([2, 1]))
    assert (left, right) == (
        BatchTotals(num_tokens=2, num_samples=1),
        BatchTotals(num_tokens=2, num_samples=2),
    )


def test_a_micro_batch_without_valid_tokens_adds_zero() -> None:
    for mode in AGGREGATION_MODES:
        loss = agg_loss(torch.ones(1, 2), torch.zeros(1, 2), mode, loss_scale_factor=16.0)
        assert loss.item() == 0.0, mode


def test_flat_rows_may_be_empty() -> None:
    per_row = valid_tokens_per_row(torch.tensor([1, 0, 1]), torch.tensor([0, 2, 0, 1]))
    assert per_row.tolist() == [0, 1, 0, 1]


def test_clear_errors() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="unknown loss aggregation mode 'mean'; known: token-mean"):
        token_weights("mean", ones, num_tokens=2, num_samples=1)
    with pytest.raises(ValueError, match="nothing to train on"):
        token_weights("token-mean", ones, num_tokens=0, num_samples=0)
    with pytest.raises(ValueError, match="a scale of 3.0 was given, but token-sum"):
        token_weights("token-sum", ones, num_tokens=2, num_samples=1, scale=3.0)
    with pytest.raises(ValueError, match="its scale, which is 0.0"):
        token_weights("seq-mean-token-sum-norm", ones, num_tokens=2, num_samples=1, scale=0.0)
    with pytest.raises(ValueError, match="is flat: pass row_lengths"):
        token_weights("token-mean", torch.ones(2), num_tokens=2, num_samples=1)
    with pytest.raises(ValueError, match="row_lengths add up to 3 tokens"):
        valid_tokens_per_row(torch.ones(2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="token-mean over 2 ranks needs batch_num_tokens"):
        agg_loss(ones, ones, "token-mean", dp_size=2, global_batch_size=1)
    with pytest.raises(ValueError, match="seq-mean-token-sum over 2 ranks needs global_batch_size"):
        agg_loss(ones, ones, "seq-mean-token-sum", dp_size=2, batch_num_tokens=2)
