"""The checker of GSM8K answers: a tool that answers whether a number is right."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
from strop.agents.tools.schemas import OpenAIFunctionToolSchema

logger = logging.getLogger(__name__)

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

    create_kwargs: ground_truth, the right answer; not given: the row's ground truth. A call that is no better than the
    ones before it costs WORSE_PENALTY. A loop of one's own that gives neither gets 0, as of verl's tool, and a warning.
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
        arguments = {**(kwargs.get("create_kwargs") or {}), **kwargs}
        self._episodes[instance_id] = {"ground_truth": arguments.get("ground_truth"), "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool.

        Raises:
            ToolUnavailable: neither create_kwargs nor the row has the right answer.
        """
        episode = self._episodes[instance_id]
        answer = str(parameters.get("answer", ""))
        truth, agent_data = episode["ground_truth"], kwargs.get("agent_data")
        if truth is None:
            truth = getattr(agent_data, "ground_truth", None)
        if truth is None:
            problem = (
                f"tool {self.name} has no right answer to compare with: give each row a ground truth, or "
                f"extra_info.tools_kwargs.{self.name}.create_kwargs.ground_truth"
            )
            if agent_data is not None:
                raise ToolUnavailable(problem)
            logger.warning("%s; %r counts as wrong", problem, answer[:40])
        reward = float(truth is not None and _normal(answer) == _normal(str(truth)))
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
