"""Anchor groups of GiGPO (torch-free): answers to a prompt that were given in the same state."""

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
    numbers = {
        prompt: _state_numbers(sorted(states_of_prompt - {""}), similarity)
        for prompt, states_of_prompt in texts.items()
    }
    return [
        numbers[prompt][state] if state else UNKNOWN for state, prompt in zip(states, prompts, strict=True)
    ]


def _state_numbers(texts: Sequence[str], similarity: float) -> dict[str, int]:
    """The state of each text, by number; the texts are distinct and in order."""
    if similarity == 1:
        return {text: number for number, text in enumerate(texts)}
    first: list[str] = []
    numbers = {}
    for text in texts:
        number = next(
            (n for n, known_text in enumerate(first) if _are_alike(text, known_text, similarity)), len(first)
        )
        if number == len(first):
            first.append(text)
        numbers[text] = number
    return numbers


def _are_alike(left: str, right: str, similarity: float) -> bool:
    """Upper bounds of the share first, which are quick."""
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    return (
        matcher.real_quick_ratio() >= similarity
        and matcher.quick_ratio() >= similarity
        and matcher.ratio() >= similarity
    )
