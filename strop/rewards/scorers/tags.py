"""Text in `<answer>...</answer>`, found in one pass: an expression that looks for the end of each beginning anew takes
minutes over a long response that opens tags and closes none."""

from __future__ import annotations

import re

_EXACT = re.compile("<answer>"), re.compile("</answer>")
_ANY_CASE = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)


def last_tagged(text: str, *, ignore_case: bool = False) -> str | None:
    """Content of the last pair of tags; None where there is none."""
    opening, closing = _ANY_CASE if ignore_case else _EXACT
    content, at = None, 0
    while (start := opening.search(text, at)) and (end := closing.search(text, start.end())):
        content, at = text[start.end() : end.start()], end.end()
    return content
