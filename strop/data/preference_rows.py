"""Tokenised preference rows: answers to the same prompt.

Every example has two conversations: the better and the other answer; with loss=kto, the answer and another row's answer
to the same prompt, by which the distance to the starting model is estimated.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.algorithms.preference_loss_config import Loss
from strop.data.bad_rows import BadRows, null_in
from strop.data.chat import (
    check_begun,
    control_token_ids,
    encode,
    from_json_text,
    require_chat_template,
    to_chat,
    to_messages,
)
from strop.data.media import has_media
from strop.data.preference_config import PreferDataConfig
from strop.data.rendering import ChatPart, render_parts
from strop.data.rows import unread_columns, unread_warning
from strop.data.sft.answer_ends import AnswerEnds
from strop.data.sft.conversations import Tokenized, TrainedChat, tokenize_chats
from strop.data.sft.stored_conversation import SftExample, longest_parts
from strop.data.template_omissions import check_calls_shown
from strop.engines.value_models import without_padding
from strop.utils.embedding_rows import check_tokens_known

Messages = tuple[dict[str, Any], ...]
_CHATS_AT_ONCE = 512
"""Conversations that are rendered together."""


@dataclass(frozen=True, kw_only=True)
class PreferenceExample:
    """Two conversations with the same prompt."""

    pair: tuple[SftExample, SftExample]
    margin: float = 0.0
    """With loss=reward: how much better the first one is."""
    is_good: bool = True
    """With loss=kto: label of the first one."""
    has_empty: bool = False
    """True if an answer of the row has no text: it is trained to end at once."""


@dataclass(frozen=True, kw_only=True)
class _Untokenized:
    """A row that is read; fields as those of PreferenceExample."""

    row: int
    """Row number in the files, before any filter."""
    pair: tuple[TrainedChat, TrainedChat]
    margin: float = 0.0
    is_good: bool = True
    has_empty: bool = False


class PreferenceDataset:
    """Tokenised comparisons of at most `config.max_tokens` tokens a side; longer ones are dropped and counted."""

    has_media = False

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: PreferDataConfig,
        *,
        loss: Loss,
        split: str = "train",
        padding: int | None = None,
    ) -> None:
        """Read all rows.

        Args:
            rows: from `read_rows`.
            tokenizer: with a chat template.
            config: column names, the longest conversation, and variables for the template.
            loss: decides the kind of rows.
            split: word for the rows in messages.
            padding: with loss=reward, `strop.engines.value_models.padding_token` of the model.

        Raises:
            ValueError: a row is malformed; or none is left.
        """
        require_chat_template(tokenizer)
        if not rows:
            raise ValueError(f"{split} data has no rows; check prefer.data.{split}_files")
        self._tokenizer, self._config, self._loss, self._split = tokenizer, config, loss, split
        self._padding = padding
        self._unread: Counter[str] = Counter()
        self._num_beyond_messages = 0
        """With loss=reward: conversations whose template is given more than messages."""
        self._control = control_token_ids(tokenizer)
        self._num_rows = len(rows)
        bad = BadRows(split, len(rows), files=f"prefer.data.{split}_files")
        examples = self._read_rated(rows, bad) if loss == "kto" else self._read_comparisons(rows, bad)
        limit = config.max_tokens + (loss == "reward")  # one more is read behind a scored one
        self._examples = [
            example for example in examples if max(len(side.token_ids) for side in example.pair) <= limit
        ]
        self.ends = AnswerEnds(tokenizer)
        for side in (side for example in self._examples for side in example.pair if loss != "reward"):
            self.ends.add(side.token_ids, side.loss_mask)
        if not self._examples:
            raise ValueError(
                f"no {split} comparison is left: all {len(rows)} have an answer with more than prefer.data.max_tokens="
                f"{config.max_tokens} tokens, prompt included; raise it"
            )

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> PreferenceExample:
        return self._examples[index]

    def identity(self, index: int) -> bytes:
        """Equal for examples with the same conversations; with loss=kto, with the same one and its label, whatever
        other answer is beside it."""
        example = self._examples[index]
        compared = example.pair[:1] if self._loss == "kto" else example.pair
        digest = hashlib.blake2b(bytes([example.is_good]), digest_size=16)
        for side in compared:
            digest.update(len(side.token_ids).to_bytes(8) + array("i", side.token_ids).tobytes())
        return digest.digest()

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(len(side.token_ids) for example in self._examples for side in example.pair)

    @property
    def longest_parts(self) -> tuple[int, int]:
        """As of `strop.data.sft.stored_conversation.longest_parts`."""
        sides = (side for example in self._examples for side in example.pair)
        return longest_parts((len(side.token_ids), side.loss_mask.index(True)) for side in sides)

    def report(self) -> str:
        """One line: how many comparisons, how long, how many dropped."""
        lengths = [len(side.token_ids) for example in self._examples for side in example.pair]
        noun = "answers" if self._loss == "kto" else "comparisons"
        line = (
            f"{self._split}: {len(self)} {noun}, conversations of {min(lengths)} to {max(lengths)} tokens (median "
            f"{statistics.median_low(lengths)})"
        )
        if self._loss == "kto":
            line += f", {sum(example.is_good for example in self._examples)} of them good"
        if empty := sum(example.has_empty for example in self._examples):
            line += f"; {empty} with an empty answer"
        if dropped := self._num_rows - len(self):
            share = 100 * dropped / self._num_rows
            line += f"; dropped {dropped} ({share:.1f} %) longer than prefer.data.max_tokens={self._config.max_tokens}"
        if warning := unread_warning(self._unread):
            line += f"; {warning}"
        if count := self._num_beyond_messages:
            line += (
                f"; WARNING: the template of {count} conversations is given tools or variables, and a reward model in "
                f"a run is given the messages alone: train it on what it will read there"
            )
        if warning := self.ends.warning():
            line += f"; {warning}"
        return line

    def _read_comparisons(self, rows: Sequence[Mapping[str, Any]], bad: BadRows) -> list[PreferenceExample]:
        read = []
        for number, row in enumerate(rows):
            with bad.reading(self._where(number)):
                read.append(self._read_comparison(number, row))
        return self._tokenize(read, bad)

    def _where(self, number: int) -> str:
        return f"{self._split} row {number}"

    def _read_comparison(self, number: int, row: Mapping[str, Any]) -> _Untokenized:
        config, where = self._config, self._where(number)
        if empty := null_in(row, (config.chosen_key, config.rejected_key)):
            raise ValueError(
                f"{where} has {empty}, so there is nothing to compare: give the answer, or remove the row"
            )
        for key in (config.chosen_key, config.rejected_key):
            if row.get(key) is None:
                raise ValueError(
                    f"{where} has no {key!r}; columns found: {', '.join(row)}. Map them with prefer.data.chosen_key "
                    f"and prefer.data.rejected_key"
                )
        prompt, chosen, rejected = self._parts(row, where)
        self._unread.update(unread_columns(row, prompt, (config.prompt_key,)))
        return _Untokenized(
            row=number,
            pair=(self._chat(row, prompt, chosen, where), self._chat(row, prompt, rejected, where)),
            margin=self._margin(row, where) if self._loss == "reward" else 0.0,
            has_empty=_is_empty(chosen) or _is_empty(rejected),
        )

    def _margin(self, row: Mapping[str, Any], where: str) -> float:
        key = self._config.margin_key
        margin = row.get(key)
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ValueError(
                f"{where} has the margin {margin!r} in {key!r}; write a finite number, or leave it out"
            )
        return float(margin)

    def _parts(self, row: Mapping[str, Any], where: str) -> tuple[Messages, Messages, Messages]:
        """Prompt, better and other answer."""
        config = self._config
        keys = (config.chosen_key, config.rejected_key)
        chosen, rejected = (self._read(row, key, "assistant", where) for key in keys)
        is_greeted = row.get(config.prompt_key) is None and chosen[0] == rejected[0] and len(chosen) > 1
        if chosen[0]["role"] == rejected[0]["role"] == "assistant" and not is_greeted:
            return self._prompt(row, where), chosen, rejected
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        rest = (chosen[shared:], rejected[shared:])
        if shared == 0 or not all(answer and answer[0]["role"] == "assistant" for answer in rest):
            raise ValueError(
                f"{where}: the two answers are no conversations that begin alike and go on with an assistant message "
                f"each; give the prompt in {config.prompt_key!r} and the answers alone"
            )
        return chosen[:shared], *rest

    def _prompt(self, row: Mapping[str, Any], where: str) -> Messages:
        key = self._config.prompt_key
        if empty := null_in(row, (key,)):
            raise ValueError(
                f"{where} has {empty}, and its answers are no whole conversations: give the prompt, or remove the row"
            )
        if row.get(key) is None:
            raise ValueError(
                f"{where} has no {key!r}, and its answers are no whole conversations; columns found: {', '.join(row)}. "
                f"Map it with prefer.data.prompt_key"
            )
        return self._read(row, key, "user", where)

    def _read(self, row: Mapping[str, Any], key: str, role: str, where: str) -> Messages:
        """Messages of a column."""
        mode = self._config.json_messages
        value = from_json_text(row[key], mode, where=where, key=key, setting="prefer.data.json_messages")
        return to_messages(value, role=role, where=where, key=key)

    def _read_rated(self, rows: Sequence[Mapping[str, Any]], bad: BadRows) -> list[PreferenceExample]:
        """Each answer, and beside it the next row's, as if it had been given to this prompt."""
        read = []
        for number, row in enumerate(rows):
            with bad.reading(self._where(number)):
                read.append(self._rated_answer(row, self._where(number)))
        bad.check()
        if len(read) < 2:
            raise ValueError(f"{self._split} data has one row; prefer.loss=kto sets rows against each other")
        untokenized = []
        for number, (row, (prompt, answer, label)) in enumerate(zip(rows, read, strict=True)):
            where, other = self._where(number), read[(number + 1) % len(read)][1]
            with bad.reading(where):
                untokenized.append(
                    _Untokenized(
                        row=number,
                        pair=(self._chat(row, prompt, answer, where), self._chat(row, prompt, other, where)),
                        is_good=label,
                        has_empty=_is_empty(answer),
                    )
                )
        return self._tokenize(untokenized, bad)

    def _rated_answer(self, row: Mapping[str, Any], where: str) -> tuple[Messages, Messages, bool]:
        """Prompt, answer and label of a row."""
        key, label_key = self._config.completion_key, self._config.label_key
        if empty := null_in(row, (key, label_key)):
            raise ValueError(f"{where} has {empty}: give the answer and true or false, or remove the row")
        label = row.get(label_key)
        if label is None or row.get(key) is None:
            raise ValueError(
                f"{where} needs an answer in {key!r} and true or false in {label_key!r}; columns found: "
                f"{', '.join(row)}. Map them with prefer.data.completion_key and prefer.data.label_key"
            )
        if label not in (0, 1):
            raise ValueError(f"{where} has {label!r:.40} in {label_key!r}; write true or false, 1 or 0")
        answer = self._read(row, key, "assistant", where)
        prompt = self._prompt(row, where)
        self._unread.update(unread_columns(row, prompt, (self._config.prompt_key, key)))
        return prompt, answer, bool(label)

    def _chat(self, row: Mapping[str, Any], prompt: Messages, answer: Messages, where: str) -> TrainedChat:
        check_begun(prompt, answer, where)
        if has_media(row, (*prompt, *answer)):
            raise ValueError(
                f"{where} has images or videos, or an empty column of them beside their placeholder, which training on "
                f"preferences does not take"
            )
        chat = to_chat(row, (*prompt, *answer), options=self._config.chat_template_kwargs, where=where)
        return TrainedChat(chat, first_trained=len(prompt))

    def _tokenize(self, read: Sequence[_Untokenized], bad: BadRows) -> list[PreferenceExample]:
        """Examples of rows that are read; ValueError about all rows that cannot be used."""
        chats = [chat for row in read for chat in row.pair]
        results = iter(
            self._tokenize_whole(chats) if self._loss == "reward" else self._tokenize_answers(chats)
        )
        examples = []
        for row in read:
            first, second = next(results), next(results)
            with bad.reading(self._where(row.row)):
                examples.append(self._example(row, first, second))
        bad.check()
        return examples

    def _tokenize_answers(self, chats: Sequence[TrainedChat]) -> Iterator[Tokenized | ValueError]:
        for start in range(0, len(chats), _CHATS_AT_ONCE):
            batch = chats[start : start + _CHATS_AT_ONCE]
            yield from tokenize_chats(self._tokenizer, batch, control_ids=self._control)

    def _tokenize_whole(self, chats: Sequence[TrainedChat]) -> Iterator[Tokenized | ValueError]:
        """The text as a reward model is given it in a run, up to the token that it scores, and one place behind it with
        the loss of the score."""
        self._num_beyond_messages += sum(bool(chat.chat.tools or chat.chat.options) for chat in chats)
        texts = render_parts(self._tokenizer, [ChatPart(trained_chat.chat) for trained_chat in chats])
        for trained_chat, text in zip(chats, texts, strict=True):
            try:
                if isinstance(text, ValueError):
                    raise text
                check_calls_shown(trained_chat.chat, text)
            except ValueError as error:
                yield error
                continue
            ids = without_padding(encode(self._tokenizer, text), self._padding)
            yield [*ids, 0], [*(False for _ in ids), True]

    def _example(
        self, row: _Untokenized, first: Tokenized | ValueError, second: Tokenized | ValueError
    ) -> PreferenceExample:
        sides = []
        for tokenized in (first, second):
            if isinstance(tokenized, ValueError):
                raise tokenized
            ids, mask = tokenized
            check_tokens_known(self._tokenizer, ids, self._where(row.row))
            sides.append(SftExample(row=row.row, token_ids=tuple(ids), loss_mask=tuple(mask)))
        if self._loss == "kto":
            sides[1] = _cut(sides[1], self._config.max_tokens)
        elif sides[0].token_ids == sides[1].token_ids:
            raise ValueError(f"{self._where(row.row)} compares an answer with itself; remove the row")
        return PreferenceExample(
            pair=(sides[0], sides[1]),
            margin=row.margin,
            is_good=row.is_good,
            has_empty=row.has_empty,
        )


def _is_empty(answer: Messages) -> bool:
    return not (answer[-1].get("content") or answer[-1].get("tool_calls"))


def _cut(example: SftExample, limit: int) -> SftExample:
    """The beginning, where something of it is an answer; else the whole, which drops the row."""
    if len(example.token_ids) <= limit or not any(example.loss_mask[:limit]):
        return example
    return SftExample(
        row=example.row, token_ids=example.token_ids[:limit], loss_mask=example.loss_mask[:limit]
    )
