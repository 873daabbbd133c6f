"""Thinking before the answer proper, as text between <think> and </think>."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thinking(text: str, *, begins_in_thinking: bool) -> tuple[str, str]:
    """Thinking, and what follows it.

    Calls are looked for in the second part alone: what a model thinks of doing it has not done.

    Args:
        text: of an answer.
        begins_in_thinking: the prompt ended with <think>.
    """
    thought, closed, answer = text.rpartition(CLOSE)
    if closed:
        return thought.partition(OPEN)[2] if OPEN in thought else thought, answer
    if begins_in_thinking:
        return text, ""
    before, opened, open_thought = text.partition(OPEN)
    return (open_thought, before) if opened else ("", text)
