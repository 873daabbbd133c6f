"""What became of the calls of an episode."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.tools.base import ToolResponse
from strop.agents.tools.images import as_read
from strop.protocol.trajectory import Media
from strop.utils.sanitize import storable


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What became of one call."""

    name: str
    text: str
    """What the model is shown, beside images."""
    images: tuple[Media, ...] = ()
    """Images that the model is shown, before the text."""
    reward: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the tool told about the call."""
    error: str = ""
    """Kind of failure: malformed, unknown_tool, bad_arguments, failed, timeout, too_many, not_shown (images or
    videos that the model cannot be shown); empty when it worked."""
    seconds: float = 0.0
    response: ToolResponse | None = None
    """As the tool gave it, images included."""

    @property
    def as_read(self) -> str:
        """The text with a word for each image."""
        return as_read(self.text, len(self.images))

    @property
    def kept(self) -> dict[str, Any]:
        """What the sample store keeps of the call beside its text."""
        kept: dict[str, Any] = {"seconds": round(self.seconds, 3)}
        if self.reward:
            kept["reward"] = self.reward
        if self.error:
            kept["error"] = self.error
        if self.facts:
            kept["facts"] = storable(self.facts)
        return kept


def call_numbers(results: Sequence[CallResult], known: Collection[str], tokenizer: Any) -> dict[str, float]:
    """What is counted of calls: all of them, and by name those of each tool that was called.

    Args:
        results: of the calls.
        known: names of tools; others are names that the model made up.
        tokenizer: measures what the model was shown.
    """
    counted = {
        "tool_call_counts": float(len(results)),
        "tool_rewards": float(sum(result.reward for result in results)),
        "tool_errors": float(sum(bool(result.error) for result in results)),
    }
    for name in sorted({result.name for result in results} & set(known)):
        own = [result for result in results if result.name == name]
        lengths = [len(tokenizer(result.text, add_special_tokens=False)["input_ids"]) for result in own]
        counted |= {
            f"tools/{name}/calls": float(len(own)),
            f"tools/{name}/errors": float(sum(bool(result.error) for result in own)),
            f"tools/{name}/seconds": math.fsum(result.seconds for result in own),
            f"tools/{name}/result_tokens": float(sum(lengths)),
        }
    return counted
