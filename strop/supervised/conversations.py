"""Conversations for supervised fine-tuning: token ids, and the loss on assistant turns only.

A template with {% generation %} marks the trained text itself. For the others a turn begins where the
messages before it, with the generation prompt, end, and it ends where the messages up to it end. Both are
found by rendering those messages alone, which is right only when the template is append-only: when text
rendered once is never changed by later messages. That is checked, turn by turn.

The tokens before a turn are those that a rollout would be given as its prompt, also where the text would be
cut differently if prompt and answer were encoded in one piece.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from strop.chat_template import TemplateRefused, apply_template
from strop.data.chat import (
    Chat,
    control_token_ids,
    encode,
    render,
    require_chat_template,
    template_refused,
    to_chat,
    to_messages,
)
from strop.data.media import MEDIA_COLUMNS, RowMedia, content_parts, has_media, media_reader, refuse_audio
from strop.data.rows import value_inside
from strop.supervised.config import SftDataConfig
from strop.trajectory import Media

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, kw_only=True)
class SftExample:
    """One conversation as it is trained."""

    row: int
    """Row number in the files, before any filter."""
    token_ids: tuple[int, ...]
    """The whole conversation."""
    loss_mask: tuple[bool, ...]
    """True on tokens of assistant turns, the end-of-turn token included."""
    media: tuple[Media, ...] = ()
    """Images, in the order of their tokens."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"row {self.row} has {len(self.token_ids)} token_ids and {len(self.loss_mask)} loss_mask "
                f"entries; they must be as many"
            )
        if not any(self.loss_mask):
            raise ValueError(
                f"row {self.row} has no token with a loss; it needs an assistant message with text"
            )


