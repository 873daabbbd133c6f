"""An agent of pydantic-ai that knows nothing of strop; run by the Python of an environment that has the package.

It is given the address and the key, uses a tool twice in one conversation, asks on, and prints what it heard.
"""

import asyncio
import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

BASE_URL, API_KEY, STREAMS = sys.argv[1], sys.argv[2], sys.argv[3] == "streams"
model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
agent = Agent(model, instructions="Use the tool.")
looked_up: list[str] = []


@agent.tool_plain
def look_up(value: str) -> str:
    """Look a word up."""
    looked_up.append(value)
    return "twelve"


async def listen(context: Any, events: Any) -> None:
    async for _ in events:
        pass


async def main() -> None:
    first = await agent.run("How much?", event_stream_handler=listen if STREAMS else None)
    second = await agent.run("Sure?", message_history=first.all_messages())
    print(json.dumps({"said": [first.output, second.output], "looked_up": looked_up}))


asyncio.run(main())
