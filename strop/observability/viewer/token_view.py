"""One trajectory token by token: who wrote each token, how likely it was, and by which version of the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from strop.utils.terminal import plain, shorten

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

GIVEN_STYLE = "cyan"
"""Tokens that a tool, an environment or a user wrote; they are not trained."""
_BROKEN = "\ufffd"
_MAX_JOINED = 6
"""Tokens of bytes that make one character."""
SAMPLED_STYLES = ((0.5, "green"), (0.1, "yellow"), (0.01, "dark_orange"), (0.0, "bold red"))
"""Lowest probability and style of a token that the policy sampled, most likely first."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of a response."""

    position: int
    id: int
    text: str
    is_sampled: bool
    log_prob: float
    version: int

    @property
    def probability(self) -> float:
        """Under the policy that sampled it."""
        return math.exp(min(self.log_prob, 0.0))

    @property
    def style(self) -> str:
        """Its colour on a terminal."""
        if not self.is_sampled:
            return GIVEN_STYLE
        likely = (style for lowest, style in SAMPLED_STYLES if self.probability >= lowest)
        return next(likely, SAMPLED_STYLES[-1][1])  # NaN is not above anything


def response_tokens(row: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> list[Token]:
    """The tokens of a row of the sample store, in order; none when it was not played."""
    names = ("response_ids", "response_mask", "rollout_log_probs", "versions")
    present = [row[name] for name in names if row.get(name) is not None]
    if len(present) < len(names) or len(set(map(len, present))) > 1:
        return []  # it was not played, or the file was changed
    texts = pieces(row["response_ids"], decode)
    columns = zip(*present, strict=True)
    return [
        Token(
            position=position,
            id=token_id,
            text=texts[position],
            is_sampled=is_sampled,
            log_prob=log_prob,
            version=version,
        )
        for position, (token_id, is_sampled, log_prob, version) in enumerate(columns)
    ]


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token behind the one before, which joined are the text of all; of a character that several
    tokens make, all of it at the last of them."""
    texts: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = _text_behind(before, waiting, decode)
        if _BROKEN in text and len(waiting) < _MAX_JOINED:
            texts.append("")
        else:
            texts.append(text)
            before, waiting = waiting, []
    if waiting:
        texts[-1] = _text_behind(before, waiting, decode)
    return texts


def _text_behind(before: Sequence[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The text of tokens behind others: at the beginning of a text some tokenizers drop the space of a word."""
    start, whole = decode(before) if before else "", decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else decode(ids)


def token_text(tokens: Sequence[Token]) -> Text:
    """The response with a colour per token, a line for each span of one writer."""
    from rich.text import Text

    text = Text()
    for number, (is_sampled, span) in enumerate(groupby(tokens, key=lambda token: token.is_sampled)):
        members = list(span)
        origin = "sampled" if is_sampled else "given"
        text.append(f"{chr(10) if number else ''}{origin} [{len(members)}]  ", style="bold")
        text.append(coloured(members))
    return text


def coloured(tokens: Sequence[Token]) -> Text:
    """The text of the tokens, each in its colour."""
    from rich.text import Text

    text = Text()
    for token in tokens:
        text.append(plain(token.text), style=token.style)
    return text


def token_table(tokens: Sequence[Token]) -> RenderableType:
    """One line per token."""
    from rich.table import Table
    from rich.text import Text

    table = Table("position", "id", "token", "written by", "log-prob", "probability", "version", box=None)
    for token in tokens:
        numbers = (
            (f"{token.log_prob:.4f}", f"{token.probability:.4f}", str(token.version))
            if token.is_sampled
            else ("", "", "")
        )
        table.add_row(
            str(token.position),
            str(token.id),
            Text(repr(shorten(token.text, 30))[1:-1], style=token.style),
            "the policy" if token.is_sampled else "given",
            *numbers,
        )
    return table


def legend() -> Text:
    """Legend of the colours."""
    from rich.text import Text

    text = Text("token colours: ")
    for lowest, style in SAMPLED_STYLES:
        text.append(f"p >= {lowest:g}  " if lowest else "less  ", style=style)
    text.append("given, not trained", style=GIVEN_STYLE)
    return text


def summary(tokens: Sequence[Token]) -> str:
    """Counts and the mean log-prob, in one line."""
    sampled = [token for token in tokens if token.is_sampled]
    if not sampled:
        return f"{len(tokens)} tokens, none sampled"
    mean = sum(token.log_prob for token in sampled) / len(sampled)
    versions = sorted({token.version for token in sampled})
    by = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    return f"{len(tokens)} tokens, {len(sampled)} sampled by {by}, mean log-prob {mean:.3f}"
