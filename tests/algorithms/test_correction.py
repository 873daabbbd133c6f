from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import rollout_correction as reference
from strop.algorithms.aggregation import batch_totals, token_weights
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.rollout_correction import Correction, correct
from strop.algorithms.rollout_correction_config import STATISTICS, CorrectionConfig
from strop.protocol import DataProto, columns
from strop.workers.correction_columns import correction_columns

LN2 = math.log(2)
NAN = math.nan

# Ratios by hand: row 0 has 2, 1/2, 4 (product 4, geometric mean 4^(1/3)); row 1 has 1/4 and a token that was not
# sampled; row 2 has 1, 1.
RHO = [[LN2, -LN2, 2 * LN2], [-2 * LN2, NAN, 7.0], [0.0, 0.0, NAN]]
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)


def by_hand(**setting: Any) -> Correction:
    old = torch.tensor(RHO, dtype=torch.float64) - 3
    return correct(old, torch.full_like(old, -3.0), MASK, CorrectionConfig(**setting))


def rows_of(tensor: torch.Tensor | None) -> list[list[float]]:
    assert tensor is not None
    rows: list[list[float]] = tensor.tolist()
    return rows


def close(got: torch.Tensor | None, expected: list[list[float]]) -> None:
    assert got is not None
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=1e-12)


def test_columns_of_rows_are_masks_counts_and_weights_where_they_are_asked_for() -> None:
    lengths = MASK.sum(dim=1)
    inside = torch.arange(3)[None] < lengths[:, None]
    old = torch.tensor(RHO, dtype=torch.float64).nan_to_num() - 3
    made = {"old_log_probs": old, "rollout_log_probs": torch.full_like(old, -3.0), "response_mask": MASK}
    rows = DataProto.from_dict({name: columns.from_padded(value, inside) for name, value in made.items()})
    with_weights = AlgorithmConfig(correction=CorrectionConfig(weights="token", upper=3.0))
    found = correction_columns(rows, with_weights).tensors()
    assert found.keys() == {"loss_mask", "num_trained", "rollout_is_weights"}
    assert columns.flat(found["rollout_is_weights"]).tolist() == pytest.approx([2, 0.5, 3, 0.25, 1, 1])
    assert (columns.flat(found["loss_mask"]).tolist(), found["num_trained"].tolist()) == (
        [True] * 6,
        [3, 1, 2],
    )
    rejecting = AlgorithmConfig(correction=CorrectionConfig(reject={"token_k1": [0.2, 3.0]}))
    found = correction_columns(rows, rejecting).tensors()
    assert found.keys() == {"loss_mask", "num_trained"}
    assert found["num_trained"].tolist() == [2, 1, 2], "the token of ratio 4 is left out"


def test_no_correction_is_no_weights_and_the_response_mask() -> None:
    result = by_hand()
    assert not CorrectionConfig().is_on
    assert result.weights is None
    assert torch.equal(result.mask, MASK)
    assert result.metrics == {}


def test_token_weights_are_truncated_from_above_alone() -> None:
    close(by_hand(weights="token", upper=3.0).weights, [[2, 0.5, 3], [0.25, 0, 0], [1, 1, 0]])


def test_a_sequence_weight_is_the_product_of_its_tokens_ratios() -> None:
    close(by_hand(weights="sequence", upper=3.0).weights, [[3, 3, 3], [0.25, 0, 0], [1, 1, 0]])


def test_a_geometric_weight_is_the_geometric_mean_of_its_tokens_ratios() -> None:
    mean = 4 ** (1 / 3)
    close(by_hand(weights="geometric").weights, [[mean] * 3, [0.25, 0, 0], [1, 1, 0]])


def test_mask_mode_gives_weight_0_beyond_the_bounds_and_leaves_the_mask_alone() -> None:
    result = by_hand(weights="token", mode="mask", lower=0.4, upper=3.0)
    close(result.weights, [[2, 0.5, 0], [0, 0, 0], [1, 1, 0]])
    assert torch.equal(result.mask, MASK)
    assert result.metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 6)


