"""Text of tokens as they come, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.utils.chat_template.answers import answer_text

_UNFINISHED = "\ufffd"
"""What a character is shown as before all of its bytes are there."""
_WINDOW = 6
"""Tokens that are decoded again with the next one: enough for a character of several, and for spaces between words."""


class StreamedText:
    """Grows by tokens; says what can be shown, and whether a stop text was reached."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), marks: Sequence[str] = ()) -> None:
        """Args:
        tokenizer: of the model.
        stops: texts before which the answer ends.
        marks: texts that are not shown before they are whole.
        """
        self._tokenizer, self._stops, self._held = tokenizer, tuple(stops), (*stops, *marks)
        self._ids: list[int] = []
        self._done = self._begin = 0
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
        before = answer_text(self._tokenizer, self._ids[self._begin : self._done])
        grown = answer_text(self._tokenizer, self._ids[self._begin :])
        if grown.endswith(_UNFINISHED) and len(self._ids) - self._done < _WINDOW:
            return False
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += grown[len(before) :]
        self._begin, self._done = max(self._begin, self._done - _WINDOW), len(self._ids)
        found = [place for stop in self._stops if (place := self.text.find(stop, searched)) >= 0]
        if found:
            self.text, self.has_stopped = self.text[: min(found)], True
        return self.has_stopped

    def shown(self) -> str:
        """The text, less an end that may turn out to begin a stop text or a mark."""
        held = 0
        for text in self._held if not self.has_stopped else ():
            for length in range(min(len(text) - 1, len(self.text)), held, -1):
                if self.text.endswith(text[:length]):
                    held = length
                    break
        return self.text[: len(self.text) - held]
