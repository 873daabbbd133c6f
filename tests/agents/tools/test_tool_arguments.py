"""Arguments that a model makes up: a tool is called with what its schema declares, and with nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from agent_cases import make_session

from strop.agents.tools.arguments import MAX_DEPTH, wrong_arguments
from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
from strop.agents.tools.functions import FUNCTION_TOOL_REGISTRY, function_tool
from strop.agents.tools.gsm8k import Gsm8kTool
from strop.agents.tools.schemas import OpenAIFunctionToolSchema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "unit": {"type": "string", "enum": ["m", "km"]},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "person": {"$ref": "#/$defs/person"},
        "maybe": {"type": "integer", "nullable": True},
        "odd": {"type": "int32"},
    },
    "required": ["count"],
    "$defs": {"person": PERSON, "self": {"$ref": "#/$defs/self"}},
}


@pytest.fixture
def _registry() -> Iterator[None]:
    before = dict(FUNCTION_TOOL_REGISTRY)
    yield
    FUNCTION_TOOL_REGISTRY.clear()
    FUNCTION_TOOL_REGISTRY.update(before)


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 3},
        {"count": 3, "unit": "km", "share": None, "maybe": None, "odd": "what int32 is, nobody says"},
        {"count": 3, "share": 0.5, "person": {"name": "a", "friends": [{"name": "b", "friends": []}]}},
    ],
)
def test_what_the_schema_allows_is_taken(arguments: dict[str, Any]) -> None:
    assert wrong_arguments(arguments, SCHEMA) == ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "the argument 'count' is missing"),
        ({"count": "3"}, "the argument 'count' must be integer, but is '3'"),
        ({"count": True}, "the argument 'count' must be integer, but is true"),
        ({"count": 3.5}, "the argument 'count' must be integer, but is 3.5"),
        ({"count": None}, "the argument 'count' must be integer, but is null"),
        ({"count": 3, "unit": "mile"}, "the argument 'unit' is 'mile'; it must be one of 'm', 'km'"),
        ({"count": 3, "share": "half"}, "the argument 'share' is 'half', which is none of the forms it may have"),
        ({"count": 3, "share": float("nan")}, "the argument 'share' is nan, which is no number"),
        ({"count": 3, "person": {"friends": []}}, "the argument 'person.name' is missing"),
        (
            {"count": 3, "person": {"name": "a", "friends": [{"name": 7}]}},
            "the argument 'person.friends[0].name' must be string, but is 7",
        ),
        ({"count": 3, "person": {"name": "a", "x": 1}}, "there is no argument 'person.x'"),
        ({"count": 3, "person": "me"}, "the argument 'person' must be object, but is 'me'"),
        ({"count": 3, "self": 1}, "there is no argument 'self' (there are: 'count', 'unit', "),
        ({"count": 3, "__class__": "x"}, "there is no argument '__class__'"),
        ({"count": 10**5000, "unit": 10**5000}, "must be string, but is a very large number"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "and 2 more"),
    ],
)  # fmt: skip
def test_what_it_does_not_allow_is_told(arguments: dict[str, Any], problem: str) -> None:
    assert problem in wrong_arguments(arguments, SCHEMA)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/self"}}, "$defs": {"self": {"$ref": "#/$defs/self"}}},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"a": {"$ref": "#/no/such/place"}}, "$ref": "http://example.com/schema"},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]}}},
        {"properties": "none", "required": 3, "type": {"x": 1}, "enum": 7, "anyOf": {}, "additionalProperties": 5},
    ],
)  # fmt: skip
def test_a_schema_that_refers_to_itself_or_is_nonsense_ends(parameters: dict[str, Any]) -> None:
    assert isinstance(wrong_arguments({"a": {"a": {"a": [1, 2]}}}, parameters), str)


def test_what_a_check_costs_is_bounded() -> None:
    tree = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}, "prefixItems": []}] * 4}
    parameters = {"properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    value: Any = "leaf"
    for _ in range(30):  # each level is tried in four ways: 4 ** 30 without a bound
        value = [value]
    assert "too large to be checked" in wrong_arguments({"a": value}, parameters)
    assert "they have more than" in wrong_arguments({"a": json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)}, {})


@pytest.mark.usefixtures("_registry")
def test_names_of_the_machinery_are_ordinary_names() -> None:
    @function_tool
    def take(function: str, self: str, instance_id: str, parameters: str, create_kwargs: str) -> str:
        """Take names.

        Args:
            function: One.
            self: Two.
            instance_id: Three.
            parameters: Four.
            create_kwargs: Five.
        """
        return function + self + instance_id + parameters + create_kwargs

    names = {"function": "a", "self": "b", "instance_id": "c", "parameters": "d", "create_kwargs": "e"}
    tool = FUNCTION_TOOL_REGISTRY["take"]

    async def run() -> list[Any]:
        async with make_session({"take": tool}) as session:
            return [
                await session.call("take", names),
                await session.call("take", {**names, "loop": "x", "agent_data": "y"}),
                await session.call("take", '{"function": ' + "9" * 5000 + "}"),
                await session.call("take", "[" * 100_000),
            ]

    worked, unknown, digits, deep = asyncio.run(run())
    assert (worked.text, worked.error) == ("abcde", "")
    assert unknown.error == digits.error == deep.error == "bad_arguments"
    assert "there is no argument 'loop'" in unknown.text


@pytest.mark.usefixtures("_registry")
def test_a_function_without_parameters_takes_none_and_a_schema_shows_what_it_takes() -> None:
    @function_tool
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert "there is no argument 'x' (there are: none)" in FUNCTION_TOOL_REGISTRY["now"].wrong_arguments(
        {"x": 1}
    )
    with pytest.raises(ValueError, match="shows the parameter 'y', which the function does not take"):
        function_tool("later", schema={"name": "later", "parameters": {"properties": {"y": {}}}})(lambda x: x)
    with pytest.raises(ValueError, match="has parameters before a /"):
        function_tool("before", schema={"name": "before"})(lambda x, /: x)


class Open(BaseTool):
    """Fails as it is told."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if parameters.get("fails"):
            raise ToolUnavailable("nothing is there")
        return ToolResponse(text=json.dumps(parameters)), 0.0, {}


def open_tool(parameters: dict[str, Any]) -> Open:
    function = {"name": "open", "parameters": parameters}
    return Open({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))


def test_a_tool_that_declares_more_takes_more() -> None:
    assert open_tool({"additionalProperties": True, "properties": {"a": {}}}).wrong_arguments({"b": 1}) == ""
    assert open_tool({}).wrong_arguments({"b": 1}) == "", "it has declared nothing"
    assert open_tool({"properties": {"a": {}}}).wrong_arguments({"b": 1}) != ""
    assert Gsm8kTool().wrong_arguments({"answer": 42}) == ""


def test_a_tool_that_cannot_work_ends_the_episode_after_release() -> None:
    async def run() -> None:
        async with make_session({"open": open_tool({})}) as session:
            await session.call("open", {"fails": True})

    with pytest.raises(ToolUnavailable, match="nothing is there"):
        asyncio.run(run())
