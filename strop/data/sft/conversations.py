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
import re
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import Chat, control_token_ids, encode, render, template_refused
from strop.utils.chat_template import TemplateRefused, apply_template

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    *,
    first_trained: int = 0,
    trained: Collection[int] | None = None,
    control_ids: Collection[int] | None = None,
) -> tuple[list[int], list[bool]]:
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
    control = control_token_ids(tokenizer) if control_ids is None else control_ids
    answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    trained_answers = [
        number for number in answers if number >= first_trained and (trained is None or number in trained)
    ]
    marked = _tokenize_marked(tokenizer, chat) if has_marks(tokenizer, chat.tools) else None
    if marked is not None and trained_answers != answers:
        trained_marks = _marks_of(tokenizer, chat, marked[1], answers, trained_answers)
        marked = None if trained_marks is None else (marked[0], trained_marks)
    if marked is not None:
        ids, mask = marked
    else:
        text = render(tokenizer, chat, add_generation_prompt=False)
        spans = _assistant_spans(tokenizer, chat, text, trained_answers)
        ids, bounds = _encode_cut(tokenizer, text, [cut for span in spans for cut in span])
        mask = [False] * len(ids)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            mask[start:end] = [True] * (end - start)
    for start, end in runs(mask):
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


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, text: str, trained: Sequence[int]
) -> list[tuple[int, int]]:
    """Start and end of the assistant turns of these numbers, in characters of the rendered conversation.

    A message that opens the conversation is given: no prompt precedes it that a policy could answer.
    """
    spans = []
    for index in trained:
        if index == 0:
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
