"""Tools: what an agent can do beside writing.

schemas.py     schemas and calls in the function form of OpenAI
base.py        BaseTool and ToolResponse
parsed_output.py     an answer of the model in its parts; images.py: images that tools return
arguments.py   arguments of a call against the tool's schema
functions.py   @function_tool: plain functions as tools
loading.py     tools of a run, from YAML, files and the registry
class_loading.py       classes and YAML that files of tools, interactions and environments name
session.py     the tools of one episode: create, execute, rewards, release
call_stats.py     what became of their calls, and what is counted of them
kit.py         tools of a run, chosen by rows and given to episodes; settings.py names them
agent.py       the agent that calls them
multi_turn.py       what agents with replies share: answer and reply, until one of them ends it
conversation.py  the token record of several turns; templates.py: which tokens a chat template puts between them, by
                 its template_probe.py
threads.py     functions that may hang, with a deadline
mcp.py         tools of MCP servers (mcp_config.py, mcp_transport.py)
search.py      a corpus of one's own, and its index (search_index.py; data_index.py: `strop data index`)
python_sandbox.py  programs of the model
calculator.py  arithmetic
gsm8k.py       checks an answer, and rewards it
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
