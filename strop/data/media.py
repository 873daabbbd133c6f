"""Columns and message parts that hold images, videos or sound.

A row has media in the columns `data.image_key` and `data.video_key`, or right in the parts of a message
({"type": "image", ...}). media_rows.py finds and measures them, and imports torch and Pillow for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEDIA_COLUMNS = {"image": "images", "video": "videos"}
"""Kind of media -> column of a row, where nobody names another one."""

AUDIO_COLUMNS = ("audio", "audios")
_AUDIO_PARTS = frozenset({"audio", "audio_url", "input_audio"})
"""Types of parts of a message that are sound: in chat templates, and in two forms of OpenAI's interface."""


def has_media(
    source: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] = MEDIA_COLUMNS,
) -> bool:
    """True if a row has one of the columns of media, or a message with a part that is one."""
    if any(source.get(column) is not None for column in columns.values()):
        return True
    return any(part.get("type") in MEDIA_COLUMNS for message in messages for part in content_parts(message))


def refuse_audio(source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse a row with sound: no model here hears.

    Raises:
        ValueError: it has a column of sound, or a message with a part that is one.
    """
    remedy = "which no model is given here: use rows with text, images and videos"
    if columns := [name for name in AUDIO_COLUMNS if source.get(name)]:
        raise ValueError(f"{where} has sound in column {columns[0]!r}, {remedy}, or remove the column")
    for number, message in enumerate(messages, start=1):
        for part in content_parts(message):
            if part.get("type") in _AUDIO_PARTS:
                raise ValueError(f"{where} has sound in message {number} (a part {part['type']!r}), {remedy}")


def without_contents(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages as they stand in the row, but for media in their parts, which are only named."""
    plain = []
    for message in messages:
        parts = content_parts(message)
        if any(part.get("type") in MEDIA_COLUMNS for part in parts):
            placeholders = [{"type": p["type"]} if p.get("type") in MEDIA_COLUMNS else p for p in parts]
            plain.append({**message, "content": placeholders})
        else:
            plain.append(dict(message))
    return tuple(plain)


def content_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a structured content; none of a text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return []
    return [part for part in content if isinstance(part, Mapping)]
