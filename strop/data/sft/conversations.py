"""Token ids of a conversation, and the loss on assistant turns only.

A template with {% generation %} marks the trained text itself. For the others a turn begins where the
messages before it, with the generation prompt, end, and it ends where the messages up to it end. Both are
found by rendering those messages alone, which is right only when the template is append-only: when text
rendered once is never changed by later messages. That is checked, turn by turn.

The tokens before a turn are those that a rollout would be given as its prompt, also where the text would be
cut differently if prompt and answer were encoded in one piece.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import (
    Chat,
    control_token_ids,
    encode,
    render,
    template_refused,
)
from strop.data.rendering import ChatPart, render_parts
from strop.data.template_omissions import check_calls_shown, check_tools_shown, writes_calls
from strop.utils.chat_template import TemplateRefused, TemplateTooCostly, apply_template

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for what the assistant thinks before its answer."""

Tokenized = tuple[list[int], list[bool]]
"""Token ids of a conversation, and True on those of its trained assistant turns."""


@dataclass(frozen=True)
class TrainedChat:
    """A conversation, and which of its assistant turns carry loss."""

    chat: Chat
    first_trained: int = 0
    """Messages before this number carry none."""
    trained: Collection[int] | None = None
    """Numbers of the messages that do, of the others; None: all."""

    @property
    def answers(self) -> list[int]:
        """Numbers of all assistant messages."""
        return [number for number, message in enumerate(self.chat.messages) if message["role"] == "assistant"]

    @property
    def trained_answers(self) -> list[int]:
        """Numbers of the assistant messages that carry loss."""
        return [
            number
            for number in self.answers
            if number >= self.first_trained and (self.trained is None or number in self.trained)
        ]


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    first_trained: int = 0,
    trained: Collection[int] | None = None,
    control_ids: Collection[int] | None = None,
) -> Tokenized:
    """Token ids of a conversation, and True on those of its assistant turns.

    The end-of-turn token belongs to a turn. White space that the template writes after it does not: a model
    that is sampled stops at the end-of-turn token and never writes it.

    Args:
        tokenizer: with a chat template.
        chat: the conversation.
        first_trained: messages before this number carry no loss.
        trained: numbers of the messages that carry one, of those; None: all.
        control_ids: `control_token_ids(tokenizer)`, to compute it once for many conversations.

    Raises:
        ValueError: the template cannot render the messages, or is not append-only at one of the turns.
    """
    (result,) = tokenize_chats(
        tokenizer, [TrainedChat(chat, first_trained, trained)], control_ids=control_ids
    )
    if isinstance(result, ValueError):
        raise result
    return result


def tokenize_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[TrainedChat],
    *,
    control_ids: Collection[int] | None = None,
) -> list[Tokenized | ValueError]:
    """Several conversations as of `tokenize_chat`, rendered together; its error in place of one that has none.

    Raises:
        TemplateTooCostly: the template takes more time or memory than any conversation needs.
    """
    control = control_token_ids(tokenizer) if control_ids is None else control_ids
    parts = [[] if has_marks(tokenizer, chat.chat.tools) else _parts(chat) for chat in chats]
    texts = iter(render_parts(tokenizer, list(itertools.chain(*parts))))
    results: list[Tokenized | ValueError] = []
    for chat, its_parts in zip(chats, parts, strict=True):
        try:
            its_texts = list(itertools.islice(texts, len(its_parts)))
            results.append(_tokenize(tokenizer, chat, its_texts, control))
        except TemplateTooCostly:
            raise
        except ValueError as error:
            results.append(error)
    return results


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    trained_chat: TrainedChat,
    texts: Sequence[str | ValueError],
    control: Collection[int],
) -> Tokenized:
    """Tokens and mask of a conversation with the texts of its parts; without texts, by the template's marks."""
    chat = trained_chat.chat
    tokens = None if texts else _tokenize_by_marks(tokenizer, trained_chat)
    if tokens is None:
        texts = texts or render_parts(tokenizer, _parts(trained_chat))
        tokens = _tokenize_by_texts(tokenizer, trained_chat, texts)
    ids, mask = tokens
    for start, end in runs(mask):
        stop = _end_of_turn(tokenizer, ids, start, end, control)
        mask[stop:end] = [False] * (end - stop)
    if not any(mask):
        raise ValueError(
            f"{chat.where}: the assistant turns render to no tokens; check them and the template"
        )
    return ids, mask


def _tokenize_by_marks(tokenizer: PreTrainedTokenizerBase, trained_chat: TrainedChat) -> Tokenized | None:
    """Tokens and mask as the {% generation %} blocks say; None where it is not known which of them are trained."""
    chat, answers, trained = trained_chat.chat, trained_chat.answers, trained_chat.trained_answers
    ids, mask = _tokenize_marked(tokenizer, chat)
    if chat.tools or any(message.keys() & {"tool_calls", *_THOUGHTS} for message in chat.messages):
        text = render(tokenizer, chat, add_generation_prompt=False)
        check_tools_shown(chat, text)
        check_calls_shown(chat, text)
        if trained and trained[-1] == answers[-1]:  # templates leave the thinking of earlier ones out
            _check_written(chat, answers[-1], text)
    if trained == answers:
        return ids, mask
    trained_marks = _marks_of(tokenizer, chat, mask, answers, trained)
    return None if trained_marks is None else (ids, trained_marks)