class SftDataset:
    """Tokenised conversations of at most `config.max_tokens` tokens; longer ones are dropped or cut, and counted.

    Rows hold `messages`, or `prompt` and `completion` (each a string or a list of messages), and may hold
    `tools` and `enable_thinking` for the template. Every assistant message of `messages` is trained, and
    every one of a completion, tool calls included; assistant messages in a prompt are not, and neither is what
    tools answered.

    Args:
        rows: from `read_rows`.
        tokenizer: with a chat template.
        config: column names, the longest conversation, and variables for the template.
        split: word for the rows in messages.

    Raises:
        ValueError: a column is missing, a row is malformed or without an assistant turn, the tokenizer has no
            chat template or one that is not append-only at a turn, one conversation is too long with
            truncation=error, or none is left.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        *,
        split: str = "train",
    ) -> None:
        require_chat_template(tokenizer)
        if not rows:
            raise ValueError(f"{split} data has no rows; check data.{split}_files")
        self.split = split
        self._config = config
        self._num_open_ended = self._num_cut = 0
        self._num_rows = len(rows)
        self._examples: list[_Kept] = []
        control = control_token_ids(tokenizer)
        shortest: int | None = None
        for number, row in enumerate(rows):
            chat, first_trained = self._to_chat(number, row)
            images = None
            if chat.media:
                images = media_reader(chat.where).row_media(tokenizer, chat.media, chat.where)
            ids, mask = tokenize_chat(tokenizer, chat, first_trained=first_trained, control_ids=control)
            whole = _Kept(number, array("i", ids), bytes(mask))
            whole = whole if images is None else _with_images(whole, images)
            shortest = len(whole.ids) if shortest is None else min(shortest, len(whole.ids))
            kept = self._fitting(whole, chat.where)
            if kept is not None:
                self._num_open_ended += kept.ids[_runs(list(map(bool, kept.mask)))[-1][1] - 1] not in control
                self._examples.append(kept)
        if not self._examples:
            raise ValueError(
                f"no {split} conversation is left: all {len(rows)} are longer than data.max_tokens="
                f"{config.max_tokens}; the shortest has {shortest} tokens, so raise it to at least {shortest}"
            )

    def _fitting(self, whole: _Kept, where: str) -> _Kept | None:
        """The conversation, or what is kept of one that is too long; None where nothing is."""
        limit, side = self._config.max_tokens, self._config.truncation
        if len(whole.ids) <= limit:
            return whole
        if side == "error":
            raise ValueError(
                f"{where} has {len(whole.ids)} tokens, over sft.data.max_tokens={limit}: raise that, or say with "
                f"sft.data.truncation what becomes of such rows (drop, left, right)"
            )
        kept = None if side == "drop" else _cut(whole, limit, side)
        self._num_cut += kept is not None
        return kept

    @property
    def num_filtered(self) -> int:
        """Rows dropped because they were too long."""
        return self._num_rows - len(self._examples)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> SftExample:
        kept = self._examples[index]
        mask = tuple(map(bool, kept.mask))
        return SftExample(row=kept.row, token_ids=tuple(kept.ids), loss_mask=mask, media=kept.media)

    @property
    def has_media(self) -> bool:
        """A conversation has images."""
        return any(kept.media for kept in self._examples)

    def report(self) -> str:
        """One line: how many conversations, how long, how many dropped, and turns that never end."""
        lengths = [len(kept.ids) for kept in self._examples]
        num_trained = sum(sum(kept.mask) for kept in self._examples)
        line = (
            f"{self.split}: {len(self)} conversations of {min(lengths)} to {max(lengths)} tokens (median "
            f"{statistics.median_low(lengths)}), {num_trained} of {sum(lengths)} tokens trained"
        )
        counts = {"dropped": self.num_filtered, f"cut ({self._config.truncation})": self._num_cut}
        if said := [f"{what} {n} ({100 * n / self._num_rows:.1f} %)" for what, n in counts.items() if n]:
            line += f"; {', '.join(said)} longer than data.max_tokens={self._config.max_tokens}"
        if self._num_open_ended:
            line += (
                f"; WARNING: {self._num_open_ended} answers end without a control token, so the model will "
                f"not learn to stop: the chat template should close assistant turns"
            )
        return line

    def _to_chat(self, number: int, row: Mapping[str, Any]) -> tuple[Chat, int]:
        """The row's conversation and the number of its first message that may be trained."""
        config = self._config
        messages_key, prompt_key, completion_key = (
            config.messages_key,
            config.prompt_key,
            config.completion_key,
        )
        where = f"{self.split} row {number}"
        if row.get(messages_key) is not None:
            messages = to_messages(row[messages_key], role="user", where=where, key=messages_key)
            first_trained = 0
        elif (asked := value_inside(row, prompt_key)) is not None and (
            answer := value_inside(row, completion_key)
        ) is not None:
            prompt = to_messages(asked, role="user", where=where, key=prompt_key)
            completion = to_messages(answer, role="assistant", where=where, key=completion_key)
            messages, first_trained = prompt + completion, len(prompt)
        else:
            raise ValueError(
                f"{where} has neither {messages_key!r} nor both {prompt_key!r} and {completion_key!r}; "
                f"columns found: {', '.join(row)}. Map them with data.messages_key, or data.prompt_key and "
                f"data.completion_key"
            )
        if not any(message["role"] == "assistant" for message in messages[max(first_trained, 1) :]):
            raise ValueError(
                f"{where} has no assistant message to train on, after a first one of another role (roles: "
                f"{', '.join(message['role'] for message in messages)}); add the answer, or remove the row"
            )
        refuse_audio(row, messages, where)  # before the other media, which may be missing
        options, columns = config.chat_template_kwargs, {**MEDIA_COLUMNS, "image": config.image_key}
        if not has_media(row, messages, columns):
            return to_chat(row, messages, options=options, where=where), first_trained
        placed, media = media_reader(where).take_media(row, messages, columns, where)
        if any(part.get("type") == "video" for message in placed for part in content_parts(message)):
            raise ValueError(f"{where} has videos, which fine-tuning does not take; use images")
        chat = to_chat(row, placed, options=options, where=where)
        return dataclasses.replace(chat, media=media), first_trained


@dataclass(frozen=True)
class _Kept:
    """A conversation, in little memory."""

    row: int
    ids: array[int]
    mask: bytes
    media: tuple[Media, ...] = ()


def _with_images(kept: _Kept, images: RowMedia) -> _Kept:
    """As many tokens for each image as stand for it, none of them trained."""
    ids = images.expand(kept.ids)
    media = images.media(ids)
    mask, read = bytearray(), 0
    for one in media:
        before = one.start - len(mask)
        mask += kept.mask[read : read + before] + bytes(one.num_tokens)
        read += before + 1  # the token that the template wrote for it
    return _Kept(kept.row, ids, bytes(mask + kept.mask[read:]), media)


