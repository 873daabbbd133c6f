"""Nulls in tool calls and tool schemas: kept where somebody wrote them, left out where a table filled them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from strop.data.chat import to_chat, to_messages
from strop.data.readers import read_rows
from strop.data.streaming.stored import open_rows

SEARCH = {"query": "x", "after": None}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"after": {"type": ["string", "null"], "default": None}},
        },
    },
}


def row_of(arguments: Any, tools: Any) -> dict[str, Any]:
    call = {"id": None, "function": {"name": "search", "arguments": arguments}}
    return {
        "prompt": [
            {"role": "user", "content": "x", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": tools,
        "extra_info": {"hint": None},
    }


def shown(row: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments and schemas as the chat template gets them."""
    chat = to_chat(
        row, to_messages(row["prompt"], role="user", where="row", key="prompt"), options={}, where="row"
    )
    assert chat.messages[0] == {"role": "user", "content": "x"}
    (call,) = chat.messages[1]["tool_calls"]
    assert "id" not in call
    return call["function"]["arguments"], chat.tools


@pytest.mark.parametrize("arguments", [SEARCH, json.dumps(SEARCH)])
@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA])])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_nulls_that_were_written_are_kept(tmp_path: Path, arguments: Any, tools: Any, suffix: str) -> None:
    row = row_of(arguments, tools)
    file = tmp_path / f"rows.{suffix}"
    file.write_text(json.dumps(row if suffix == "jsonl" else [row]) + "\n")
    (read,) = read_rows([file])
    assert shown(read) == (SEARCH, [SCHEMA])
    if suffix == "jsonl":
        assert shown(open_rows([file], tmp_path / "cache")[0]) == (SEARCH, [SCHEMA])


def test_nulls_that_a_table_fills_in_are_left_out(tmp_path: Path) -> None:
    other = {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"n": {"default": 3}}}},
    }
    rows = [row_of({"query": "x"}, [SCHEMA]), row_of({"n": 1}, [other])]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for first, second in (read_rows([file]), open_rows([file], tmp_path / "cache")):
        assert shown(first)[0] == {"query": "x"}
        assert shown(second) == ({"n": 1}, [other])
        assert first["extra_info"] == {"hint": None}, "other columns are the user's"


def test_json_text_in_a_table_keeps_its_nulls(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    row = row_of(json.dumps(SEARCH), json.dumps([SCHEMA]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    (read,) = read_rows([file])
    assert shown(read) == (SEARCH, [SCHEMA])
