"""Values in sentences are those that a file or a command line takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from strop.utils.setting_text import setting_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (False, "false"),
        (None, "null"),
        (1, "1"),
        (0.5, "0.5"),
        ("1f1b", "1f1b"),
        ((2, False), "[2, false]"),
        ({"a": [True], "b": "c"}, "{a: [true], b: c}"),
    ],
)
def test_a_value_is_written_as_yaml_has_it(value: Any, text: str) -> None:
    assert setting_text(value) == text
    assert yaml.safe_load(text) == (list(value) if isinstance(value, tuple) else value)


def test_text_may_have_quotes() -> None:
    assert setting_text(["", True], quotes=True) == "['', true]"
