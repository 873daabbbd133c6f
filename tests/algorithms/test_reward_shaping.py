from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.group_functions.shaping import overlong_penalty
from strop.algorithms.registry import REWARD_SHAPINGS
from strop.algorithms.resampling import drawn_rows, pf_ppo_weights, resample_rows
from strop.utils.rng import random_key


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_overlong_penalty_by_hand() -> None:
    # Maximum 20, buffer 4: free up to 16, then 1/4 per token, full from 20 on.
    lengths = torch.tensor([0, 16, 17, 19, 20, 21, 99])
    got = overlong_penalty(lengths, max_tokens=20, buffer_tokens=4, dtype=torch.float64)
    assert got.tolist() == [0, 0, -0.25, -0.75, -1, -1, -1]
    assert not torch.signbit(got[:2]).any()
    half = overlong_penalty(lengths, max_tokens=20, buffer_tokens=4, factor=0.5)
    assert half.tolist() == [0, 0, -0.125, -0.375, -0.5, -0.5, -0.5]
    assert half.dtype == torch.float32


def test_a_buffer_as_long_as_the_answer_punishes_every_token() -> None:
    got = overlong_penalty(torch.tensor([1, 2, 4]), max_tokens=4, buffer_tokens=4)
    assert got.tolist() == [-0.25, -0.5, -1.0]


def test_names_of_shapings_are_known_once_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AlgorithmConfig().has_known_names
    assert not AlgorithmConfig(reward_shaping="halves").has_known_names
    monkeypatch.setitem(REWARD_SHAPINGS, "halves", lambda rewards: rewards / 2)
    assert AlgorithmConfig(reward_shaping="halves").has_known_names


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    numbers=st.tuples(st.integers(1, 30), st.integers(0, 30)),
    factor=st.sampled_from([0.0, 1.0, 2.5]),
)
def test_the_overlong_penalty_is_the_three_cases_of_the_paper(
    lengths: list[int], numbers: tuple[int, int], factor: float
) -> None:
    buffer, maximum = numbers[0], numbers[0] + numbers[1]
    expected = []
    for length in lengths:
        if length <= maximum - buffer:
            expected.append(0.0)
        elif length <= maximum:
            expected.append(factor * ((maximum - buffer) - length) / buffer)
        else:
            expected.append(-factor)
    got = overlong_penalty(
        torch.tensor(lengths), max_tokens=maximum, buffer_tokens=buffer, factor=factor, dtype=torch.float64
    )
    torch.testing.assert_close(got, double(expected), rtol=0, atol=1e-12)


def test_impossible_buffers_and_factors_are_refused() -> None:
    lengths = torch.tensor([1])
    for buffer in (0, 21):
        with pytest.raises(
            ValueError, match=rf"buffer is {buffer} tokens and the maximum length 20: .*1 and 20"
        ):
            overlong_penalty(lengths, max_tokens=20, buffer_tokens=buffer)
    for factor in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="over-long penalty factor is"):
            overlong_penalty(lengths, max_tokens=20, buffer_tokens=4, factor=factor)


def test_pf_ppo_weights_by_hand() -> None:
    scores = double([-2.0, 0.0, 1.0, 3.0, 3.0])
    exact = {"rtol": 0.0, "atol": 1e-14}
    torch.testing.assert_close(pf_ppo_weights(scores), double([4, 0, 1, 9, 9]) + 1e-8, **exact)
    got = pf_ppo_weights(scores, method="pow", power=1.0)
    torch.testing.assert_close(got, double([2, 0, 1, 3, 3]) + 1e-8, **exact)
    got = pf_ppo_weights(scores, method="max_min")
    torch.testing.assert_close(got, double([1, 0, 0, 1, 1]) + 1e-8, **exact)
    got = pf_ppo_weights(scores, method="max_random")
    torch.testing.assert_close(got, double([0.1, 0.1, 0.1, 0.4, 0.4]) + 1e-8, **exact)


