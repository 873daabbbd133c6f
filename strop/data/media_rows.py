"""Images and videos of rows: found in columns and messages.

A row names its media in the columns `images` and `videos`, in the order of the placeholders `<image>` and
`<video>` inside its messages, or right in the parts of a message ({"type": "image", "image": ...}). Pixels are not
read here; `row_media` reads the head of each file, whose size says how many tokens stand for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.media import MEDIA_COLUMNS, content_parts
from strop.engines.multimodal.families import load_media_processor
from strop.engines.multimodal.placeholders import RowMedia, measured_media
from strop.engines.multimodal.sources import MediaSource, source_of

_PLACEHOLDER = re.compile(r"<(image|video)>")


def take_media(
    source: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str
) -> tuple[tuple[dict[str, Any], ...], tuple[MediaSource, ...]]:
    """Messages as a chat template takes them, with parts {"type": "image"}, and the media in their order.

    Raises:
        ValueError: the numbers of placeholders and media differ, or a medium has an unknown form.
    """
    column_media = {kind: _column(source.get(name), kind, name, where) for kind, name in columns.items()}
    num_placeholders = dict.fromkeys(columns, 0)
    sources: list[MediaSource] = []
    placed = []
    for message in messages:
        parts = []
        for part in _with_placeholders(message):
            kind = part.get("type")
            if kind in MEDIA_COLUMNS:
                medium = part.get(kind, part.get("path"))
                if medium is None:
                    num_placeholders[kind] += 1
                    medium = next(column_media[kind].rest, None)
                if medium is not None:
                    # with the settings for its size or its frames
                    options = {
                        name: value for name, value in part.items() if name not in ("type", "path", kind)
                    }
                    if options:
                        medium = {**options, kind: medium}
                    sources.append(source_of(kind, medium, where))
                part = {"type": kind}
            parts.append(part)
        is_text = isinstance(message.get("content"), str) and not any(
            p["type"] in MEDIA_COLUMNS for p in parts
        )
        placed.append(dict(message) if is_text or "content" not in message else {**message, "content": parts})
    for kind, column in column_media.items():
        if num_placeholders[kind] != column.count:
            raise ValueError(
                f"{where} has {num_placeholders[kind]} placeholders <{kind}> in its messages, but "
                f"{column.count} {kind}s in column {columns[kind]!r}; they must be as many, in the same order"
            )
    return tuple(placed), tuple(sources)


def row_media(tokenizer: PreTrainedTokenizerBase, sources: Sequence[MediaSource], where: str) -> RowMedia:
    """The media of a row for the model that a tokenizer belongs to.

    Raises:
        ValueError: there is no image processor beside the tokenizer, the model takes no such media, or a file cannot
            be read.
    """
    folder = str(tokenizer.name_or_path)
    try:
        processor = load_media_processor(folder)
        if processor is None:
            raise ValueError(
                f"the model {folder!r} takes text alone: use a vision-language model with its image processor "
                f"(preprocessor_config.json), or remove the columns of media"
            )
    except ValueError as error:
        raise ValueError(f"{where} has images or videos, but {error}") from error
    return measured_media(processor, tokenizer, sources, where)


@dataclass(kw_only=True)
class _Column:
    """Media of a column that are not placed yet, and the number of all."""

    rest: Iterator[Any]
    count: int


def _column(value: object, kind: str, column: str, where: str) -> _Column:
    if value is None:
        value = []
    if not isinstance(value, list | tuple):
        raise ValueError(
            f"{where}: column {column!r} holds a {type(value).__name__}; it must be a list of {kind}s"
        )
    if any(item is None for item in value):
        raise ValueError(
            f"{where}: column {column!r} has null among its {kind}s; remove the row, or give the {kind}"
        )
    return _Column(rest=iter(value), count=len(value))


def _with_placeholders(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A message's content as parts, placeholders inside of texts being parts of their own."""
    content = message.get("content")
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content_parts(message)
    parts: list[Mapping[str, Any]] = []
    for part in texts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            parts.append(part)
            continue
        for number, piece in enumerate(_PLACEHOLDER.split(part["text"])):
            if number % 2:
                parts.append({"type": piece})
            elif piece or part["text"] == "":
                parts.append({**part, "text": piece})
    return parts
