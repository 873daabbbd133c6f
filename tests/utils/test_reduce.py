from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.utils.metrics import Max, Mean, Min, Reduction, merge_metrics, metric_values


def test_each_rule_by_hand() -> None:
    parts: list[dict[str, Reduction]] = [
        {"a": Mean(6.0, 2), "c": Max(3.0), "d": Min(3.0)},
        {"a": Mean(1.0, 5), "c": Max(-1.0), "d": Min(-1.0), "e": Mean(4.0, 1)},
    ]
    assert metric_values(merge_metrics(parts)) == {"a": 1.0, "c": 3.0, "d": -1.0, "e": 4.0}


def test_the_key_never_decides_the_rule() -> None:
    # Guessing by letters would reduce "format_min_len" by min and "climax" by max.
    parts = [{"format_min_len": Mean(value, 1), "climax": Mean(value, 1)} for value in (1.0, 3.0)]
    assert metric_values(merge_metrics(parts)) == {"format_min_len": 2.0, "climax": 2.0}


@given(values=st.lists(st.integers(-50, 50), min_size=1, max_size=12), data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_cut_gives_the_same_numbers(values: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    parts = [part for part in (values[:cut], values[cut:]) if part]
    merged = metric_values(
        merge_metrics({"mean": Mean(sum(p), len(p)), "max": Max(max(p)), "min": Min(min(p))} for p in parts)
    )
    expected = {"mean": sum(values) / len(values), "max": max(values), "min": min(values)}
    assert merged == expected


def test_a_mean_over_nothing_is_left_out() -> None:
    assert math.isnan(Mean(0.0, 0).value)
    assert metric_values({"a": Mean(0.0, 0), "b": Max(0.0)}) == {"b": 0.0}


@pytest.mark.parametrize("order", [1, -1])
def test_nan_is_never_hidden_by_an_extreme(order: int) -> None:
    for rule in (Max, Min):
        merged = merge_metrics([{"a": rule(value)} for value in (1.0, math.nan)[::order]])
        assert math.isnan(merged["a"].value)


def test_two_rules_under_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' is reported as Min by one part and as Max by another"):
        merge_metrics([{"a": Min(1.0)}, {"a": Max(1.0)}])


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean over -1 items"):
        Mean(0.0, -1)
