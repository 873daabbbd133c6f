"""Tools: what an agent can do beside writing.

agent.py             The agent with tools
arguments.py         Arguments of a call against the schema that the prompt shows, for tools of every kind
base.py              A tool, and what it answers
calculator.py        Arithmetic, with a parser of its own
call_stats.py        What became of the calls of an episode
class_loading.py     What files of tools, interactions and environments name
conversation.py      The token record of an episode of several turns
functions.py         Plain functions as tools
gsm8k.py             The checker of GSM8K answers
images.py            Images that agents come by, as results of tools
kit.py               The tools of a run
loading.py           The tools of a run
mcp.py               Tools of MCP servers, over stdio or streamable HTTP, through the official package
mcp_config.py        Entries for MCP servers in the YAML file of tools, and what a server may offer
mcp_transport.py     How bytes of MCP servers come in
multi_turn.py        The turns of an episode
parsed_output.py     Answers of the model in their parts
python_sandbox.py    Python programs of the model, run in the sandbox of the run
schemas.py           Schemas and calls in the function form of OpenAI
search.py            Search in a corpus of one's own, without any server
search_index.py      A corpus of one's own in one file
session.py           The tools of one episode
settings.py          Settings of tools, among those of agents
template_probe.py    What a chat template does with conversations that go on, found out once per model by rendering
                     examples
templates.py         Chat templates of conversations that go on
threads.py           Functions that may hang, in threads that nobody waits for
verl_class_names.py  Classes of verl that a tool, interaction or loop file may name, and what stands for them here
formats/             How models write tool calls
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
    from strop.agents.tools.call_stats import CallResult
    from strop.agents.tools.functions import (
        FUNCTION_TOOL_REGISTRY,
        FunctionTool,
        function_tool,
        load_function_tools_from_path,
    )
    from strop.agents.tools.kit import tool_session
    from strop.agents.tools.loading import load_all_tools
    from strop.agents.tools.schemas import (
        OpenAIFunctionCallSchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionParsedSchema,
        OpenAIFunctionPropertySchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolCall,
        OpenAIFunctionToolSchema,
    )
    from strop.agents.tools.session import ToolLimits, ToolSession

__all__ = [
    "FUNCTION_TOOL_REGISTRY",
    "BaseTool",
    "CallResult",
    "FunctionTool",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "ToolLimits",
    "ToolResponse",
    "ToolSession",
    "ToolUnavailable",
    "function_tool",
    "load_all_tools",
    "load_function_tools_from_path",
    "tool_session",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".base": "BaseTool ToolResponse ToolUnavailable",
        ".functions": "FUNCTION_TOOL_REGISTRY FunctionTool function_tool load_function_tools_from_path",
        ".kit": "tool_session",
        ".loading": "load_all_tools",
        ".schemas": "OpenAIFunctionCallSchema OpenAIFunctionParametersSchema OpenAIFunctionParsedSchema "
        "OpenAIFunctionPropertySchema OpenAIFunctionSchema OpenAIFunctionToolCall "
        "OpenAIFunctionToolSchema",
        ".call_stats": "CallResult",
        ".session": "ToolLimits ToolSession",
    },
)
