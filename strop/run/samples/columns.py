"""The columns of the sample store, and their types in every file."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: dict[str, str] = {
    "id": "string",
    "uid": "string",
    "sample_index": "int32",
    "step": "int32",
    "data_source": "string",
    "prompt": "string",
    "response": "string",
    "ground_truth": "json",
    "prompt_ids": "list<int32>",
    "response_ids": "list<int32>",
    "response_mask": "list<bool>",
    "rollout_log_probs": "list<float32>",
    "versions": "list<int32>",
    "old_log_probs": "list<float32>",
    "entropys": "list<float32>",
    "advantages": "list<float32>",
    "score": "double",
    "outcome": "string",
    "error": "string",
    "reward_parts": "json",
    "advantage": "double",
    "fate": "string",
    "fate_reason": "string",
    "stop_reason": "string",
    "num_turns": "int32",
    "timings": "json",
    "agent_name": "string",
    "messages": "json",
    "agent_facts": "json",
    "earlier_sequences": "json",
    "turn_rewards": "json",
    "stands_alone": "json",
    "anchor": "string",
    "dataset_row": "string",
    "row_prompt_ids": "list<int32>",
}
"""Type per column. "json" is any plain value, kept as JSON text; None is allowed where a row has no value."""

REQUIRED = ("id", "uid", "sample_index")
"""Columns that every row must bring; `step` comes from the call."""

MAPPINGS = ("reward_parts", "agent_facts", "timings")
JSON_COLUMNS = tuple(name for name, kind in COLUMNS.items() if kind == "json")
GROUP_ROWS = 64
"""Rows of a row group as it is written, and of a batch as it is read: 4 million tokens each are within MAX_VALUES."""


def schema_of(names: Collection[str] = tuple(COLUMNS)) -> pa.Schema:
    """The types in which these columns are stored."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "json": pa.string(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "list<int32>": pa.list_(pa.int32()),
        "list<bool>": pa.list_(pa.bool_()),
        "list<float32>": pa.list_(pa.float32()),
    }
    return pa.schema([pa.field(name, types[kind]) for name, kind in COLUMNS.items() if name in names])


def is_message(message: object) -> bool:
    """True for a message in the form that reports and viewers read."""
    if not isinstance(message, dict):
        return False
    calls, images = message.get("tool_calls") or [], message.get("images") or []
    return (
        isinstance(message.get("role"), str)
        and type(message.get("sequence", 0)) is int
        and message.get("sequence", 0) >= 0
        and ("tokens" not in message or _are_two_numbers(message["tokens"]))
        and isinstance(calls, list)
        and all(isinstance(call, dict) for call in calls)
        and isinstance(images, list)
        and all(map(_is_image, images))
    )


def _is_image(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return _are_two_numbers(value.get("size")) and _are_two_numbers(value.get("tokens"))


def _are_two_numbers(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int and number >= 0 for number in value)
    )
