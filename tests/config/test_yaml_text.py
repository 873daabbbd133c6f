"""YAML by libyaml: what the parser and the dumper of PyYAML in Python read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import to_dict
from strop.config.yaml_text import _Dumper, compose, dump, parse
from strop.trainer.config import Config
from strop.utils.safe_read import _events_of

ROOT = Path(__file__).parents[2]
WRITTEN = sorted([*(ROOT / "strop").rglob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])
READ_OTHERWISE = (
    "key:\tvalue", "key: value\t", "- !", "key: !\nother: 1", "?", "key: |#c\n  text", "key: >+2# c\n  text",
)  # fmt: skip
"""What libyaml reads, and PyYAML reads otherwise or not at all."""
WRITTEN_OTHERWISE = (
    {"": 1}, {"a": {"": [1]}}, {"key": "😀"}, {"key": "\ud800"}, {"\r": 1}, {"k" * 200: 1}, {"key": "\\\x00"},
    "text", 1, ["a"],
)  # fmt: skip
PARTS = st.sampled_from(
    ["a", " ", "\n", ": ", "- ", "? ", "!", "'", '"', "#", "[", "]", "{", "}", ",", "|", ">", "&a", "*a", "é"]
)


def read(text: str) -> Any:
    """The nodes with their places, and the value; of a bad text the error."""

    def parts(node: Any) -> Any:
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            inner = [(parts(key), parts(value)) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            inner = [parts(child) for child in node.value]
        return node.tag, node.start_mark.line, node.start_mark.column, inner

    try:
        node = compose(text)
        return None if node is None else parts(node), parse(text, "it")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        return error.problem, mark and (mark.line, mark.column)
    except (ValueError, yaml.YAMLError) as error:
        return str(error)


def in_python(text: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        return read(text)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_read_as_in_python(path: Path) -> None:
    text = path.read_text()
    assert read(text) == in_python(text)
    value = parse(text, "it")
    assert dump(value) == yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


@pytest.mark.parametrize("text", READ_OTHERWISE)
def test_what_libyaml_reads_otherwise_is_read_in_python(text: str) -> None:
    assert read(text) == in_python(text)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_libyaml_is_left_where_a_text_is_too_deep() -> None:
    assert _events_of("[" * 100 + "]" * 100) is not None
    assert _events_of("[" * 101 + "]" * 101) is None
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        parse("[" * 20_000, "it")


@settings(max_examples=100, deadline=None)
@given(text=st.lists(PARTS, max_size=8).map("".join))
def test_drawn_texts_are_read_as_in_python(text: str) -> None:
    assert read(text) == in_python(text)


@pytest.mark.parametrize("value", WRITTEN_OTHERWISE, ids=ascii)
def test_what_libyaml_writes_otherwise_is_written_in_python(value: object) -> None:
    assert dump(value) == yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_the_settings_of_a_run_are_read_and_written_by_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    value = to_dict(Config())
    monkeypatch.delattr(yaml.scanner.Scanner, "fetch_more_tokens")
    monkeypatch.delattr(yaml.emitter.Emitter, "analyze_scalar")
    assert parse(dump(value), "it") == value
