"""Prompts from rows: column mapping, chat template, length limit."""

from __future__ import annotations

import hashlib
import itertools
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from strop.data.bad_rows import BadRows, null_in
from strop.data.cache.prompts import load_or_encode
from strop.data.chat import (
    Chat,
    check_last,
    encode_all,
    require_chat_template,
    to_chat,
)
from strop.data.config import DataConfig
from strop.data.media import AUDIO_COLUMNS, MEDIA_COLUMNS
from strop.data.rendering import prompt_part, render_parts
from strop.data.rows import (
    is_text_prompt,
    missing_values,
    prompt_messages,
    row_data_source,
    row_extra_info,
    row_messages,
    unread_columns,
    unread_warning,
    value_inside,
)
from strop.data.template_omissions import check_calls_shown
from strop.protocol.trajectory import Prompt
from strop.utils.embedding_rows import check_tokens_known

Side = Literal["left", "right", "middle"]
_TOKENIZER_BATCH = 512
"""Texts per call of the tokenizer: enough to amortise the call, few enough to stay small in memory."""
_PLACES = {"left": "on the left", "right": "on the right", "middle": "in the middle"}


class PromptDataset:
    """The prompts of one split, as token ids, without those that are too long.

    A prompt is named by its row number in the files, before the filter, so that a name stays valid when the
    filter changes.

    Args:
        rows: from `read_rows`.
        tokenizer: with a chat template.
        config: column names and limits.
        split: `train` keeps at most max_train_prompts, `val` at most max_val_prompts; also the word for the
            rows in messages.
        first_row: number of the first of these rows in the files, for messages.

    Raises:
        ValueError: a column is missing, a row is malformed, the tokenizer has no chat template, a prompt is
            too long and neither dropped nor cut, or no prompt is left.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        split: Literal["train", "val"],
        *,
        first_row: int = 0,
    ) -> None:
        require_chat_template(tokenizer)
        if not rows:
            raise ValueError(f"{split} data has no rows; check data.{split}_files")
        self.split = split
        self._source_rows = rows
        self._first_row = first_row
        self._config = config
        self._max_prompts = config.max_train_prompts if split == "train" else config.max_val_prompts
        self._check_media_columns()
        self._tokenizer = tokenizer
        self._media: dict[int, Any] = {}
        self._unread: Counter[str] = Counter()
        """Rows with a part of the prompt in a column that is not read, by the column."""
        encoded = load_or_encode(self._encode, tokenizer, self._chats, len(rows), config.cache_dir)
        for row, media in self._media.items():
            encoded[row] = media.expand(encoded[row])
        for row, ids in enumerate(encoded):
            if not ids:
                raise ValueError(
                    f"{self._where(row)} has a prompt of no tokens; check its messages and the chat template"
                )
        self._num_cut = 0
        self._ids = self._limit(encoded)
        self._num_before_filter = len(encoded)

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """Rows that are kept, in the order of the files; `prompt` accepts them and a sampler visits them."""
        return tuple(self._ids)

    @property
    def data_sources(self) -> dict[int, str]:
        """Data source of each row that is kept; an argument of `mixture.visits_per_epoch`."""
        return {row: row_data_source(self._source_rows[row], self._config) for row in self._ids}

    @property
    def num_rows(self) -> int:
        """All rows, those that were dropped too."""
        return len(self._source_rows)

    def num_tokens(self, row: int) -> int:
        """Tokens of the prompt of a row that is kept."""
        return len(self._ids[row])

    def token_ids(self, row: int) -> array[int]:
        """The prompt of a row that is kept."""
        return self._ids[row]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def has_media(self) -> bool:
        """A row has images or videos."""
        return any(row in self._ids for row in self._media)

    @property
    def video_digest(self) -> str:
        """Digest of all videos in files; empty where there are none."""
        files = [file for row in self._ids if row in self._media for file in self._media[row].films]
        return hashlib.blake2b(" ".join(files).encode(), digest_size=16).hexdigest() if files else ""

    def read_media(self) -> None:
        """Decode what may fail later: every video of the rows that are kept, up to the last frame that is taken.

        Raises:
            ValueError: one cannot be decoded; the sentence names its row.
        """
        for row in self._ids:
            if row in self._media:
                self._media[row].read()

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`.

        Raises:
            KeyError: the row does not exist or was dropped.
        """
        if row not in self._ids:
            raise KeyError(f"row {row} is not among the {len(self)} rows of the {self.split} prompts")
        config, source = self._config, self._source_rows[row]
        mapped = {config.prompt_key, config.data_source_key, "extra_info", "agent_name", *AUDIO_COLUMNS}
        mapped |= set(config.media_columns.values())
        if config.ground_truth_key is not None and "." in config.ground_truth_key:
            mapped.add(
                config.ground_truth_key.split(".")[0]
            )  # a plain column stays: TRL rewards take it by name
        columns = {key: value for key, value in source.items() if key not in mapped}
        if is_text_prompt(source, config):  # TRL rewards take prompts and answers as texts then
            columns["prompt"] = source[config.prompt_key]
        return Prompt(
            uid=uid,
            row=row,
            token_ids=tuple(self._ids[row]),
            messages=row_messages(source, config, self._where(row)),
            data_source=row_data_source(source, config),
            ground_truth=value_inside(source, config.ground_truth_key),
            extra_info=row_extra_info(source, self._where(row)),
            agent_name=source.get("agent_name") or "single_turn_agent",
            columns=columns,
            media=self._media[row].media(self._ids[row]) if row in self._media else (),
        )

    def skip_reason(self, prompt: Prompt) -> str:
        """Empty: prompts that are too long are not among these."""
        return ""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for ids in self._ids.values())

    def report(self) -> str:
        """One line: how many prompts, how long, how many dropped or cut."""
        lengths = [len(ids) for ids in self._ids.values()]
        line = (
            f"{self.split}: {len(self)} prompts of {min(lengths)} to {max(lengths)} tokens (median "
            f"{statistics.median_low(lengths)}){self.left_out()}"
        )
        warning = unread_warning(self._unread)
        return f"{line}; {warning}" if warning else line

    def left_out(self) -> str:
        """End of a line about the prompts: how many were dropped, cut, or left out; empty where none were."""
        text = ""
        for count, form in (
            (self._num_filtered, "dropped {} longer than"),
            (self._num_cut, f"cut {{}} {_PLACES.get(self._config.truncation)} to"),
        ):
            if count:
                share = f"{count} ({100 * count / self._num_before_filter:.1f} %)"
                text += f"; {form.format(share)} data.max_prompt_tokens={self._config.max_prompt_tokens}"
        num_left_out = self._num_before_filter - self._num_filtered - len(self)
        if num_left_out:
            text += f"; {num_left_out} left out by data.max_{self.split}_prompts={self._max_prompts}"
        return text

    def _where(self, row: int) -> str:
        return f"{self.split} row {self._first_row + row}"

    def _check_media_columns(self) -> None:
        """Refuse a column of media that is named on purpose, where no row has it."""
        for kind, column in self._config.media_columns.items():
            if column != MEDIA_COLUMNS[kind] and all(row.get(column) is None for row in self._source_rows):
                raise ValueError(
                    f"data.{kind}_key is {column!r}, but no {self.split} row has such a column; columns found: "
                    f"{', '.join(self._source_rows[0])}"
                )

    def _chats(self) -> Iterator[Chat]:
        """The conversation of each row; all columns that the mapping names and a row lacks are one error."""
        self._bad = BadRows(self.split, len(self._source_rows), files=f"data.{self.split}_files")
        self._unread.clear()
        for row, source in enumerate(self._source_rows):
            chat = None
            with self._bad.reading(self._where(row)):
                chat = self._chat(row, source)
            if chat is not None:
                yield chat

    def _encode(self, tokenizer: PreTrainedTokenizerBase, chats: Iterable[Chat]) -> list[array[int]]:
        """Token ids of the conversations of `_chats`; ValueError about all rows that cannot be read or rendered."""
        encoded = encode_prompts(tokenizer, chats, reading=lambda chat: self._bad.reading(chat.where))
        self._bad.check()
        return encoded

    def _chat(self, row: int, source: Mapping[str, Any]) -> Chat:
        """The conversation of a row."""
        config, where = self._config, self._where(row)
        missing = missing_values(source, config)
        if empty := null_in(source, list(missing)):
            raise ValueError(f"{where} has {empty}: give a value, or remove the row")
        if missing:
            listed = "; none for ".join(f"{name!r} ({purpose})" for name, purpose in missing.items())
            raise ValueError(f"{where} has no value for {listed}; columns found: {', '.join(source)}")
        row_extra_info(source, where)
        messages = prompt_messages(source, config, where)
        check_last(messages, where, may_continue=config.continue_final_message)
        self._unread.update(
            unread_columns(source, messages, (config.prompt_key, config.ground_truth_key or ""))
        )
        options, columns = config.chat_template_kwargs, config.media_columns
        chat = to_chat(source, messages, options=options, where=where, media_columns=columns)
        if chat.media and row not in self._media:
            from strop.data.media_rows import row_media  # torch and Pillow: seconds

            self._media[row] = row_media(self._tokenizer, chat.media, where)
        return chat

    def _limit(self, encoded: Sequence[array[int]]) -> dict[int, array[int]]:
        """The prompts that are kept, by row, each within the limit."""
        limit = self._config.max_prompt_tokens
        is_filtered = self._config.filter_overlong_prompts
        over = [row for row, ids in enumerate(encoded) if len(ids) > limit]
        if over and not is_filtered and self._config.truncation == "error":
            longest = max(map(len, encoded))
            raise ValueError(
                f"{self._where(over[0])} has a prompt of {len(encoded[over[0]])} tokens, over "
                f"data.max_prompt_tokens={limit}: raise that to {longest} to keep all rows, or set "
                f"data.filter_overlong_prompts=true to drop the {len(over)} that are longer, or "
                f"data.truncation to left, right or middle to cut them"
            )
        self._num_filtered = len(over) if is_filtered else 0
        if self._num_filtered == len(encoded):
            shortest = min(map(len, encoded))
            raise ValueError(
                f"no {self.split} prompt is left: all {len(encoded)} are longer than data.max_prompt_tokens="
                f"{limit}; the shortest has {shortest} tokens, so raise it to at least {shortest}"
            )
        dropped = set(over) if is_filtered else set()
        rows = [row for row in range(len(encoded)) if row not in dropped]
        if self._max_prompts is not None:
            rows = list(subsample(rows, self._max_prompts))
        limited = {row: encoded[row] for row in rows}
        if self._config.truncation != "error":
            for row in rows:
                if len(encoded[row]) > limit:
                    limited[row] = array("i", self._truncate(row, encoded[row]))
                    self._num_cut += 1
        return limited

    def _truncate(self, row: int, token_ids: array[int]) -> list[int]:
        """At most max_prompt_tokens of the ids of a row, without a cut inside of its media."""
        spans = self._media[row].spans(token_ids) if row in self._media else []
        side = self._config.truncation
        assert side != "error", "the first prompt that is too long was refused before"
        try:
            return truncate(token_ids, self._config.max_prompt_tokens, side, spans)
        except ValueError as error:
            raise ValueError(f"{self._where(row)}: {error}") from error