def test_normalized_token_weights_have_mean_1_over_tokens() -> None:
    # 2 + 1/2 + 2 (cut from 4) + 1/4 + 1 + 1 = 6.75 over six tokens.
    result = by_hand(weights="token", normalize=True)
    factor = 6.75 / 6
    close(
        result.weights,
        [[2 / factor, 0.5 / factor, 2 / factor], [0.25 / factor, 0, 0], [1 / factor] * 2 + [0]],
    )
    assert result.metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor)


def test_normalized_sequence_weights_have_mean_1_over_samples() -> None:
    # 2 (cut from 4), 1/4 and 1: mean 3.25 / 3, whatever the lengths.
    factor = 3.25 / 3
    close(
        by_hand(weights="sequence", normalize=True).weights,
        [[2 / factor] * 3, [0.25 / factor, 0, 0], [1 / factor] * 2 + [0]],
    )


def test_normalization_counts_only_what_is_trained() -> None:
    # token_k1 in [0.3, 3] rejects the ratios 4 and 1/4: 2 + 1/2 + 1 + 1 over four tokens.
    result = by_hand(weights="token", normalize=True, reject={"token_k1": [0.3, 3.0]})
    factor = 4.5 / 4
    close(result.weights, [[2 / factor, 0.5 / factor, 0], [0, 0, 0], [1 / factor] * 2 + [0]])


