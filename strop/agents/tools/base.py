"""BaseTool, and ToolResponse, the result of a call."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from typing import Any

from strop.agents.tools.arguments import wrong_arguments
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.utils.sanitize import storable


class ToolUnavailable(RuntimeError):
    """A tool cannot work, whatever the model asks, for lack of a resource.

    Other errors of a tool are shown to the model, which may do better. This one says nothing about the call, so the
    episode ends with it, is counted as failed and not trained.
    """


@dataclass(frozen=True)
class ToolResponse:
    """Result of a call, shown to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    audio: list[Any] | None = None
    """Not shown to any model: it reads a sentence in its place."""

    def __post_init__(self) -> None:
        for name in ("image", "video", "audio"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise ValueError(
                    f"{name} of a tool response is a {type(value).__name__}; give a list, also for one"
                )
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"text of a tool response is a {type(self.text).__name__}; give a string")

    def is_empty(self) -> bool:
        """True for a response without any content."""
        return not (self.text or self.image or self.video or self.audio)

    def is_text_only(self) -> bool:
        """There is text, and no image, video or sound."""
        return bool(self.text) and not (self.image or self.video or self.audio)


def response_of(returned: object) -> ToolResponse | None:
    """A returned value as a response: text as it is, plain values and containers as JSON; None for other values."""
    if isinstance(returned, ToolResponse):
        return returned
    if isinstance(returned, str):
        return ToolResponse(text=returned)
    is_plain = returned is None or isinstance(returned, bool | Number | Mapping | list | set | frozenset)
    if is_plain or callable(getattr(returned, "tolist", None)):  # arrays and their numbers
        return ToolResponse(text=json.dumps(storable(returned), ensure_ascii=False))
    return None


class BaseTool:
    """A tool with a life per episode: create, execute any number of times, calc_reward, release.

    One object serves all episodes of a process; state of an episode is kept under its instance id. Async methods
    run on the event loop of the process, where a blocking call holds every episode up; others run in threads,
    several at the same time: what they share needs a lock.
    """

    def __init__(
        self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        """Args:
        config: settings from the YAML file.
        tool_schema: from there too; None for a tool that makes its own in get_openai_tool_schema. Either may be a
            mapping.
        """
        self.config = config
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"tool {type(self).__name__} has no schema: give a tool_schema in the YAML file, or write "
                f"get_openai_tool_schema"
            )
        self.tool_schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Schema of the tool, as the prompt shows it."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            raise ValueError(
                f"tool {type(self).__name__} has no schema: give a tool_schema in the YAML file, or write "
                f"get_openai_tool_schema"
            )
        return schema

    def wrong_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Problems of a call's arguments, in a sentence for the model; empty when there is none.

        `execute` is not called with arguments that the schema does not declare or allow. A tool that takes more than it
        shows says so here, or with additionalProperties in its schema.
        """
        return wrong_arguments(arguments, self._parameters)

    @cached_property
    def _parameters(self) -> Mapping[str, Any]:
        return self.tool_schema.function.parameters.model_dump()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode; `create_kwargs` are those of the row. Returns the id that the other methods get."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Carry out one call; returns its response, a reward for the call, and facts about it."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward of the whole episode, asked for once at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End of the episode, also of one that failed or was cancelled."""


def create_arguments(create: Callable[..., Any], create_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a tool's `create`: the row's arguments under `create_kwargs`, and each by its name too.

    Tools of verl of mid-2025 take them by name, and may want the id. A name that nothing takes is left to the call,
    which refuses it.
    """
    parameters = inspect.signature(create).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {
        name: value for name, value in create_kwargs.items() if name not in ("instance_id", "create_kwargs")
    }
    if takes_any or "create_kwargs" in parameters:
        accepted = {name: value for name, value in arguments.items() if takes_any or name in parameters}
        arguments = {**accepted, "create_kwargs": dict(create_kwargs)}
    instance = parameters.get("instance_id")
    if instance is not None and instance.default is instance.empty:
        arguments["instance_id"] = str(uuid.uuid4())
    return arguments
