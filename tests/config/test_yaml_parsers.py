"""YAML by libyaml's parser and by PyYAML's own: the same values, and the same errors."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.yaml_text import parse
from strop.utils import safe_read
from strop.utils.safe_read import MAX_DEPTH, parse_yaml

pytestmark = pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
PIECES = [
    "a", "b: ", "- ", "? ", "[", "]", "{", "}", ", ", "\n", "  ", "\n  ", "\n- ", "'x'", '"y"', "&a ", "*a", "!!str ",
    "1", "1.5", "1e5", "true", "null", " # c", "|\n", "\t", ": ", "a:b", "~", ">-\n", "---\n", "é", "\x07", "<<: ",
]  # fmt: skip


def read(text: str) -> str:
    try:
        return repr(parse(text, "text"))
    except ValueError as error:
        return f"refused: {error}"


def check(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        expected = read(text)
    assert read(text) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_any_text_is_what_it_is_without_libyaml(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "a: *b",
        "a: [1, 2",
        "a: b: c",
        "http://x\ty",
        "\ufeff\ufeffa",
        "!",
        "a: &a [*a]",
        "\ud800",
    ],
)
def test_what_only_one_of_them_takes(text: str) -> None:
    check(text)


def test_libyaml_makes_nodes_of_no_deep_document(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH) != []
    monkeypatch.setattr(safe_read, "_over_libyaml", None)
    for text in ("[" * 2_000, "- " * 2_000 + "a", "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)):
        with pytest.raises(yaml.YAMLError, match="nested more than 100 levels deep"):
            parse_yaml(text)