@pytest.mark.parametrize(
    ("reject", "expected"),
    [
        # The ratios of the tokens: 2, 1/2, 4 | 1/4 | 1, 1.
        ({"token_k1": [0.2, 3.0]}, [[1, 1, 0], [1, 0, 0], [1, 1, 0]]),  # as its inverse, 1/4 would go instead
        ({"token_k1": [0.4, 5.0]}, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ({"token_k1": 3.0}, [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),  # [1/3, 3]
        # k2 = ln(2)^2 / 2 = 0.24 for 2 and 1/2, and 4 * that for 4 and 1/4.
        ({"token_k2": 0.5}, [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),
        # k3 = ratio - 1 - ln(ratio): 0.307, 0.193, 1.614 | 0.636 | 0, 0.
        ({"token_k3": 0.3}, [[0, 1, 0], [0, 0, 0], [1, 1, 0]]),
        # Products: 4 | 1/4 | 1.
        ({"seq_sum_k1": [0.2, 3.0]}, [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        # Geometric means: 1.587 | 1/4 | 1.
        ({"seq_mean_k1": [0.9, 1.1]}, [[0, 0, 0], [0, 0, 0], [1, 1, 0]]),
        ({"seq_mean_k1": [0.9, 2.0]}, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        # Sums of k2: 6 * 0.24 = 1.44 | 0.96 | 0. Means: 0.48 | 0.96 | 0. Maxima: 0.96 | 0.96 | 0.
        ({"seq_sum_k2": 1.0}, [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        ({"seq_mean_k2": 0.5}, [[1, 1, 1], [0, 0, 0], [1, 1, 0]]),
        ({"seq_max_k2": 0.9}, [[0, 0, 0], [0, 0, 0], [1, 1, 0]]),
        # k3: sums 2.114 | 0.636, means 0.705 | 0.636, maxima 1.614 | 0.636.
        ({"seq_sum_k3": 1.0}, [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        ({"seq_mean_k3": 0.65}, [[0, 0, 0], [1, 0, 0], [1, 1, 0]]),
        ({"seq_max_k3": 1.7}, [[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        # Two statistics must both agree.
        ({"token_k1": [0.4, 5.0], "token_k3": 0.5}, [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),
    ],
)
def test_what_each_statistic_rejects(reject: dict[str, Any], expected: list[list[int]]) -> None:
    result = by_hand(reject=reject)
    assert result.mask.long().tolist() == expected
    assert result.weights is None


def test_rejected_tokens_count_in_no_denominator() -> None:
    # Of six tokens, token_k1 in [1/3, 3] leaves four in two rows: each then weighs 1/4 of a token-mean loss.
    mask = by_hand(reject={"token_k1": 3.0}).mask
    totals = batch_totals(mask)
    assert (totals.num_tokens, totals.num_samples) == (4, 2)
    weights = token_weights("token-mean", mask, num_tokens=totals.num_tokens, num_samples=totals.num_samples)
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights[0, 0].item() == pytest.approx(0.25)


def test_everything_may_be_rejected() -> None:
    old = torch.tensor([[-1.0, -1.0]])
    result = correct(
        old,
        old - 5,
        torch.ones(1, 2, dtype=torch.bool),
        CorrectionConfig(weights="token", normalize=True, reject={"token_k1": 2.0}),
    )
    assert not result.mask.any()
    assert rows_of(result.weights) == [[0.0, 0.0]]
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


def test_metrics_of_weights_are_of_the_raw_ratios() -> None:
    metrics = by_hand(weights="token", upper=3.0).metrics
    ratios = [2, 0.5, 4, 0.25, 1, 1]
    mean = 8.75 / 6
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(mean)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.25)
    variance = math.fsum((r - mean) ** 2 for r in ratios) / 5
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(variance**0.5)
    # Beyond 3: one of six; below 1/3: one of six.
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        reference.effective_share([min(ratio, 3.0) for ratio in ratios])  # what the bound leaves of them
    )
    # Row means: 6.5 / 3, 1/4, 1.
    assert metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx((6.5 / 3 + 1.25) / 3)
    assert metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(6.5 / 3)
    assert metrics["rollout_corr/rollout_is_seq_min"] == pytest.approx(0.25)
    assert metrics["rollout_corr/rollout_is_seq_max_deviation"] == pytest.approx(6.5 / 3 - 1)
    assert metrics["rollout_corr/rollout_is_seq_fraction_high"] == 0.0
    assert metrics["rollout_corr/rollout_is_seq_fraction_low"] == pytest.approx(1 / 3)


def test_the_largest_ratio_is_logged_before_any_clamp() -> None:
    old = torch.zeros(1, 2, dtype=torch.float64)
    rollout = torch.tensor([[-30.0, 0.0]], dtype=torch.float64)
    result = correct(old, rollout, torch.ones(1, 2), CorrectionConfig(weights="token"))
    assert result.metrics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(30))
    assert rows_of(result.weights) == [[2.0, 1.0]]


def test_effective_sample_size_of_one_heavy_token_among_many() -> None:
    # Ratios e^10, 1, 1, 1: nearly everything is one token of four.
    old = torch.tensor([[0.0, -10.0, -10.0, -10.0]], dtype=torch.float64)
    config = CorrectionConfig(weights="token", upper=1e6)
    result = correct(old, torch.full_like(old, -10.0), torch.ones(1, 4), config)
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.25, abs=1e-3)


def test_effective_sample_size_is_that_of_the_weights_that_are_used() -> None:
    # e^10, 1, 1, 1 bounded by 2: mean 5/4, mean square 7/4, so (25/16) / (7/4) = 25/28; masked: 0, 1, 1, 1, so 3/4.
    old = torch.tensor([[0.0, -10.0, -10.0, -10.0]], dtype=torch.float64)
    for mode, share in (("truncate", 25 / 28), ("mask", 3 / 4)):
        config = CorrectionConfig(weights="token", upper=2.0, mode=mode)  # type: ignore[arg-type]
        result = correct(old, torch.full_like(old, -10.0), torch.ones(1, 4), config)
        assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(share)


def test_metrics_of_a_rejection() -> None:
    # Ratios 2, 1/2, 4 | 1/4 | 1, 1 within [0.2, 3]: 4 is beyond. As k1 = -log ratio, 4 is the smallest value.
    metrics = by_hand(reject={"token_k1": [0.2, 3.0], "seq_sum_k1": [0.3, 5.0]}).metrics
    prefix = "rollout_corr/rollout_rs_token_k1"
    assert metrics[f"{prefix}_min"] == pytest.approx(-2 * LN2)
    assert metrics[f"{prefix}_max"] == pytest.approx(2 * LN2)
    assert metrics[f"{prefix}_mean"] == pytest.approx(0.0, abs=1e-12)
    assert metrics[f"{prefix}_fraction_high"] == pytest.approx(1 / 6)
    assert metrics[f"{prefix}_fraction_low"] == 0.0
    assert metrics[f"{prefix}_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics[f"{prefix}_seq_masked_fraction"] == pytest.approx(1 / 3)
    # Row sums of k1: -2 ln 2, 2 ln 2, 0. Row 1, a ratio of 1/4, is below 0.3 and goes.
    prefix = "rollout_corr/rollout_rs_seq_sum_k1"
    assert metrics[f"{prefix}_seq_mean"] == pytest.approx(0.0, abs=1e-12)
    assert metrics[f"{prefix}_seq_max"] == pytest.approx(2 * LN2)
    assert metrics[f"{prefix}_seq_fraction_low"] == pytest.approx(1 / 3)
    assert metrics[f"{prefix}_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)


ROW = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.booleans()), min_size=4, max_size=4)
BATCH = st.lists(ROW, min_size=1, max_size=4).filter(
    lambda rows: any(flag for row in rows for *_, flag in row)
)
REJECT = st.dictionaries(st.sampled_from(STATISTICS), st.sampled_from([1.3, 2.0, 5.0]), max_size=2)
SETTINGS = st.fixed_dictionaries(
    {
        "weights": st.sampled_from(["token", "sequence", "geometric"]),
        "mode": st.sampled_from(["truncate", "mask"]),
        "lower": st.sampled_from([0.3, 0.9]),
        "upper": st.sampled_from([1.2, 3.0]),
        "normalize": st.booleans(),
        "reject": REJECT,
    }
).map(lambda setting: setting if setting["mode"] == "mask" else {**setting, "lower": 0.5})


def tensors(batch: list[list[tuple[float, float, bool]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    old = torch.tensor([[o for o, _, _ in row] for row in batch], dtype=torch.float64)
    rollout = torch.tensor([[r for _, r, _ in row] for row in batch], dtype=torch.float64)
    return old, rollout, torch.tensor([[m for _, _, m in row] for row in batch])


@given(batch=BATCH, setting=SETTINGS)
@settings(max_examples=200, deadline=None)
def test_correction_equals_the_reference(batch: Any, setting: dict[str, Any]) -> None:
    old, rollout, mask = tensors(batch)
    got = correct(old, rollout, mask, CorrectionConfig(**setting))
    o, r, m = old.tolist(), rollout.tolist(), mask.tolist()
    kept = reference.kept(o, r, m, setting["reject"])
    expected = reference.weights(
        o,
        r,
        m,
        kept,
        level=setting["weights"],
        mode=setting["mode"],
        lower=setting["lower"],
        upper=setting["upper"],
        normalize=setting["normalize"],
    )
    assert got.mask.tolist() == kept
    assert got.weights is not None
    torch.testing.assert_close(
        got.weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10
    )


@given(batch=BATCH, setting=SETTINGS, garbage=st.sampled_from([NAN, math.inf, -math.inf, 1e30]))
@settings(max_examples=50, deadline=None)
def test_what_lies_outside_the_mask_never_matters(
    batch: Any, setting: dict[str, Any], garbage: float
) -> None:
    old, rollout, mask = tensors(batch)
    config = CorrectionConfig(**setting)
    clean = correct(old, rollout, mask, config)
    dirty = correct(old.masked_fill(~mask, garbage), rollout.masked_fill(~mask, -garbage), mask, config)
    assert torch.equal(clean.mask, dirty.mask)
    assert rows_of(clean.weights) == rows_of(dirty.weights)
    assert clean.metrics == dirty.metrics


@given(batch=BATCH, setting=SETTINGS, seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_permuted_rows_give_permuted_results(batch: Any, setting: dict[str, Any], seed: int) -> None:
    old, rollout, mask = tensors(batch)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    config = CorrectionConfig(**setting)
    straight = correct(old, rollout, mask, config)
    permuted = correct(old[order], rollout[order], mask[order], config)
    assert torch.equal(straight.mask[order], permuted.mask)
    assert straight.weights is not None
    assert permuted.weights is not None
    torch.testing.assert_close(straight.weights[order], permuted.weights, rtol=1e-12, atol=1e-12)
    assert permuted.metrics == pytest.approx(straight.metrics, rel=1e-9, abs=1e-12, nan_ok=True)


@given(batch=BATCH, setting=SETTINGS)
@settings(max_examples=50, deadline=None)
def test_equal_log_probs_weigh_1_and_reject_nothing(batch: Any, setting: dict[str, Any]) -> None:
    old, _, mask = tensors(batch)
    result = correct(old, old.clone(), mask, CorrectionConfig(**setting))
    assert torch.equal(result.mask, mask)
    assert result.weights is not None
    assert torch.equal(result.weights, mask.double())
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


def test_weights_are_detached_and_have_the_dtype_of_the_log_probs() -> None:
    old = torch.zeros(1, 2, requires_grad=True)
    result = correct(old, torch.zeros(1, 2), torch.ones(1, 2), CorrectionConfig(weights="token"))
    assert result.weights is not None
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"weights": "row"}, "weights is 'row', but it needs one of none, token, sequence, geometric"),
        ({"weights": "token", "mode": "clip"}, "mode is 'clip', but it needs one of truncate, mask"),
        (
            {"weights": "token", "upper": 0.5},
            "upper is 0.5, but it needs a number of at least 1: the ratio is 1",
        ),
        ({"weights": "token", "upper": NAN}, "upper is nan"),
        ({"weights": "token", "upper": True}, "upper is true"),
        (
            {"weights": "token", "mode": "mask", "lower": 0.0},
            "lower is 0.0, but it needs a number above 0",
        ),
        ({"weights": "token", "mode": "mask", "lower": 1.5}, "above 0 and at most 1"),
        ({"mode": "mask"}, "mode is mask, but algorithm.correction.weights=none has no weights for it"),
        ({"normalize": True}, "normalize is true, but algorithm.correction.weights=none"),
        ({"reject": {"seq_k1": 2.0}}, "there is no statistic 'seq_k1'; known: token_k1"),
        ({"reject": {"seq_max_k1": 2.0}}, "seq_max_k1 is not offered, because k1 has a sign"),
        ({"reject": {"token_k1": 1.0}}, "from 1/u to u, so it must be above 1"),
        ({"reject": {"token_k1": "0.5_2.0"}}, "'0.5_2.0'; give the smallest and the largest ratio"),
        ({"reject": {"token_k1": [2.0, 0.5]}}, "[2.0, 0.5], but the ratio is 1 where"),
        ({"reject": {"token_k1": [0.5, 2.0, 3.0]}}, "as a list, for example"),
        ({"reject": {"token_k1": True}}, "token_k1 is True"),
        ({"reject": {"token_k1": [0.0, 2.0]}}, "use a lower bound above 0"),
        ({"reject": {"seq_mean_k3": [0.0, 0.1]}}, "give its largest value alone"),
        ({"reject": {"seq_mean_k3": -0.1}}, "a finite number above 0"),
        ({"reject": {"seq_mean_k3": math.inf}}, "a finite number above 0"),
    ],
)
def test_each_bad_setting_has_its_sentence(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        CorrectionConfig(**setting)
    assert sentence in str(error.value)
    assert str(error.value).startswith("algorithm.correction.")


@pytest.mark.parametrize(
    ("old", "mask", "sentence"),
    [
        (
            torch.zeros(2, 3),
            torch.ones(2, 2),
            "one shape [B, R], got old_log_probs (2, 3), rollout_log_probs (2, 2)",
        ),
        (torch.zeros(2, 2), torch.zeros(2, 2), "a batch without a single sampled token"),
        (
            torch.tensor([[0.0, 0.0], [0.0, NAN]]),
            torch.ones(2, 2),
            "old_log_probs of sample 1, token 1 is nan: a sampled token has a finite log-prob",
        ),
    ],
)
def test_each_bad_input_has_its_sentence(old: torch.Tensor, mask: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        correct(old, torch.zeros(2, 2), mask, CorrectionConfig(weights="token"))
    assert sentence in str(error.value)
