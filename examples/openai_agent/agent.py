"""An agent that multiplies with a calculator. It talks to OpenAI's API, and knows nothing of who trains its model."""

from __future__ import annotations

import json
import re
from typing import Any

from openai import DefaultHttpxClient, OpenAI

MAX_ANSWERS = 3
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 12*34."}},
            "required": ["expression"],
        },
    },
}
CONNECTIONS = DefaultHttpxClient()  # for all episodes of this process: making one takes longer than using it


def main(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Ask the question of a row, and do what the model calls for, until it answers without a call."""
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=CONNECTIONS)
    messages = list(row["prompt"])
    for _ in range(MAX_ANSWERS):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        answer = completion.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or []:
            result = {"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)}
            messages.append(result)
        if not answer.tool_calls:
            return


def multiply(arguments: str) -> str:
    """The product that a call asks for, or a sentence about what is wrong with it."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "no expression"
    factors = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression.replace(" ", ""))
    return str(int(factors[1]) * int(factors[2])) if factors else "not two numbers"
