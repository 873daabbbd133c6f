"""Plain functions as tools: the schema comes from signature and docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.agents.tools.arguments import wrong_arguments
from strop.agents.tools.base import BaseTool, ToolResponse, response_of
from strop.agents.tools.schemas import OpenAIFunctionSchema, OpenAIFunctionToolSchema, schema_mapping
from strop.agents.tools.threads import answer_in_thread
from strop.utils.registry import Registry
from strop.utils.trust import ask
from strop.utils.user_files import load_user_file

FUNCTION_TOOL_REGISTRY: Registry[FunctionTool] = Registry("tool", group="strop.tools")
"""Function tools by name, those of every file and package that was loaded in this process."""


class FunctionTool(BaseTool):
    """A function behind the interface of tools. It has no state per episode.

    A function may return text, a ToolResponse, any other plain value (shown as JSON), or a tuple of one of these, a
    reward and a dictionary of facts, the latter two optional. Functions that are not async run in a thread.
    """

    def __init__(self, function: Callable[..., Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__({}, tool_schema)
        self.function = function

    def wrong_arguments(self, arguments: Mapping[str, Any]) -> str:
        """As of BaseTool; a function takes its own parameters and no others."""
        return wrong_arguments(arguments, {**self._parameters, "additionalProperties": False})

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool."""
        if inspect.iscoroutinefunction(self.function):
            returned = await self.function(**parameters)
        else:
            returned = await answer_in_thread(self.function, **parameters)
        return read_returned(returned, self.name)


def read_returned(returned: object, name: str) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Response, reward and facts of a value that a function tool returned.

    Raises:
        TypeError: a tool may not return it.
    """
    reward, facts = 0.0, {}
    if isinstance(returned, tuple):
        if not 1 <= len(returned) <= 3:
            raise TypeError(
                f"tool {name!r} returned a tuple of {len(returned)}; return (response[, reward[, metrics]])"
            )
        reward = float(returned[1] or 0.0) if len(returned) > 1 else 0.0  # checked by the session
        facts = dict(returned[2] or {}) if len(returned) > 2 else {}
        returned = returned[0]
    response = response_of(returned)
    if response is None:
        raise TypeError(
            f"tool {name!r} returned a {type(returned).__name__}; return a string, a plain value (number, list, "
            f"dictionary, None) or a ToolResponse"
        )
    return response, reward, facts


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: Mapping[str, Any] | OpenAIFunctionToolSchema | OpenAIFunctionSchema | None = None,
) -> Any:
    """Decorator that makes a function a tool: @function_tool, @function_tool("name"), @function_tool(schema=...).

    The schema comes from type hints and a docstring with an `Args:` section, unless it is given, as a mapping or as an
    object with `model_dump`; of the function, or of the tool around it. The function itself stays as it is.

    Raises:
        ValueError: another function has the name, or the function takes *args or **kwargs.
        TypeError: no schema can be made, because a type hint or a description is missing.
    """
    if callable(name):
        return _register(name, None, None)

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        return _register(function, name, schema)

    return add


def _register(function: Callable[..., Any], name: str | None, schema: object) -> Callable[..., Any]:
    label = name or function.__name__
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ValueError(
            f"tool {label!r} takes *args or **kwargs, which no schema can describe; name its parameters"
        )
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ValueError(
            f"tool {label!r} has parameters before a /, but arguments are given by name; remove the /"
        )
    if schema is None:
        from transformers.utils.chat_template_utils import get_json_schema  # takes seconds to load

        try:
            tool_schema: Mapping[str, Any] = get_json_schema(function)
        except Exception as error:
            raise TypeError(
                f"no schema can be made of tool {label!r}: {error}. Give each parameter a type hint and a line under "
                f"Args: in the docstring, or pass schema=..."
            ) from error
    else:
        mapping = schema_mapping(schema)
        tool_schema = mapping if "function" in mapping else {"type": "function", "function": mapping}
    tool_schema = {
        **tool_schema,
        "function": {**schema_mapping(tool_schema["function"]), **({"name": name} if name else {})},
    }
    tool = FunctionTool(function, OpenAIFunctionToolSchema.model_validate(tool_schema))
    schema_parameters, function_parameters = (
        tool.tool_schema.function.parameters.properties,
        inspect.signature(function).parameters,
    )
    if unknown := [parameter for parameter in schema_parameters if parameter not in function_parameters]:
        raise ValueError(
            f"the schema of tool {label!r} shows the parameter {unknown[0]!r}, which the function does not take"
        )
    registered = FUNCTION_TOOL_REGISTRY.get(tool.name)
    if registered is not None and registered.function is not function:
        raise ValueError(
            f"tool {tool.name!r} is already registered: {registered.function!r}; choose another name"
        )
    FUNCTION_TOOL_REGISTRY[tool.name] = tool
    return function


def load_function_tools_from_path(path: str) -> dict[str, FunctionTool]:
    """The function tools that a file defines, by name; a file is imported once per process. In place of a file, names
    of tools that installed packages bring, with commas between them.

    Raises:
        ValueError: there is no such file or tool, importing it failed, or it defines no tool.
    """
    names = [name.strip() for name in path.split(",")]
    unknown = [name for name in names if name not in FUNCTION_TOOL_REGISTRY]
    if not unknown:
        ask("agent.function_tools", path)
        return {name: FUNCTION_TOOL_REGISTRY[name] for name in names}
    file = Path(path).expanduser().absolute()
    if file.suffix != ".py" and not file.is_file():
        ask("agent.function_tools", path)
        raise ValueError(
            f"agent.function_tools names {unknown[0]!r}, but {file} is no file, and no installed package brings a tool "
            f"of this name (entry points of {FUNCTION_TOOL_REGISTRY.group}); known tools: "
            f"{', '.join(FUNCTION_TOOL_REGISTRY.names()) or 'none'}"
        )
    module = load_user_file(path, setting="agent.function_tools")
    tools = {
        name: tool
        for name, tool in FUNCTION_TOOL_REGISTRY.items()
        if tool.function.__module__ == module.__name__
    }
    if not tools:
        raise ValueError(f"agent.function_tools: {path} has no function marked @function_tool")
    return tools