def _tokenize_by_texts(
    tokenizer: PreTrainedTokenizerBase, trained_chat: TrainedChat, texts: Sequence[str | ValueError]
) -> Tokenized:
    """Tokens and mask with the texts of `_parts`."""
    rendered = iter(texts)
    text = _required(next(rendered))
    check_tools_shown(trained_chat.chat, text)
    check_calls_shown(trained_chat.chat, text)
    spans = _assistant_spans(trained_chat, text, rendered)
    ids, bounds = _encode_cut(tokenizer, text, [cut for span in spans for cut in span])
    mask = [False] * len(ids)
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        mask[start:end] = [True] * (end - start)
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


def has_marks(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> bool:
    """True if the chat template marks the trained text with {% generation %} blocks; not known of slow tokenizers."""
    return tokenizer.is_fast and bool(_GENERATION_BLOCK.search(tokenizer.get_chat_template(tools=tools)))


def _marks_of(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    mask: Sequence[bool],
    answers: Sequence[int],
    trained: Collection[int],
) -> list[bool] | None:
    """The marks that belong to the assistant turns of these numbers; None where it is not known which do.

    A turn has as many marked pieces as the conversation has more when it goes up to this turn, and not only up to the
    one before. A template that marks a turn only while it is the last one gives no such numbers.
    """
    marked, marks, before = runs(mask), [False] * len(mask), 0
    for index in answers:
        upto = dataclasses.replace(chat, messages=chat.messages[: index + 1])
        after = len(runs(_tokenize_marked(tokenizer, upto)[1]))
        if index in trained:
            if after <= before:
                return None
            for start, end in marked[before:after]:
                marks[start:end] = [True] * (end - start)
        before = after
    return marks if before == len(marked) else None


def _parts(trained_chat: TrainedChat) -> list[ChatPart]:
    """The whole conversation; then, for each trained answer, what is before it, and all up to its end.

    An answer that opens the conversation is given: no prompt precedes it that a policy could answer.
    """
    chat, parts = trained_chat.chat, [ChatPart(trained_chat.chat)]
    for index in trained_chat.trained_answers:
        if index:
            parts.append(ChatPart(chat, index, add_generation_prompt=True))
        if index and index + 1 < len(chat.messages):
            parts.append(ChatPart(chat, index + 1))
    return parts


def _assistant_spans(
    trained_chat: TrainedChat, text: str, rendered: Iterator[str | ValueError]
) -> list[tuple[int, int]]:
    """Start and end of the trained answers, in characters of the text of the conversation.

    Args:
        trained_chat: the conversation.
        text: of all of it.
        rendered: texts of the other parts of `_parts`.
    """
    chat, spans = trained_chat.chat, []
    for index in trained_chat.trained_answers:
        if index == 0:
            continue
        before = _required(next(rendered))
        if not text.startswith(before):
            raise ValueError(_not_append_only(chat, index, before, text, "the generation prompt before it"))
        after = _required(next(rendered)) if index + 1 < len(chat.messages) else text
        if not text.startswith(after):
            raise ValueError(_not_append_only(chat, index, after, text, "its text"))
        _check_written(chat, index, text[len(before) : len(after)])
        spans.append((len(before), len(after)))
    return spans


def _check_written(chat: Chat, index: int, text: str) -> None:
    """Refuse an answer whose tool calls or thinking the template leaves out of its text: it would be trained without.

    Raises:
        ValueError: it does.
    """
    message = chat.messages[index]
    where = f"{chat.where}: the chat template leaves out the {{}} of message {index + 1} (assistant): {{}}"
    if not writes_calls(message, text):
        raise ValueError(where.format("tool calls", "use a template that writes them, or remove the row"))
    thoughts = {key: message[key] for key in _THOUGHTS if isinstance(message.get(key), str)}
    written = "".join(text.split())
    if thoughts and not any("".join(thought.split()) in written for thought in thoughts.values()):
        raise ValueError(
            where.format(
                next(iter(thoughts)),
                "use a template that writes it, put it into the content as the model writes it, or remove the key",
            )
        )


def _required(text: str | ValueError) -> str:
    if isinstance(text, ValueError):
        raise text
    return text


def _not_append_only(chat: Chat, index: int, part: str, text: str, subject: str) -> str:
    """Sentence for a template that writes a turn differently once the conversation goes on."""
    same = 0
    while same < min(len(part), len(text)) and part[same] == text[same]:
        same += 1
    return (
        f"{chat.where}: the chat template is not append-only at message {index + 1} of {len(chat.messages)} "
        f"(assistant): it writes {subject} as {part[same : same + 40]!r}, but as {text[same : same + 40]!r} in "
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
    """End of the turn without white space after its last control token."""
    last = end
    while last > start and ids[last - 1] not in control:
        last -= 1
    if last > start and not str(tokenizer.decode(list(ids[last:end]))).strip():
        return last
    return end


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Start and end of each run of True."""
    padded = [False, *mask, False]
    edges = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
