"""Incremental decoding of sampled tokens, and stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.utils.chat_template.answers import answer_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""Decoded form of a character whose bytes are incomplete."""
_WINDOW = 6
"""Tokens that are decoded again with the next one: enough for a character of several, and for spaces between words."""


class StreamedText:
    """Text of an answer, grown token by token; detects stop texts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = (), marks: Sequence[str] = ()
    ) -> None:
        """Args:
        tokenizer: of the model.
        stops: texts before which the answer ends.
        marks: texts that are not shown before they are whole.
        """
        self._tokenizer, self._stops, self._marks = tokenizer, tuple(stops), (*stops, *marks)
        self._ids: list[int] = []
        self._num_decoded = self._begin = 0
        self.text = ""
        """Whole characters so far, without control tokens; cut where a stop text begins."""
        self.num_tokens = 0
        """Of the answer, the one that completed a stop text included."""
        self.has_stopped = False
        """A stop text was reached; later tokens are not read."""

    def add(self, token: int) -> bool:
        """One more token; True once a stop text was reached."""
        if self.has_stopped:
            return True
        self.num_tokens += 1
        self._ids.append(token)
        decoded = answer_text(self._tokenizer, self._ids[self._begin : self._num_decoded])
        extended = answer_text(self._tokenizer, self._ids[self._begin :])
        if extended.endswith(_UNFINISHED) and len(self._ids) - self._num_decoded < _WINDOW:
            return False
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += extended[len(decoded) :]
        self._begin, self._num_decoded = max(self._begin, self._num_decoded - _WINDOW), len(self._ids)
        stop_positions = [
            position for stop in self._stops if (position := self.text.find(stop, searched)) >= 0
        ]
        if stop_positions:
            self.text, self.has_stopped = self.text[: min(stop_positions)], True
        return self.has_stopped

    def visible_text(self) -> str:
        """The text, less an end that may turn out to begin a stop text or a mark."""
        num_hidden = 0
        for text in self._marks if not self.has_stopped else ():
            for length in range(min(len(text) - 1, len(self.text)), num_hidden, -1):
                if self.text.endswith(text[:length]):
                    num_hidden = length
                    break
        return self.text[: len(self.text) - num_hidden]
