"""An agent of smolagents that knows nothing of strop; run by the Python of an environment that has the package.

It is given the address and the key, uses a tool twice, gives its answer with another, and prints what it heard.
"""

import json
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

BASE_URL, API_KEY = sys.argv[1], sys.argv[2]
looked_up: list[str] = []


@tool
def look_up(value: str) -> str:
    """Look a word up.

    Args:
        value: The word.
    """
    looked_up.append(value)
    return "twelve"


model = OpenAIServerModel(model_id="any", api_base=BASE_URL, api_key=API_KEY, tool_choice="auto")
agent = ToolCallingAgent(tools=[look_up], model=model, max_steps=5, verbosity_level=0)
print(json.dumps({"said": [str(agent.run("How much?"))], "looked_up": looked_up}))
