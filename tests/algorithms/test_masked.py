from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.masked_ops import masked_mean, masked_sum, masked_whiten

# Valid values 1, 2 and 6: sum 9, mean 3, squared deviations 4 + 1 + 9 = 14.
VALUES = torch.tensor([[1.0, math.nan, 2.0], [6.0, math.inf, -math.inf]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])


def test_sum_and_mean_by_hand() -> None:
    assert masked_sum(VALUES, MASK).item() == 9
    assert masked_sum(VALUES, MASK, axis=1).tolist() == [3, 6]
    assert masked_mean(VALUES, MASK).item() == 3
    assert masked_mean(VALUES, MASK, axis=0).tolist() == [3.5, 0, 2]


def test_whitening_by_hand() -> None:
    scale = (7 + 1e-8) ** -0.5
    expected = torch.tensor([[-2, 0, -1], [3, 0, 0]], dtype=torch.float64) * scale
    torch.testing.assert_close(masked_whiten(VALUES, MASK), expected)


@given(valid=st.lists(st.floats(-100, 100), min_size=2, max_size=8), junk=st.sampled_from([math.nan, 1e9]))
@settings(max_examples=50, deadline=None)
def test_moments_equal_the_standard_library(valid: list[float], junk: float) -> None:
    values = torch.tensor([*valid, junk], dtype=torch.float64)
    mask = torch.tensor([1] * len(valid) + [0])
    assert masked_mean(values, mask).item() == pytest.approx(statistics.fmean(valid), abs=1e-10)
    mean, variance = statistics.fmean(valid), statistics.variance(valid)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in valid]
    assert masked_whiten(values, mask).tolist() == pytest.approx([*expected, 0.0], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_values_whiten_to_exactly_zero(dtype: torch.dtype) -> None:
    for count in (7, 8, 16):
        whitened = masked_whiten(torch.full((count,), 0.1, dtype=dtype), torch.ones(count))
        assert whitened.abs().max().item() == 0.0


def test_masked_values_get_no_gradient() -> None:
    values = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0, 1])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_tokens_for_a_variance_whiten_to_zero(count: int) -> None:
    # One valid token in the batch, as in a short last step, or where a correction rejected all others.
    mask = torch.tensor([1] * count + [0] * (3 - count))
    assert masked_whiten(torch.tensor([5.0, math.nan, 7.0]), mask).tolist() == [0.0, 0.0, 0.0]
