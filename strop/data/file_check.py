"""Report on data files before a run: every problem at once, lengths, repeats, sources.

Unlike a run, which stops at the first bad row, this goes through all rows and counts.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import (
    Chat,
    check_last,
    encode_all,
    require_chat_template,
    shown_text,
    to_chat,
)
from strop.data.config import DataConfig
from strop.data.prompts import truncate
from strop.data.rendering import prompt_part, render_parts
from strop.data.rows import missing_values, prompt_messages, row_data_source, row_extra_info, row_messages
from strop.data.template_omissions import check_calls_shown
from strop.utils.embedding_rows import check_tokens_known

_MAX_BINS = 10
_BATCH = 512
"""Prompts per call of the tokenizer."""
_NUM_NAMED = 5
"""Rows or pairs of rows that are named in a list of many."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column that the mapping names."""

    name: str
    num_missing: int
    """Rows without a value in it."""
    first_missing: int | None
    """The first of those."""
    remedy: str
    """Purpose and mapping of the column; empty when no row lacks it."""


@dataclass(frozen=True, kw_only=True)
class ShownPrompt:
    """A prompt exactly as the model sees it."""

    row: int
    why: str
    """Reason for showing it: first, median length, longest."""
    num_tokens: int
    text: str
    """Decoded from the token ids, special tokens included; an image is `<image 448x448: 256 tokens>`."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Prompts of `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Result of `examine`."""

    num_rows: int
    columns: tuple[Column, ...]
    num_malformed: int
    """Rows that cannot be turned into a prompt although nothing is missing."""
    malformed: tuple[str, ...]
    """A sentence about each of the first of those."""
    notes: tuple[str, ...]
    """Further sentences about rows, the first of them."""
    lengths: Mapping[int, int]
    """Tokens of each prompt by row, before any limit."""
    limit: int
    """data.max_prompt_tokens."""
    sources: Mapping[str, int]
    """Rows by data source; rows without one are not counted."""
    repeats: Mapping[int, int]
    """Rows with the prompt of an earlier one, and which."""
    shown: tuple[ShownPrompt, ...]

    @property
    def num_over(self) -> int:
        """Prompts over the limit."""
        return sum(length > self.limit for length in self.lengths.values())

    def problems(self, config: DataConfig) -> list[str]:
        """Reasons for which a run would refuse these rows, one sentence each; empty when it would not."""
        sentences = [
            f"{column.num_missing} of {self.num_rows} rows have no value for {column.name!r}, the first is row "
            f"{column.first_missing} ({column.remedy})"
            for column in self.columns
            if column.num_missing
        ]
        if self.num_malformed:
            more = f"; and {self.num_malformed - 1} more rows" if self.num_malformed > 1 else ""
            sentences.append(f"{self.malformed[0]}{more}")
        is_dropped = config.filter_overlong_prompts
        if self.num_over and not is_dropped and config.truncation == "error":
            sentences.append(
                f"{self.num_over} of {len(self.lengths)} prompts are longer than data.max_prompt_tokens="
                f"{self.limit}; raise it to {max(self.lengths.values())}, drop them "
                f"(data.filter_overlong_prompts=true) or cut them (data.truncation)"
            )
        if is_dropped and self.lengths and self.num_over == len(self.lengths):
            sentences.append(
                f"every prompt is longer than data.max_prompt_tokens={self.limit}; raise it to at least "
                f"{min(self.lengths.values())}"
            )
        return sentences


