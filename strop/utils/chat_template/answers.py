"""Text of an answer, without special tokens but those that open and close a part of it.

A tokenizer may have `<think>` or `<answer>` as special tokens, which decoding without special tokens takes away, so
that neither a reward nor a reader sees them. These stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.utils.chat_template import TemplateRefused, TemplateTooCostly, apply_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "strop:answer"
"""Stands for an answer in a rendered chat: nothing that a template writes by itself."""
_KEPT = "strop_kept_special_ids"
_OPENING = re.compile(r"(<|\[)([A-Za-z]\w*)(>|\])")
"""The form of a token that opens a part, such as <think> or [THINK]; a token with / behind the bracket closes it."""


def keep_special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] | None) -> None:
    """Let these special tokens stay in answers that are decoded from here on.

    Args:
        tokenizer: of the model.
        texts: of the tokens; None: pairs that open and close a part of an answer.

    Raises:
        ValueError: one is no special token.
    """
    special = special_tokens(tokenizer)
    if texts is None:
        setattr(tokenizer, _KEPT, None)  # found when the first answer is decoded
        return
    unknown = [text for text in texts if text not in special]
    if unknown:
        raise ValueError(
            f"model.keep_special_tokens has {unknown[0]!r}, which is no special token of this tokenizer; its special "
            f"tokens are {', '.join(special) or 'none'}"
        )
    setattr(tokenizer, _KEPT, {special[text]: text for text in texts})


def kept_special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Special tokens that stay in answers, in the order of their ids."""
    return tuple(text for _, text in sorted(_kept(tokenizer).items()))


def kept_special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Their ids."""
    return frozenset(_kept(tokenizer))


def answer_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text of an answer, without special tokens but those that are part of it."""
    ids, kept_texts = list(token_ids), _kept(tokenizer)
    if kept_texts.keys().isdisjoint(ids):
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    left_out = set(special_tokens(tokenizer).values()) - kept_texts.keys()
    return str(
        tokenizer.decode(
            [token_id for token_id in ids if token_id not in left_out], skip_special_tokens=False
        )
    )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the chat template ends an answer, where it is one of the tokenizer's added ones (<|im_end|>,
    <|eot_id|>); None where it ends answers with text, with nothing, or knows no such conversation.

    Models are trained to write it, whether or not it is also called the end of a sequence.
    """
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = apply_template(tokenizer, messages, None, tokenize=False, add_generation_prompt=False)
    except ValueError:
        return None
    _, answer, rest = text.rpartition(_ANSWER)
    ids = tokenizer.encode(rest.lstrip(), add_special_tokens=False) if answer else []
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Special tokens of a tokenizer, with their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    texts, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {
        **{str(token): index for index, token in added if token.special},
        **dict(zip(texts, ids, strict=True)),
    }


def _kept(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    kept: dict[int, str] | None = getattr(tokenizer, _KEPT, None)
    if kept is None:
        kept = _pairs(tokenizer)
        setattr(tokenizer, _KEPT, kept)
    return kept


def _pairs(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Special tokens that open and close a part of an answer: none that the template writes around a user's message, as
    [INST] and [/INST], and none with a task of its own, as <s> and </s>."""
    special = special_tokens(tokenizer)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    with_a_task = {str(getattr(tokenizer, name, None)) for name in names}
    pairs: dict[int, str] = {}
    for text, token_id in special.items():
        closing = f"{text[:1]}/{text[1:]}"
        if _OPENING.fullmatch(text) and closing in special and with_a_task.isdisjoint((text, closing)):
            pairs |= {token_id: text, special[closing]: closing}
    if pairs:
        rendered = _rendered_message(tokenizer)
        pairs = {token_id: text for token_id, text in pairs.items() if text not in rendered}
    return pairs


def _rendered_message(tokenizer: PreTrainedTokenizerBase) -> str:
    """A conversation of one message of the user through the template; empty where it has none, or refuses it."""
    if not tokenizer.chat_template:
        return ""
    message = [{"role": "user", "content": "Hello"}]
    try:
        return str(apply_template(tokenizer, message, None, tokenize=False, add_generation_prompt=False))
    except (TemplateRefused, TemplateTooCostly):
        return ""
