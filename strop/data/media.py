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

_UNREAD_PARTS = frozenset({"image_url", "video_url", "input_image"})
"""Types of parts with media that templates of some models take, and whose media would be lost."""


def has_media(
    source: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] = MEDIA_COLUMNS,
) -> bool:
    """True if a row has one of the columns of media, an empty one beside a placeholder of its kind too, or a message
    with a part that is one."""
    if any(source.get(column) is not None for column in columns.values()):
        return True
    if any(column in source and _has_placeholder(messages, kind) for kind, column in columns.items()):
        return True
    return any(part.get("type") in MEDIA_COLUMNS for message in messages for part in content_parts(message))


def _has_placeholder(messages: Sequence[Mapping[str, Any]], kind: str) -> bool:
    for message in messages:
        content = message.get("content")
        texts = (
            [content] if isinstance(content, str) else [part.get("text") for part in content_parts(message)]
        )
        if any(f"<{kind}>" in text for text in texts if isinstance(text, str)):
            return True
    return False


def refuse_unread(
    source: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    where: str,
    columns: Mapping[str, str] = MEDIA_COLUMNS,
) -> None:
    """Refuse a row with sound, since no model here hears, or with media in a form that is not read.

    Raises:
        ValueError: it has a column of sound, or a message with a part that is sound or such a medium; or a
            placeholder, and its media in a column `image` or `video`.
    """
    remedy = "which no model is given here: use rows with text, images and videos"
    if sounds := [name for name in AUDIO_COLUMNS if source.get(name)]:
        raise ValueError(f"{where} has sound in column {sounds[0]!r}, {remedy}, or remove the column")
    for number, message in enumerate(messages, start=1):
        for part in content_parts(message):
            if part.get("type") in _AUDIO_PARTS:
                raise ValueError(f"{where} has sound in message {number} (a part {part['type']!r}), {remedy}")
            if unread := _unread(part):
                raise ValueError(
                    f"{where} has a medium in message {number} in a form that is not read ({unread}): write "
                    f'{{"type": "image", "image": ...}} with a path or the contents of the file'
                )
    if any(column in source for column in columns.values()):
        return
    for kind, column in columns.items():
        if source.get(kind) is not None and _has_placeholder(messages, kind):
            raise ValueError(
                f"{where} has a placeholder in its messages and a column {kind!r}, which is not read: rename it to "
                f"{column!r}, with a list in each row"
            )


def _unread(part: Mapping[str, Any]) -> str:
    """The words of a part that hold a medium in a form that is not read; empty for any other."""
    kind = part.get("type")
    if kind in _UNREAD_PARTS:
        return f"type {kind!r}"
    held = next((key for key in (*MEDIA_COLUMNS, *_UNREAD_PARTS) if part.get(key) is not None), None)
    return f"{held!r} without a type" if kind is None and held else ""


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
