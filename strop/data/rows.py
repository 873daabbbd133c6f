"""One row of the files through the column mapping: prompt, data source and right answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from strop.data.bad_rows import is_absent
from strop.data.chat import from_json_text, messages_in, to_messages
from strop.data.config import DataConfig
from strop.data.media import without_contents

_OTHER_ANSWER_KEYS = ("answer", "solution", "ground_truth", "target", "label")
"""Columns that well-known data sets use for the right answer; offered when the mapped one is missing."""


def missing_values(source: Mapping[str, Any], config: DataConfig) -> dict[str, str]:
    """Purpose and mapping of each mapped column that the row has no value in."""
    missing = {}
    if is_absent(source.get(config.prompt_key)):
        missing[config.prompt_key] = "the prompt; map it with data.prompt_key"
    if not row_data_source(source, config):
        missing[config.data_source_key] = (
            "selects the scorer; map it with data.data_source_key, or name one for all rows with "
            "data.default_data_source"
        )
    if config.ground_truth_key is not None and is_absent(value_inside(source, config.ground_truth_key)):
        missing[config.ground_truth_key] = (
            f"the right answer{_found_instead(source, config.ground_truth_key)}; map it with data.ground_truth_key"
            f"{_suggestion(source)}, or set that to null when the reward function needs none"
        )
    return missing


def row_data_source(source: Mapping[str, Any], config: DataConfig) -> str:
    """The row's data source, or the one for rows without; empty when there is none."""
    value = source.get(config.data_source_key)
    return config.default_data_source if is_absent(value) or value == "" else str(value)


def value_inside(source: Mapping[str, Any], key: str | None) -> Any:
    """The value of a column, or, by names with dots between, inside the object in a column; None without one.

    A column of exactly this name comes first, dots and all.
    """
    if key is not None and source.get(key) is not None:
        return source[key]
    value: Any = source
    for name in (key or "").split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def row_messages(source: Mapping[str, Any], config: DataConfig, where: str) -> tuple[dict[str, Any], ...]:
    """The prompt as chat messages, as they stand in the row; pictures in their parts are only named."""
    return without_contents(prompt_messages(source, config, where))


def prompt_messages(source: Mapping[str, Any], config: DataConfig, where: str) -> tuple[dict[str, Any], ...]:
    """The prompt as chat messages.

    Raises:
        ValueError: the column holds no prompt.
    """
    key = config.prompt_key
    value = from_json_text(
        source[key], config.json_messages, where=where, key=key, setting="data.json_messages"
    )
    return to_messages(value, role="user", where=where, key=key)


def is_text_prompt(source: Mapping[str, Any], config: DataConfig) -> bool:
    """True if the prompt is a text, which becomes one message of the user."""
    text = source[config.prompt_key]
    return isinstance(text, str) and not (config.json_messages == "read" and messages_in(text))


def row_extra_info(source: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row's free dictionary; empty when it has none."""
    extra_info = source.get("extra_info")
    if extra_info is None:
        return {}
    if not isinstance(extra_info, Mapping):
        raise ValueError(
            f"{where}: column 'extra_info' holds a {type(extra_info).__name__}; it must be an object with named "
            f"fields"
        )
    return extra_info


def unread_columns(
    source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], mapped: Collection[str]
) -> list[str]:
    """Columns in which well-known data sets have a part of the prompt, and which a mapping leaves out.

    Args:
        source: of the data.
        messages: of the row.
        mapped: columns that are read.
    """
    has_system = any(message["role"] == "system" for message in messages)
    parts = {"system": not has_system, "input": "instruction" in mapped}
    return [
        name
        for name, is_left_out in parts.items()
        if is_left_out and name not in mapped and isinstance(source.get(name), str) and source[name].strip()
    ]


def unread_warning(counts: Mapping[str, int]) -> str:
    """Warning about columns of `unread_columns`, by their numbers of rows; empty for none."""
    parts = [f"column {name!r} of {count} rows" for name, count in counts.items() if count]
    return (
        f"WARNING: {' and '.join(parts)} is not read: write it into the prompt, or remove it" if parts else ""
    )


def _found_instead(source: Mapping[str, Any], key: str) -> str:
    """Words about NaN where a key leads, or about a column that is no object for its dots; empty for neither."""
    column = key.split(".")[0]
    if value_inside(source, key) is not None:
        return ", where NaN stands"
    if column == key or is_absent(source.get(column)) or isinstance(source[column], Mapping):
        return ""
    return f", inside column {column!r}, which holds a {type(source[column]).__name__} and no object"


def _suggestion(source: Mapping[str, Any]) -> str:
    for key in _OTHER_ANSWER_KEYS:
        if not is_absent(source.get(key)):
            return f"={key}"
    return ""


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The rows as columns, of every key that any row has; None where a row lacks it.

    The constructors of `datasets` and pyarrow take the keys of the first row and drop the others.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