def subsample(rows: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` rows at even distances, so that a file sorted by source or difficulty is covered."""
    if len(rows) <= count:
        return rows
    return [rows[index * len(rows) // count] for index in range(count)]


def truncate(
    token_ids: Sequence[int], limit: int, side: Side, spans: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """At most `limit` of the token ids.

    Args:
        token_ids: of a prompt.
        limit: most tokens that stay.
        side: of the removed tokens: `left` keeps the end, `right` the beginning, `middle` the first half
            (rounded down) and the last half.
        spans: [start, end) of tokens that stand for an image, a video or a sound. They are kept whole and do
            not move relative to the text around them; only text is taken away.

    Raises:
        ValueError: the spans alone are longer than the limit.
    """
    excess = len(token_ids) - limit
    if excess <= 0:
        return list(token_ids)
    is_fixed = [False] * len(token_ids)
    for start, end in spans:
        is_fixed[start:end] = [True] * (end - start)
    text = [position for position, fixed in enumerate(is_fixed) if not fixed]
    if excess > len(text):
        raise ValueError(
            f"the media of the prompt take {len(token_ids) - len(text)} tokens, over the limit of {limit}; they "
            f"are never cut: raise the limit or use fewer or smaller ones"
        )
    num_kept = len(text) - excess
    first = {"left": 0, "right": num_kept, "middle": num_kept // 2}[side]
    removed = set(text[first : first + excess])
    return [token for position, token in enumerate(token_ids) if position not in removed]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[Chat],
    *,
    reading: Callable[[Chat], AbstractContextManager[None]] = lambda chat: nullcontext(),
) -> list[array[int]]:
    """Token ids of every conversation with the generation prompt; arrays take an eighth of what lists would.

    Texts are rendered and encoded in batches, the latter spread over threads by fast tokenizers. An error of a
    conversation is raised in `reading(chat)`; where that takes it in, the conversation has no tokens.
    """
    encoded: list[array[int]] = []
    remaining = iter(chats)
    while batch := list(itertools.islice(remaining, _TOKENIZER_BATCH)):
        texts: list[tuple[Chat, str]] = []
        for chat, text in zip(batch, render_parts(tokenizer, [*map(prompt_part, batch)]), strict=True):
            with reading(chat):
                if isinstance(text, ValueError):
                    raise text
                check_calls_shown(chat, text)
                texts.append((chat, text))
        for (chat, _), ids in zip(texts, encode_all(tokenizer, [text for _, text in texts]), strict=True):
            with reading(chat):
                check_tokens_known(tokenizer, ids, chat.where)
                encoded.append(array("i", ids))
    return encoded