def _cut(kept: _Kept, limit: int, side: Literal["left", "right"]) -> _Kept | None:
    """At most so many tokens, without a part of an image; None where none of them is trained.

    The first token of all is not trained: nothing predicts it.
    """
    first, last = (0, limit) if side == "right" else (len(kept.ids) - limit, len(kept.ids))
    for start, end in (one.span for one in kept.media):
        first = end if start < first < end else first
        last = start if start < last < end else last
    mask = bytearray(kept.mask[first:last])
    if mask:
        mask[0] = 0
    if not any(mask):
        return None
    media = tuple(
        dataclasses.replace(one, start=one.start - first)
        for one in kept.media
        if first <= one.start and one.span[1] <= last
    )
    return _Kept(kept.row, kept.ids[first:last], bytes(mask), media)


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    first_trained: int = 0,
    control_ids: Collection[int] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and True on those of its assistant turns.

    The end-of-turn token belongs to a turn. White space that the template writes after it does not: a model
    that is sampled stops at the end-of-turn token and never writes it.

    Args:
        tokenizer: with a chat template.
        chat: the conversation.
        first_trained: messages before this number carry no loss.
        control_ids: `control_token_ids(tokenizer)`, to compute it once for many conversations.

    Raises:
        ValueError: the template cannot render the messages, or is not append-only at one of the turns.
    """
    control = control_token_ids(tokenizer) if control_ids is None else control_ids
    template = tokenizer.get_chat_template(tools=chat.tools)
    has_given_turns = any(message["role"] == "assistant" for message in chat.messages[:first_trained])
    if not has_given_turns and tokenizer.is_fast and _GENERATION_BLOCK.search(template):
        ids, mask = _tokenize_marked(tokenizer, chat)
    else:
        text = render(tokenizer, chat, add_generation_prompt=False)
        spans = _assistant_spans(tokenizer, chat, text, first_trained)
        ids, bounds = _encode_cut(tokenizer, text, [cut for span in spans for cut in span])
        mask = [False] * len(ids)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            mask[start:end] = [True] * (end - start)
    for start, end in _runs(mask):
        stop = _end_of_turn(tokenizer, ids, start, end, control)
        mask[stop:end] = [False] * (end - stop)
    if not any(mask):
        raise ValueError(
            f"{chat.where}: the assistant turns render to no tokens; check them and the template"
        )
    return ids, mask


def _tokenize_marked(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> tuple[list[int], list[bool]]:
    """Tokens and mask as the {% generation %} blocks of the template say."""
    try:
        encoded: Any = apply_template(
            tokenizer,
            chat.messages,
            chat.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **chat.options,
        )
    except TemplateRefused as error:
        raise ValueError(template_refused(chat, error)) from error
    return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, text: str, first_trained: int
) -> list[tuple[int, int]]:
    """Start and end of every trained assistant turn, in characters of the rendered conversation.

    A message that opens the conversation is given: no prompt precedes it that a policy could answer.
    """
    spans = []
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant" or index < max(first_trained, 1):
            continue
        before = render(tokenizer, chat, num_messages=index, add_generation_prompt=True)
        if not text.startswith(before):
            raise ValueError(_not_append_only(chat, index, before, text, "the generation prompt before it"))
        after = text
        if index + 1 < len(chat.messages):
            after = render(tokenizer, chat, num_messages=index + 1, add_generation_prompt=False)
        if not text.startswith(after):
            raise ValueError(_not_append_only(chat, index, after, text, "its text"))
        spans.append((len(before), len(after)))
    return spans


def _not_append_only(chat: Chat, index: int, part: str, text: str, what: str) -> str:
    """Sentence for a template that writes a turn differently once the conversation goes on."""
    same = 0
    while same < min(len(part), len(text)) and part[same] == text[same]:
        same += 1
    return (
        f"{chat.where}: the chat template is not append-only at message {index + 1} of {len(chat.messages)} "
        f"(assistant): it writes {what} as {part[same : same + 40]!r}, but as {text[same : same + 40]!r} in "
        f"the whole conversation, so what is trained would differ from what is sampled. Use rows that end "
        f"with this turn, or a template that keeps earlier turns or marks them with {{% generation %}}"
    )


def _encode_cut(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Token ids of the text, and the token position of each cut (characters, ascending).

    Encoded in one piece when every cut falls between two tokens; otherwise piece by piece, so that the tokens
    before a cut are those of the text before it.
    """
    whole = encode(tokenizer, text)
    positions = []
    for cut in cuts:
        before = whole if cut == len(text) else encode(tokenizer, text[:cut])
        if whole[: len(before)] != before:
            break
        positions.append(len(before))
    else:
        return whole, positions
    ids: list[int] = []
    positions = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids += encode(tokenizer, text[start:end])
        positions.append(len(ids))
    return ids, positions[:-1]


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int, control: Collection[int]
) -> int:
    """Where the turn ends when white space after its last control token is left out."""
    last = end
    while last > start and ids[last - 1] not in control:
        last -= 1
    if last > start and not str(tokenizer.decode(list(ids[last:end]))).strip():
        return last
    return end


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and end of each run of True."""
    padded = [False, *mask, False]
    edges = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