def test_pf_ppo_weights_refuse_what_they_cannot_weigh() -> None:
    scores = double([1.0, 2.0])
    with pytest.raises(ValueError, match="unknown reweighting 'min'; known: pow, max_min, max_random"):
        pf_ppo_weights(scores, method="min")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reweighting power is -1.0"):
        pf_ppo_weights(scores, power=-1.0)
    with pytest.raises(ValueError, match="there are no scores"):
        pf_ppo_weights(scores[:0])
    with pytest.raises(ValueError, match=r"scores must be finite, but those of rows \[0\]"):
        pf_ppo_weights(double([math.nan, 1.0]))


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    # 20,000 draws with chances 1/10, 0, 6/10, 3/10, 0: a share p has a standard error below 0.0035; 5 of them.
    weights = double([1.0, 0.0, 6.0, 3.0, 0.0])
    counts = Counter(resample_rows(weights, key=random_key(0, "test"), num_rows=20_000).tolist())
    assert set(counts) == {0, 2, 3}
    for row, chance in ((0, 0.1), (2, 0.6), (3, 0.3)):
        assert counts[row] / 20_000 == pytest.approx(chance, abs=0.018)


def test_draws_depend_on_the_key_and_the_weights_only() -> None:
    weights, key = double([1.0, 2.0, 3.0]), random_key(1, "pf_ppo", 7)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = resample_rows(weights, key=key)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == torch.int64
    assert first.shape == (3,)
    longer = resample_rows(weights * 5, key=key, num_rows=50)
    assert longer[:3].tolist() == first.tolist()
    assert resample_rows(weights, key=key + 1, num_rows=50).tolist() != longer.tolist()


def test_equal_scores_of_zero_can_be_drawn_from() -> None:
    rows = resample_rows(pf_ppo_weights(double([0.0] * 4)), key=3, num_rows=200)
    assert set(rows.tolist()) == {0, 1, 2, 3}


def test_a_draw_at_the_very_end_falls_on_the_last_row_with_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    # The largest uniform number times a large sum rounds up to the sum itself.
    import numpy as np

    from strop.algorithms import resampling

    monkeypatch.setattr(resampling, "uniforms", lambda keys, positions: np.full(len(positions), 1.0))
    assert resample_rows(double([1.0, 2.0, 0.0]), key=0, num_rows=1).tolist() == [1]
    assert resample_rows(double([0.0, 0.25, 0.0]), key=0, num_rows=1).tolist() == [1]  # a sum below 1, too
    monkeypatch.setattr(resampling, "uniforms", lambda keys, positions: np.zeros(len(positions)))
    assert resample_rows(double([0.0, 2.0, 1.0]), key=0, num_rows=1).tolist() == [
        1
    ]  # weight 0 is never drawn


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0]])
def test_weights_that_cannot_be_drawn_from_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be at least 0 with a sum above 0"):
        resample_rows(double(weights), key=0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="weights"):
        resample_rows(double([1.0, wrong, 2.0]), key=0)


def test_a_negative_number_of_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 rows are to be drawn"):
        resample_rows(double([1.0]), key=0, num_rows=-1)
    assert resample_rows(double([1.0]), key=0, num_rows=0).tolist() == []


def test_as_many_rows_are_drawn_as_there_are_of_a_batch_or_of_each_prompt() -> None:
    # Weights |s|^2 of 0 beside 100: the rows of score 0 have a share of 1e-12, and are never drawn here.
    scores, uids = double([0.0, 10.0, 10.0, 0.0, 0.0]), ["a", "b", "a", "b", "b"]
    within = AlgorithmConfig(resampling="pow", resampling_within="prompt")
    assert drawn_rows(scores, uids, within, seed=0, step=1) == [1, 1, 1, 2, 2]
    drawn = [
        drawn_rows(scores, uids, AlgorithmConfig(resampling="pow"), seed=0, step=step) for step in range(9)
    ]
    assert {row for rows in drawn for row in rows} == {1, 2}
    assert {len(rows) for rows in drawn} == {5}
    assert len({tuple(rows) for rows in drawn}) > 1, "another step draws anew"
