"""Last tokens of trained answers, which generation should stop at, here and in other programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from strop.data.chat import control_token_ids
from strop.data.sft.conversations import has_marks, runs


class AnswerEnds:
    """The last trained token of each conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Begin with none.

        Args:
            tokenizer: with the chat template.
        """
        self._tokenizer, self._control = tokenizer, control_token_ids(tokenizer)
        self._counts: Counter[int] = Counter()
        self._doubled: Counter[int] = Counter()
        """Of answers that end twice."""

    def add(self, token_ids: Sequence[int], mask: Sequence[Any]) -> None:
        """Add a conversation, whose mask is true on trained tokens."""
        if trained := runs([bool(is_trained) for is_trained in mask]):
            start, end = trained[-1]
            last = token_ids[end - 1]
            self._counts[last] += 1
            if last in self._control and end - start > 1 and token_ids[end - 2] == last:
                self._doubled[last] += 1

    def warning(self) -> str:
        """Warning about answers that end twice, or without a control token; empty where none does."""
        if self._doubled:
            token = str(self._tokenizer.decode([*self._doubled][:1]))
            return (
                f"WARNING: {self._doubled.total()} answers end twice: their text has the {token!r} that the chat "
                f"template writes, too; remove it from the rows"
            )
        count = sum(count for token, count in self._counts.items() if token not in self._control)
        if not count:
            return ""
        advice = "close assistant turns"
        if self._tokenizer.chat_template and has_marks(self._tokenizer):
            advice = "include the end of a turn in its {% generation %} blocks"
        return (
            f"WARNING: {count} answers end without a control token, so the model will not learn to stop: the chat "
            f"template should {advice}"
        )

    def note(self, ends: Collection[int]) -> str:
        """Note about control tokens that end answers and are none of `ends`, the tokens that other programs stop at;
        empty where there is none."""
        others = {
            token: n for token, n in self._counts.items() if token in self._control and token not in ends
        }
        if not others:
            return ""
        tokens = " and ".join(repr(self._tokenizer.decode([token])) for token in sorted(others))
        return (
            f"{sum(others.values())} answers end with {tokens}, which neither the tokenizer nor the generation "
            f"settings of the model call an end: strop stops there, and other programs will run on. For them, put "
            f"its number into eos_token_id of generation_config.json in the model folder"
        )
