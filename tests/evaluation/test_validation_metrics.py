from __future__ import annotations

import math

import pytest

from strop.trainer.validation_metrics import powers_up_to, validation_metrics


def test_all_names_of_one_source_by_hand() -> None:
    # Prompt a: 1, 0 with answers x, y. Prompt b: 1, 1 with answer x. N = 2.
    metrics = validation_metrics(
        data_sources=["gsm8k"] * 4,
        uids=["a", "b", "a", "b"],
        variables={"reward": [1.0, 1.0, 0.0, 1.0], "pred": ["x", "x", "y", "x"]},
    )
    std_of_pair = 0.75**0.5 * 0.25**0.5  # a best (worst) of two draws that is 1 in 3/4 (1/4) of the cases
    expected = {
        "val-core/gsm8k/reward/mean@2": (0.5 + 1) / 2,
        "val-aux/gsm8k/reward/std@2": 0.5 / 2,
        "val-core/gsm8k/reward/best@2/mean": (0.75 + 1) / 2,
        "val-core/gsm8k/reward/best@2/std": std_of_pair / 2,
        "val-aux/gsm8k/reward/worst@2/mean": (0.25 + 1) / 2,
        "val-aux/gsm8k/reward/worst@2/std": std_of_pair / 2,
        # A tie goes to the answer drawn first, so either wins half of the time.
        "val-core/gsm8k/reward/maj@2/mean": (0.5 + 1) / 2,
        "val-core/gsm8k/reward/maj@2/std": 0.5 / 2,
        "val-aux/gsm8k/reward/pass@2/mean": 1.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_acc_is_the_core_variable_where_it_exists_and_sources_stay_apart() -> None:
    metrics = validation_metrics(
        data_sources=["a", "b", "b"],
        uids=["1", "2", "3"],
        variables={"reward": [0.25, 0.5, 1.0], "acc": [True, None, None]},
        num_turns=[2, 4, 6],
    )
    assert metrics == {
        "val-aux/a/reward/mean@1": 0.25,
        "val-core/a/acc/mean@1": 1.0,
        "val-core/b/reward/mean@1": 0.75,
        "val-aux/num_turns/min": 2.0,
        "val-aux/num_turns/max": 6.0,
        "val-aux/num_turns/mean": 4.0,
    }


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_source_without_predictions_has_no_vote(nothing: str | None) -> None:
    """Scorers of other sources extract answers; here every answer would be the same one, and its vote a mean."""
    metrics = validation_metrics(
        data_sources=["a"] * 2 + ["b"] * 2,
        uids=["1", "1", "2", "2"],
        variables={"acc": [1.0, 0.0, 1.0, 0.0], "pred": ["x", "y", nothing, nothing]},
    )
    assert "val-core/a/acc/maj@2/mean" in metrics
    assert not [name for name in metrics if "/b/" in name and "maj@" in name]


def test_only_the_largest_k_is_core() -> None:
    # The text "@1" is also in "@16": the number decides, not the letters.
    metrics = validation_metrics(
        data_sources=["s"] * 16, uids=["p"] * 16, variables={"reward": [float(i) for i in range(16)]}
    )
    core = {name for name in metrics if name.startswith("val-core/")}
    assert core == {
        "val-core/s/reward/mean@16",
        "val-core/s/reward/best@16/mean",
        "val-core/s/reward/best@16/std",
    }
    assert {f"val-aux/s/reward/best@{k}/mean" for k in (2, 4, 8)} <= metrics.keys()
    assert not any("pass@" in name for name in metrics)


def test_samples_without_a_value_are_left_out_and_never_zero() -> None:
    metrics = validation_metrics(
        data_sources=["s"] * 5,
        uids=["p", "p", "p", "q", "q"],
        variables={"reward": [1.0, None, math.nan, None, None]},
    )
    assert metrics["val-core/s/reward/mean@3"] == 1.0
    assert metrics["val-core/s/reward/best@3/mean"] == 1.0


def test_an_answer_that_could_not_be_scored_does_not_pass_and_its_prompt_counts_in_pass_at_k() -> None:
    # p: passes, unscored; q: both unscored; r: both pass. One of two passes for p and r.
    metrics = validation_metrics(
        data_sources=["s"] * 6,
        uids=["p", "p", "q", "q", "r", "r"],
        variables={"acc": [True, None, None, None, True, True], "form": [1, None, None, None, 0, 0]},
    )
    assert metrics["val-aux/s/acc/pass@2/mean"] == pytest.approx(2 / 3)
    assert metrics["val-core/s/acc/mean@2"] == 1.0
    assert metrics["val-aux/s/form/pass@2/mean"] == 0.0, "another part need not apply to a sample"


def test_text_is_not_averaged() -> None:
    metrics = validation_metrics(data_sources=["s"], uids=["p"], variables={"pred": ["7"], "note": [None]})
    assert metrics == {}


def test_k_runs_over_powers_of_two_and_the_number_of_samples() -> None:
    assert [powers_up_to(n) for n in (1, 2, 3, 6, 8)] == [[], [2], [2, 3], [2, 4, 6], [2, 4, 8]]


def test_a_short_column_is_named() -> None:
    with pytest.raises(ValueError, match="validation column 'reward' has 1 rows, but there are 2 uids"):
        validation_metrics(data_sources=["s", "s"], uids=["p", "q"], variables={"reward": [1.0]})
