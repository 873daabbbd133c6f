"""Text from outside that spells out the control tokens of a tokenizer, and is to stay text.

A tokenizer makes `<|im_end|>` one token wherever it stands in rendered text. In the result of a tool, the observation
of an environment or an answer that another model reads, that would end the turn and let the text go on as somebody
else: the structure of the conversation would belong to whoever wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_ROUNDS = 8


class ControlText:
    """The control tokens of a tokenizer as they are spelled.

    These are the special tokens, and of the other added ones those that the chat template writes, such as <tool_call>.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Args:
        tokenizer: with or without a chat template.
        """
        self._tokenizer = tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        control = {
            number: token for number, token in added.items() if token.special or str(token) in template
        }
        names = {str(token) for token in control.values()} | set(getattr(tokenizer, "all_special_tokens", []))
        self._names = any_of(name for name in names if len(name.strip()) > 1)
        self._ids = {number for number, token in control.items() if len(str(token).strip()) > 1}
        # A normalizer may make one of other characters: of wide ones, or of capitals.
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._is_normalized = normalizer is not None and any(token.normalized for token in control.values())

    def as_plain_text(self, text: str) -> str:
        """The text with a space in every control token that it spells out, so that none is made of it."""
        text = self._names.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return self._after_normalizing(text) if self._is_normalized else text

    def _after_normalizing(self, text: str) -> str:
        for _ in range(_MAX_ROUNDS):
            encoded = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            spans = [span for number, span in pairs if number in self._ids]
            if not spans:
                return text
            for start, _ in reversed(spans):
                text = f"{text[: start + 1]} {text[start + 1 :]}"
        return re.sub(
            r"[^\w\s]", " ", text
        )  # whatever still makes one, it is made of other characters than words


_FORMS = re.compile(
    r"<\|[^\s|<>]{1,40}\|>|<｜[^\s｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)


def without_common_control_text(text: str) -> str:
    """As `as_plain_text`, for a reader whose tokenizer is not known: the forms that control tokens commonly have."""
    return _FORMS.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for each of some texts, the longest first; it matches nothing where there is none."""
    alternatives = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text)
    return re.compile(alternatives or r"(?!)")
