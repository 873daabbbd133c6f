"""Which answers to a prompt were given in the same state: the anchor groups of GiGPO (torch-free)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

UNKNOWN = -1
"""Number of a state that nobody named: it is like no other."""


def anchor_ids(states: Sequence[str], prompts: Sequence[Hashable], *, similarity: float = 1.0) -> list[int]:
    """A number per answer, from 0: equal for the answers to one prompt that were given in the same state.

    Args:
        states: of each answer, as text; empty where nobody named it.
        prompts: of each answer; states of different prompts are never compared, and their numbers begin anew.
        similarity: 1: states are the same where their texts are equal. Below: also where the share of characters in
            matching blocks, 2 * matches / (length + length), is at least this. Texts are looked at in alphabetical
            order, and each joins the first state that it is like, so the order of the answers does not matter.
    """
    texts: dict[Hashable, set[str]] = {}
    for state, prompt in zip(states, prompts, strict=True):
        texts.setdefault(prompt, set()).add(state)
    numbers = {prompt: _numbered(sorted(found - {""}), similarity) for prompt, found in texts.items()}
    return [
        numbers[prompt][state] if state else UNKNOWN for state, prompt in zip(states, prompts, strict=True)
    ]


def _numbered(texts: Sequence[str], similarity: float) -> dict[str, int]:
    """The state of each text, by number; the texts are distinct and in order."""
    if similarity == 1:
        return {text: number for number, text in enumerate(texts)}
    first: list[str] = []
    numbers = {}
    for text in texts:
        found = next((n for n, other in enumerate(first) if _are_alike(text, other, similarity)), len(first))
        if found == len(first):
            first.append(text)
        numbers[text] = found
    return numbers


def _are_alike(text: str, other: str, similarity: float) -> bool:
    """Upper bounds of the share first, which are quick."""
    matcher = SequenceMatcher(None, text, other, autojunk=False)
    return (
        matcher.real_quick_ratio() >= similarity
        and matcher.quick_ratio() >= similarity
        and matcher.ratio() >= similarity
    )
