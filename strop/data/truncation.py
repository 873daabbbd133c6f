"""Cutting token ids to a limit, around what must stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Side = Literal["left", "right", "middle"]


def truncate(
    token_ids: Sequence[int], limit: int, side: Side, spans: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """At most `limit` of the token ids.

    Args:
        token_ids: of a prompt.
        limit: how many may stay.
        side: where tokens are taken away: `left` keeps the end, `right` the beginning, `middle` the first half
            (rounded down) and the last half.
        spans: [start, end) of tokens that stand for an image, a video or a sound. They are kept whole and do
            not move relative to the text around them; only text is taken away.

    Raises:
        ValueError: the spans alone are longer than the limit.
    """
    excess = len(token_ids) - limit
    if excess <= 0:
        return list(token_ids)
    is_fixed = [False] * len(token_ids)
    for start, end in spans:
        is_fixed[start:end] = [True] * (end - start)
    text = [position for position, fixed in enumerate(is_fixed) if not fixed]
    if excess > len(text):
        raise ValueError(
            f"the media of the prompt take {len(token_ids) - len(text)} tokens, over the limit of {limit}; they "
            f"are never cut: raise the limit or use fewer or smaller ones"
        )
    num_kept = len(text) - excess
    first = {"left": 0, "right": num_kept, "middle": num_kept // 2}[side]
    removed = set(text[first : first + excess])
    return [token for position, token in enumerate(token_ids) if position not in removed]
