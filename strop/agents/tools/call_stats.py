"""Results of an episode's tool calls, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.agents.tools.base import ToolResponse
from strop.agents.tools.images import as_read
from strop.protocol.trajectory import Media
from strop.utils.sanitize import storable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """Result of one call."""

    name: str
    text: str
    """Text shown to the model, beside images."""
    images: tuple[Media, ...] = ()
    """Images shown to the model, before the text."""
    reward: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the call, from the tool."""
    error: str = ""
    """Kind of failure: malformed, unknown_tool, bad_arguments, failed, timeout, too_many, not_shown (images or
    videos that the model cannot be shown); empty when it worked."""
    seconds: float = 0.0
    response: ToolResponse | None = None
    """Returned by the tool, images included."""

    @property
    def as_read(self) -> str:
        """The text with a word for each image."""
        return as_read(self.text, len(self.images))

    @property
    def stored(self) -> dict[str, Any]:
        """Facts of the call for the sample store, beside its text."""
        record: dict[str, Any] = {"seconds": round(self.seconds, 3)}
        if self.reward:
            record["reward"] = self.reward
        if self.error:
            record["error"] = self.error
        if self.facts:
            record["facts"] = storable(self.facts)
        return record


def call_numbers(
    results: Sequence[CallResult], tool_names: Collection[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Metrics of calls: of all, and by name of each tool that was called.

    Args:
        results: of the calls.
        tool_names: names of tools; others are names that the model made up.
        tokenizer: measures results.
    """
    numbers = {
        "tool_call_counts": float(len(results)),
        "tool_rewards": float(sum(result.reward for result in results)),
        "tool_errors": float(sum(bool(result.error) for result in results)),
    }
    for name in sorted({result.name for result in results} & set(tool_names)):
        tool_results = [result for result in results if result.name == name]
        lengths = [
            len(tokenizer(result.text, add_special_tokens=False)["input_ids"]) for result in tool_results
        ]
        numbers |= {
            f"tools/{name}/calls": float(len(tool_results)),
            f"tools/{name}/errors": float(sum(bool(result.error) for result in tool_results)),
            f"tools/{name}/seconds": math.fsum(result.seconds for result in tool_results),
            f"tools/{name}/result_tokens": float(sum(lengths)),
        }
    return numbers
