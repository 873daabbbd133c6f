"""A teacher of school maths: says whether the answer is right, and asks for another one where it is not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from strop.agents.interactions.base import BaseInteraction

_NUMBER = re.compile(r"-?\$?\d[\d.,]*")
_TAIL_CHARACTERS = 300
"""The answer is looked for at the end, as the scorer does."""

RIGHT = "That is right."
WRONG = "That is not right. Look for the mistake and answer again."
NO_NUMBER = "There is no number in the answer. Answer again."


class Gsm8kInteraction(BaseInteraction):
    """The number after `####` counts where that is written, else the last one. A right one is worth 1 and ends the
    conversation.

    Arguments of a row: ground_truth.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """As of BaseInteraction."""
        if kwargs.get("ground_truth") is None:
            raise ValueError(
                f"interaction {self.name} needs the right answer: give each row extra_info.interaction_kwargs."
                f"ground_truth"
            )
        instance_id = instance_id or str(uuid.uuid4())
        self._truths[instance_id], self._scores[instance_id] = str(kwargs["ground_truth"]), 0.0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, Mapping[str, Any]]:
        """As of BaseInteraction."""
        answers = [message for message in messages if message["role"] == "assistant"]
        text = str(answers[-1]["content"])[-_TAIL_CHARACTERS:] if answers else ""
        _, is_marked, marked = text.rpartition("####")
        numbers = [value for match in _NUMBER.findall(marked) if (value := _value(match)) is not None]
        number = numbers[0 if is_marked else -1] if numbers else None
        is_right = number is not None and number == _value(self._truths[instance_id])
        self._scores[instance_id] = float(is_right)
        reply = RIGHT if is_right else WRONG if numbers else NO_NUMBER
        return is_right, reply, float(is_right), {"acc": is_right}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 when the last answer was right."""
        return self._scores.get(instance_id, 0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """As of BaseInteraction."""
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)


def _value(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[\s,$]", "", text).rstrip("."))
    except InvalidOperation:
        return None
