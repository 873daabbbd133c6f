"""Tools that an agent calls.

agent.py             The agent with tools
arguments.py         Validation of a call's arguments against the schema of the tool
base.py              BaseTool and ToolResponse
calculator.py        Calculator tool
call_stats.py        Results of tool calls, and their metrics
class_loading.py     Classes and YAML files named by settings of tools, interactions and environments
conversation.py      Token record of an episode of several turns
functions.py         Plain functions as tools
gsm8k.py             Checker of GSM8K answers
images.py            Images in results of tools
plugin.py            Plugin of tools: loaded, checked, given to episodes
loading.py           Tools of the settings' files
mcp.py               Tools of MCP servers, over stdio or streamable HTTP, through the official package
mcp_config.py        Entries for MCP servers in the YAML file of tools, and checks of their tools
mcp_transport.py     Bounded transports of MCP servers
multi_turn.py        Turns of an episode
parsed_output.py     Parsed answers: thinking, content and calls
python_sandbox.py    Python programs of the model, run in the sandbox of the run
schemas.py           Schemas and calls in the function form of OpenAI
search.py            Search tool over a local index
search_index.py      Full-text index of a corpus, in one file
session.py           Tools of one episode
settings.py          Settings of tools, among those of agents
template_probe.py    Properties of a chat template, probed by rendering examples
templates.py         Chat templates of conversations that go on
threads.py           Threads of functions that may hang
verl_class_names.py  Classes of verl that a tool, interaction or loop file may name, and their equivalents
formats/             Formats of tool calls
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
    from strop.agents.tools.loading import load_all_tools
    from strop.agents.tools.plugin import tool_session
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
        ".plugin": "tool_session",
        ".loading": "load_all_tools",
        ".schemas": "OpenAIFunctionCallSchema OpenAIFunctionParametersSchema OpenAIFunctionParsedSchema "
        "OpenAIFunctionPropertySchema OpenAIFunctionSchema OpenAIFunctionToolCall "
        "OpenAIFunctionToolSchema",
        ".call_stats": "CallResult",
        ".session": "ToolLimits ToolSession",
    },
)
