"""The checker of GSM8K answers: the model hands its answer in and hears whether it is right."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from strop.tools.base import BaseTool, ToolResponse
from strop.tools.schemas import OpenAIFunctionToolSchema

WORSE_PENALTY = -0.05
"""Reward of a call that does not improve on the best answer so far."""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc_gsm8k_reward",
        "description": "Check an answer to the problem. Returns 1.0 if it is right and 0.0 otherwise.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The answer, digits alone."}},
            "required": ["answer"],
        },
    },
}


class Gsm8kTool(BaseTool):
    """Rewards of the episode: 1 once an answer was right, else 0.

    create_kwargs: ground_truth, the right answer. A call that is no better than the ones before it costs
    WORSE_PENALTY.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._episodes: dict[str, dict[str, Any]] = {}

    def wrong_arguments(self, arguments: Mapping[str, Any]) -> str:
        """As of BaseTool; a number does for the answer, which the schema shows as text."""
        answer = arguments.get("answer")
        is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool)
        return super().wrong_arguments({**arguments, "answer": "0"} if is_number else arguments)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """As of BaseTool."""
        instance_id = instance_id or str(uuid.uuid4())
        given = {**(kwargs.get("create_kwargs") or {}), **kwargs}
        if "ground_truth" not in given:
            raise ValueError(
                f"tool {self.name} needs the right answer: give each row extra_info.tools_kwargs."
                f"{self.name}.create_kwargs.ground_truth"
            )
        self._episodes[instance_id] = {"ground_truth": str(given["ground_truth"]), "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool."""
        episode = self._episodes[instance_id]
        answer = str(parameters.get("answer", ""))
        reward = float(_normal(answer) == _normal(episode["ground_truth"]))
        change = 0.0 if reward > episode["reward"] else WORSE_PENALTY
        episode["reward"] = max(episode["reward"], reward)
        return ToolResponse(text=f"Current parsed answer: {answer!r}, reward: {reward}"), change, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """As of BaseTool."""
        return float(self._episodes[instance_id]["reward"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """As of BaseTool."""
        self._episodes.pop(instance_id, None)


def _normal(answer: str) -> str:
    """A number without its separators, currency, sentence mark and needless zeros."""
    text = answer.replace("#", "").replace(",", "").replace("$", "").strip().rstrip(".")
    try:
        value = float(text)
    except ValueError:
        return text
    return str(int(value)) if value.is_integer() else str(value)
