"""Texts inside of columns, as verl's rows have them."""

from __future__ import annotations

from strop.data.rows import value_inside


def test_dots_lead_into_columns() -> None:
    row = {"extra_info": {"question": "q", "n": {"m": 1}}, "text": "t"}
    assert value_inside(row, "extra_info.question") == "q"
    assert value_inside(row, "extra_info.n.m") == 1
    assert value_inside(row, "text") == "t"
    assert value_inside(row, "text.question") is None
    assert value_inside(row, "other.question") is None


def test_a_column_of_exactly_this_name_comes_first() -> None:
    row = {"reward_model.ground_truth": "72", "reward_model": {"ground_truth": "71", "style": "rule"}}
    assert value_inside(row, "reward_model.ground_truth") == "72"
    assert value_inside(row, "reward_model.style") == "rule"