def examine(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> DataReport:
    """Go through all rows of one split.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    missing: dict[str, list[int]] = {name: [] for name in _mapped_columns(config)}
    remedies: dict[str, str] = {}
    prompts = _Prompts(tokenizer)
    sources: Counter[str] = Counter()
    for row, source in enumerate(rows):
        for name, remedy in missing_values(source, config).items():
            missing[name].append(row)
            remedies.setdefault(name, remedy)
        name = row_data_source(source, config)
        sources.update([name] if name else [])
        if source.get(config.prompt_key) is not None:
            prompts.add(row, source, config)
    prompts.encode()
    encoded, malformed = prompts.encoded, [prompts.malformed[row] for row in sorted(prompts.malformed)]
    columns = tuple(
        Column(
            name=name,
            num_missing=len(absent),
            first_missing=absent[0] if absent else None,
            remedy=remedies.get(name, ""),
        )
        for name, absent in missing.items()
    )
    return DataReport(
        num_rows=len(rows),
        columns=columns,
        num_malformed=len(malformed),
        malformed=tuple(malformed[:_NUM_NAMED]),
        notes=tuple(
            f"row {row}: {note}" for row, media in sorted(prompts.media.items()) for note in media.notes
        )[:_NUM_NAMED],
        lengths={row: len(ids) for row, ids in encoded.items()},
        limit=config.max_prompt_tokens,
        sources=dict(sorted(sources.items())),
        repeats=_repeats(rows, config),
        shown=_shown_prompts(encoded, tokenizer, config, prompts.media),
    )


class _Prompts:
    """Token ids of the rows that can be prompts, encoded in batches, which fast tokenizers spread over threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pending: list[tuple[int, Chat]] = []
        self.encoded: dict[int, list[int]] = {}
        self.media: dict[int, Any] = {}
        self.malformed: dict[int, str] = {}
        """Reason why a row cannot be a prompt."""

    def add(self, row: int, source: Mapping[str, Any], config: DataConfig) -> None:
        """Add the next row."""
        try:
            chat = _chat(source, config, f"row {row}")
            if chat.media:
                from strop.data.media_rows import row_media  # torch and Pillow: seconds

                self.media[row] = row_media(self._tokenizer, chat.media, chat.where)
                self.media[row].read()
            self._pending.append((row, chat))
        except ValueError as error:
            self.malformed[row] = str(error)
        if len(self._pending) == _BATCH:
            self.encode()

    def encode(self) -> None:
        """Encode the pending prompts."""
        texts: dict[int, str] = {}
        rendered = render_parts(self._tokenizer, [prompt_part(chat) for _, chat in self._pending])
        for (row, chat), text in zip(self._pending, rendered, strict=True):
            try:
                if isinstance(text, ValueError):
                    raise text
                check_calls_shown(chat, text)
                texts[row] = text
            except ValueError as error:
                self.malformed[row] = str(error)
        for row, ids in zip(texts, encode_all(self._tokenizer, [*texts.values()]), strict=True):
            try:
                self._keep(row, ids)
            except ValueError as error:
                self.malformed[row] = str(error)
        self._pending = []

    def _keep(self, row: int, ids: list[int]) -> None:
        if not ids:
            raise ValueError(f"row {row} has a prompt of no tokens; check its messages and the template")
        check_tokens_known(self._tokenizer, ids, f"row {row}")
        self.encoded[row] = self.media[row].expand(ids).tolist() if row in self.media else ids


def _chat(source: Mapping[str, Any], config: DataConfig, where: str) -> Chat:
    """Conversation of a row, as training sees it.

    Raises:
        ValueError: it is malformed.
    """
    row_extra_info(source, where)
    messages = prompt_messages(source, config, where)
    check_last(messages, where, may_continue=config.continue_final_message)
    options, columns = config.chat_template_kwargs, config.media_columns
    return to_chat(source, messages, options=options, where=where, media_columns=columns)


def overlap(
    rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], config: DataConfig
) -> dict[int, int]:
    """Rows of `others` whose prompt is among `rows`, with the row there: by default val row -> train row."""
    first = {identity: row for row, identity in reversed(list(_identities(rows, config).items()))}
    return {
        row: first[identity] for row, identity in _identities(others, config).items() if identity in first
    }


def histogram(lengths: Sequence[int]) -> list[Bin]:
    """Histogram with at most ten bins of one round width (1, 2 or 5 times a power of ten)."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    widths = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < _MAX_BINS)
    counts = Counter(length // width for length in lengths)
    return [
        Bin(low=number * width, high=(number + 1) * width - 1, count=counts[number])
        for number in range(low // width, high // width + 1)
    ]


def _mapped_columns(config: DataConfig) -> list[str]:
    names = [config.prompt_key, config.data_source_key, config.ground_truth_key]
    return [name for name in names if name is not None]


def _repeats(rows: Sequence[Mapping[str, Any]], config: DataConfig) -> dict[int, int]:
    first: dict[str, int] = {}
    repeats = {}
    for row, identity in _identities(rows, config).items():
        if first.setdefault(identity, row) != row:
            repeats[row] = first[identity]
    return repeats


def _identities(rows: Sequence[Mapping[str, Any]], config: DataConfig) -> dict[int, str]:
    """Identity of each prompt for comparisons: roles and contents, with runs of white space as one space."""
    identities = {}
    for row, source in enumerate(rows):
        if source.get(config.prompt_key) is None:
            continue
        try:
            messages = row_messages(source, config, "")
            media = [medium.identity for medium in _chat(source, config, "").media]
        except ValueError:  # reported with the malformed rows
            continue
        plain = [
            (message["role"], " ".join(content.split()) if isinstance(content, str) else content)
            for message in messages
            for content in [message.get("content")]
        ]
        identities[row] = json.dumps([plain, media], default=repr)
    return identities


def _shown_prompts(
    encoded: Mapping[int, list[int]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    media: Mapping[int, Any],
) -> tuple[ShownPrompt, ...]:
    """The first prompt, one of median length and the longest, of those that a run would use."""
    limit, is_cut = config.max_prompt_tokens, config.truncation != "error"
    used = {row: ids for row, ids in encoded.items() if len(ids) <= limit or is_cut} or encoded
    if not used:
        return ()
    by_length = sorted(used, key=lambda row: (len(used[row]), row))
    chosen = {next(iter(used)): "first"}
    chosen.setdefault(by_length[(len(by_length) - 1) // 2], "median length")
    chosen.setdefault(by_length[-1], "longest")
    for row in used:  # three different ones where there are three
        if len(chosen) < 3:
            chosen.setdefault(row, "another")
    prompts = []
    for row, label in chosen.items():
        ids, row_media = used[row], media.get(row)
        if config.truncation != "error" and len(ids) > limit:
            try:
                ids = truncate(
                    ids, limit, config.truncation, () if row_media is None else row_media.spans(ids)
                )
            except ValueError as error:
                prompts.append(
                    ShownPrompt(row=row, why=label, num_tokens=len(ids), text=f"(refused: {error})")
                )
                continue
            label = f"{label}, cut ({config.truncation}) from {len(used[row])} tokens"
        text = shown_text(tokenizer, ids, () if row_media is None else row_media.media(ids))
        prompts.append(ShownPrompt(row=row, why=label, num_tokens=len(ids), text=text))
    return tuple(prompts)
