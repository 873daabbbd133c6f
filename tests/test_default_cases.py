"""Cases of parametrized tests that run by default (tests/default_cases.py)."""

from __future__ import annotations

import pytest
from default_cases import by_default


def test_cases_that_are_not_named_are_slow() -> None:
    cases = by_default(["a", "b", pytest.param("c", 3, id="see"), pytest.param("d")], "b", "see")
    marks = {str(case if isinstance(case, str) else case.id or case.values[0]): case for case in cases}
    assert list(marks) == ["a", "b", "see", "d"]
    assert marks["b"] == "b"
    assert not marks["see"].marks
    for name in "ad":
        assert [mark.name for mark in marks[name].marks] == ["slow"]


def test_marks_that_a_case_has_stay() -> None:
    (case, _) = by_default([pytest.param("a", marks=pytest.mark.dist), "b"], "b")
    assert {mark.name for mark in case.marks} == {"dist", "slow"}


def test_a_name_that_is_no_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="no case is named c; there are a, b"):
        by_default(["a", "b"], "a", "c")
