"""Tools: schemas, functions, files, and the two that are shipped."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.agents.tools import (
    FUNCTION_TOOL_REGISTRY,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
    load_all_tools,
    load_function_tools_from_path,
)
from strop.agents.tools.base import BaseTool, ToolUnavailable
from strop.agents.tools.calculator import CalculatorTool, evaluate, format_number
from strop.agents.tools.functions import read_returned
from strop.agents.tools.gsm8k import Gsm8kTool
from strop.agents.tools.python_sandbox import PythonSandboxTool
from strop.agents.tools.schemas import OpenAIFunctionSchema


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """The registry of function tools, as it was before at the end."""
    before = dict(FUNCTION_TOOL_REGISTRY)
    yield
    FUNCTION_TOOL_REGISTRY.clear()
    FUNCTION_TOOL_REGISTRY.update(before)


NESTED = {
    "type": "function",
    "function": {
        "name": "plan",
        "description": "Plan a trip.",
        "parameters": {
            "type": "object",
            "properties": {
                "stops": {
                    "type": "array",
                    "description": "Where to stop.",
                    "items": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                    },
                },
                "mode": {"type": "string", "enum": ["train", "bus"], "default": "bus"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["stops"],
            "additionalProperties": False,
        },
    },
}


def test_nested_schemas_survive() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(NESTED)
    assert schema.model_dump() == NESTED
    assert schema.function.parameters.properties["mode"].enum == ["train", "bus"]
    with pytest.raises(ValueError, match=r"OpenAIFunctionSchema .* is incomplete: .*'name'"):
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {}})


@pytest.mark.parametrize(
    ("text", "arguments", "failed"), [('{"a": 1}', {"a": 1}, False), ("{", {}, True), ("[1]", {}, True)]
)
def test_parsed_calls_tell_whether_their_arguments_could_be_read(
    text: str, arguments: dict[str, Any], failed: bool
) -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, has_decode_error = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, has_decode_error) == ("f", arguments, failed)


def test_responses_know_what_they_hold() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["x"]).is_text_only()
    with pytest.raises(ValueError, match="image of a tool response is a str; give a list"):
        ToolResponse(image="x")  # type: ignore[arg-type]


def test_a_function_becomes_a_tool_by_its_signature_and_docstring() -> None:
    @function_tool
    def area(width: float, names: list[str], unit: str = "m") -> str:
        """Area of a square.

        Args:
            width: Side of the square.
            names: Labels.
            unit: Unit of length.
        """
        return f"{width**2} {unit}"

    tool = FUNCTION_TOOL_REGISTRY["area"]
    function = tool.tool_schema.model_dump()["function"]
    assert function["description"] == "Area of a square."
    assert function["parameters"]["properties"]["width"] == {
        "type": "number",
        "description": "Side of the square.",
    }
    assert function["parameters"]["properties"]["names"]["items"] == {"type": "string"}
    assert function["parameters"]["required"] == ["width", "names"]
    response, reward, facts = asyncio.run(tool.execute("", {"width": 3, "names": []}))
    assert (response.text, reward, facts) == ("9 m", 0.0, {})
    assert area(2, []) == "4 m", "the function stays as it is"


def test_names_schemas_and_async_functions_are_taken() -> None:
    @function_tool("twice")
    async def double(x: int) -> tuple[dict[str, int], float, dict[str, int]]:
        """Double it.

        Args:
            x: A number.
        """
        return {"value": 2 * x}, 0.5, {"steps": 1}

    @function_tool(schema={"name": "bare", "description": "No hints.", "parameters": {"type": "object"}})
    def without_hints(x):  # type: ignore[no-untyped-def]
        return str(x)

    response, reward, facts = asyncio.run(FUNCTION_TOOL_REGISTRY["twice"].execute("", {"x": 2}))
    assert (response.text, reward, facts) == ('{"value": 4}', 0.5, {"steps": 1})
    assert asyncio.run(FUNCTION_TOOL_REGISTRY["bare"].execute("", {"x": 2}))[0].text == "2"
    assert function_tool("twice")(double) is double
    with pytest.raises(ValueError, match="tool 'twice' is already registered"):
        function_tool("twice")(without_hints_of_its_own)


@dataclass
class Other:
    """A schema of another library."""

    value: dict[str, Any]

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return self.value


SPOKEN = {
    "name": "spoken",
    "description": "Say it.",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "string", "default": None}},
        "required": ["x"],
    },
}


@pytest.mark.parametrize(
    "schema",
    [
        OpenAIFunctionSchema.model_validate(SPOKEN),
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": SPOKEN}),
        {"type": "function", "function": OpenAIFunctionSchema.model_validate(SPOKEN)},
        Other({"type": "function", "function": SPOKEN}),
        Other(SPOKEN),
    ],
)
def test_a_schema_may_be_an_object(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.agents.tools.functions.FUNCTION_TOOL_REGISTRY", registry := {})

    @function_tool(schema=schema)
    def other(x):  # type: ignore[no-untyped-def]
        return x

    made = registry["spoken"].tool_schema.model_dump()
    assert made == {"type": "function", "function": SPOKEN}
    assert BaseTool({}, Other(made)).tool_schema.model_dump() == made  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a tool schema must be an object, but is 3"):
        function_tool(schema=3)(other)


def without_hints_of_its_own(x: int) -> str:
    """Some.

    Args:
        x: A number.
    """
    return str(x)


def test_functions_that_no_schema_can_describe_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tool 'f' takes \*args or \*\*kwargs"):

        @function_tool
        def f(**kwargs: int) -> str:
            """Take all."""
            return ""

    with pytest.raises(TypeError, match="no schema can be made of tool 'g'"):

        @function_tool
        def g(x: int) -> str:
            return ""


@pytest.mark.parametrize(
    ("returned", "text", "reward"),
    [
        ("a", "a", 0.0),
        ({"a": "é"}, '{"a": "é"}', 0.0),
        (3, "3", 0.0),
        (None, "null", 0.0),
        (["a", {"b": None}], '["a", {"b": null}]', 0.0),
        (([], 1), "[]", 1.0),
        (np.array([[1, 2]]), "[[1, 2]]", 0.0),
        (np.float64(0.5), "0.5", 0.0),
        (("a",), "a", 0.0),
        (("a", 1), "a", 1.0),
        ((ToolResponse(text="a"), 0.5, {"k": 1}), "a", 0.5),
    ],
)
def test_what_functions_may_return(returned: Any, text: str, reward: float) -> None:
    response, given, _ = read_returned(returned, "f")
    assert (response.text, given) == (text, reward)


@pytest.mark.parametrize("returned", [(), ("a", 0.0, {}, 1), object()])
def test_what_functions_may_not_return(returned: Any) -> None:
    with pytest.raises(TypeError, match="tool 'f' returned a"):
        read_returned(returned, "f")


FUNCTIONS = '''
from strop.agents import function_tool

@function_tool
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What to shout.
    """
    return text.upper()
'''


def test_function_files_are_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own_tools.py"
    file.write_text(FUNCTIONS)
    first = load_function_tools_from_path(str(file))
    monkeypatch.chdir(tmp_path)
    assert load_function_tools_from_path("own_tools.py")["shout"] is first["shout"]
    assert list(first) == ["shout"]
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=r"empty\.py has no function marked @function_tool"):
        load_function_tools_from_path("empty.py")
    with pytest.raises(
        ValueError, match=r"names 'gone\.py', but .*gone\.py is no file; relative names start at"
    ):
        load_function_tools_from_path("gone.py")


@pytest.mark.parametrize("names", ["saw", "shout, saw"])
def test_a_name_that_is_neither_file_nor_tool_is_told_both(
    names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tools.py").write_text(FUNCTIONS)
    load_function_tools_from_path(str(tmp_path / "own_tools.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=rf"agent.function_tools names 'saw', but {tmp_path}/{names} is no file, and no installed package brings "
        r"a tool of this name \(entry points of strop\.tools\); known tools: .*shout",
    ):
        load_function_tools_from_path(names)


YAML = """
tools:
  - class_name: strop.agents.tools.calculator.CalculatorTool
    config: {type: native}
  - class_name: strop.agents.tools.gsm8k.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Check an answer.
        parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}
"""


def test_tools_come_from_yaml_and_functions(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(YAML)
    (tmp_path / "more.py").write_text(FUNCTIONS.replace("shout", "whisper"))
    tools = load_all_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "more.py"))
    assert list(tools) == ["calculator", "check", "whisper"]
    assert tools["check"].tool_schema.function.description == "Check an answer."
    (tmp_path / "clash.py").write_text(FUNCTIONS.replace("def shout", "def calculator"))
    with pytest.raises(ValueError, match="two tools are named 'calculator'"):
        load_all_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "clash.py"))


def test_classes_of_verl_stand_for_those_here(tmp_path: Path) -> None:
    text = YAML.replace("strop.agents.tools.gsm8k.Gsm8kTool", "verl.tools.gsm8k_tool.Gsm8kTool")
    (tmp_path / "tools.yaml").write_text(text)
    assert type(load_all_tools(str(tmp_path / "tools.yaml"))["check"]) is Gsm8kTool


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tools: 3", "the key `tools` with a list"),
        (
            "tools: [{class_name: verl.tools.own_tool.OwnTool}]",
            "entry 1 of .*'verl.tools.own_tool.OwnTool', a class of verl that is not in strop: copy its file",
        ),
        (
            "tools: [{class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool, config: {rate_limit: 4}}]",
            "unknown key 'rate_limit'; limits of programs are set in reward.sandbox",
        ),
        ("tools: [{config: {}}]", "entry 1 of .* has no class_name"),
        ("tools: [{class_name: a.B, confg: {}}]", "unknown key 'confg'"),
        ("tools: [{class_name: strop.agents.tools.nothing.B}]", "which cannot be imported"),
        ("tools: [{class_name: builtins.dict}]", "is no subclass of BaseTool"),
        (
            "tools: [{class_name: strop.agents.tools.base.BaseTool, config: {type: remote}}]",
            "config.type 'remote'; known",
        ),
        ("tools: [{class_name: strop.agents.tools.base.BaseTool}]", "cannot be made: .*has no schema"),
    ],
)
def test_wrong_tool_files_are_named(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=match):
        load_all_tools(str(file))


SHOP = """
from strop.agents import BaseTool

class {name}(BaseTool):
    pass
"""


def shop_of(folder: Path, class_name: str) -> BaseTool:
    """The tool of a YAML file in a folder."""
    schema = {"type": "function", "function": {"name": "buy", "description": "Buy."}}
    entry = {"class_name": class_name, "tool_schema": schema}
    folder.mkdir(exist_ok=True)
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return load_all_tools(str(folder / "tools.yaml"))["buy"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, which is not that of the YAML file; modules and paths are as before at the end."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("shop"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "class_name", ["./shop_a.py:Shop", "shop_a.py:Shop", "shop_a.Shop", "{}/shop_a.py:Shop"]
)
def test_classes_are_found_beside_the_yaml_file(tmp_path: Path, elsewhere: Path, class_name: str) -> None:
    (tmp_path / "shop_a.py").write_text(SHOP.format(name="Shop"))
    assert type(shop_of(tmp_path, class_name.format(tmp_path))).__name__ == "Shop"


def test_classes_are_found_in_packages_and_in_the_current_directory(tmp_path: Path, elsewhere: Path) -> None:
    package = tmp_path / "conf" / "shops_b" / "town"
    package.mkdir(parents=True)
    (package / "base.py").write_text(SHOP.format(name="Shop"))
    (package / "corner.py").write_text("from .base import Shop\nfrom shops_b.town import base\n")
    (elsewhere / "shop_c.py").write_text(SHOP.format(name="Here"))
    for class_name, expected in (
        ("shops_b.town.corner.Shop", "Shop"), ("shop_c.Here", "Here"), ("./shop_c.py:Here", "Here"),
    ):  # fmt: skip
        assert type(shop_of(tmp_path / "conf", class_name)).__name__ == expected


def test_a_class_that_cannot_be_had_is_told_with_what_there_is(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "shop_d.py").write_text(SHOP.format(name="Shop"))
    (tmp_path / "bad_d.py").write_text("x = (")
    (tmp_path / "verl_d.py").write_text("from verl.tools.base_tool import BaseTool")
    (tmp_path / "shop_d").mkdir()
    for class_name, match in (
        ("./shop_d.py:Shob", r"shop_d.py has no class 'Shob'; it has Shop$"),
        ("shop_d.py", r"names the file 'shop_d.py'; name the class too: shop_d.py:ClassName"),
        ("./shop_e.py:Shop", rf"there is no such file; looked in {tmp_path} and {elsewhere}"),
        ("bad_d.Shop", "cannot be imported: SyntaxError: .*named by its path, FILE.py:Shop"),
        ("no_such_module.Shop", "cannot be imported: ModuleNotFoundError"),
        ("verl_d.Shop", "No module named 'verl'; what a file imports from verl comes from strop.agents"),
        ("./verl_d.py:Shop", "No module named 'verl'; what a file imports from verl comes from strop.agents"),
    ):
        with pytest.raises(ValueError, match=f"agent.tools: entry 1 of .*{match}"):
            shop_of(tmp_path, class_name)
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path / "one", other):
        folder.mkdir(exist_ok=True)
        (folder / "shop_f.py").write_text(SHOP.format(name="Shop"))
    assert type(shop_of(tmp_path / "one", "shop_f.Shop")).__name__ == "Shop"
    with pytest.raises(ValueError, match="another module shop_f was imported from .*one before"):
        shop_of(other, "shop_f.Shop")


# ---------------------------------------------------------------------- the calculator

NUMBERS = st.integers(0, 30).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"{t[0]}{t[1]}{t[2]}"),
        inner.map(lambda e: f"(-{e})"),
    ),
    max_leaves=8,
)


def by_fractions(expression: str) -> Fraction:
    """The value in exact fractions, by the grammar of Python, each number a fraction."""
    import ast

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.UnaryOp(operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = value(left), value(right)
                return {"Add": a + b, "Sub": a - b, "Mult": a * b}.get(type(op).__name__) or (
                    a / b if isinstance(op, ast.Div) else Fraction(0)
                )
        raise AssertionError(node)

    return value(ast.parse(expression, mode="eval").body)


@settings(max_examples=100, deadline=None)
@given(expression=EXPRESSIONS)
def test_the_calculator_agrees_with_exact_fractions(expression: str) -> None:
    try:
        expected = by_fractions(expression)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(expression)
        return
    assert math.isclose(evaluate(expression), float(expected), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2**3**2", 512), ("-2^2", -4), ("7 // 2 + 7 % 4", 6), ("1,200 * 2", 2400), ("6 / 3", 2), ("1 / 8", 0.125),
        ("sqrt(16) + abs(-1.5)", 5.5), ("2 ** -1", 0.5), ("1e3", 1000), (".5 + 3.", 3.5), ("6 × 7", 42),
        (" 007 +\n1e01", 17), ("-" * 499 + "1", -1), ("1+" * 249 + "1", 250), ("2*pi/pi", 2),
    ],
)  # fmt: skip
def test_the_calculator_by_hand(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "match"),
    [
        ("", "ends too early"), ("1 +", "ends too early"), ("(1", "ends too early"), ("1 2", "unexpected '2'"),
        ("__import__('os')", "unexpected \"__import__"), ("a.b", "unexpected 'a.b'"), ("1 # 2", "unexpected '#'"),
        ("True", "unexpected 'True'"), ("'a' * 9", "unexpected"), ("[1] * 9", "unexpected"), ("1 < 2", "unexpected"),
        ("(lambda: 1)()", "unexpected"), ("sqrt + 1", "sqrt needs brackets"), ("sqrt(*e)", "unexpected"),
        ("1 << 9", "unexpected"), ("9**1200 * 9**1200", "too large"), ("abs(x=1)", "unexpected"),
        ("9**9**9**9", "too large"),
        ("2**99999", "too large"),
        ("(-8) ** 0.5", "not real"), ("1 / 0", "division by zero"), ("(" * 60 + "1" + ")" * 60, "nested"),
        ("1" * 600, "600 characters"),
        ("exp(1000)", "too large"), ("sqrt(-1)", "domain"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(expression: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        evaluate(expression)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="0123456789+-*/^%(). esqrtpi", max_size=30))
def test_any_expression_has_a_value_or_a_reason(text: str) -> None:
    response, reward, _ = asyncio.run(CalculatorTool().execute("", {"expression": text}))
    assert response.text
    assert reward == 0.0


def test_numbers_are_shown_as_people_write_them() -> None:
    assert [format_number(value) for value in (3, 2.0, 0.1 + 0.2, 1 / 3, 1e20)] == [
        "3",
        "2",
        "0.3",
        "0.333333333333",
        "1e+20",
    ]


# ---------------------------------------------------------------------- the checker of answers


def test_the_checker_rewards_the_right_answer_once() -> None:
    async def episode() -> tuple[list[float], float]:
        tool = Gsm8kTool()
        instance, _ = await tool.create(create_kwargs={"ground_truth": "1200"})
        rewards = [(await tool.execute(instance, {"answer": text}))[1] for text in ("12", "$1,200.", "1200")]
        reward = await tool.calc_reward(instance)
        await tool.release(instance)
        await tool.release(instance)
        return rewards, reward

    # Wrong: no better than nothing. Right: better. Right again: no better than before.
    assert asyncio.run(episode()) == ([-0.05, 0.0, -0.05], 1.0)


def checked(answer: str, *, create: dict[str, Any], **kwargs: Any) -> tuple[float, float]:
    """Reward of one call and of the episode."""

    async def episode() -> tuple[float, float]:
        tool = Gsm8kTool()
        instance, _ = await tool.create(**create)
        _, change, _ = await tool.execute(instance, {"answer": answer}, **kwargs)
        return change, await tool.calc_reward(instance)

    return asyncio.run(episode())


@pytest.mark.parametrize("create", [{}, {"create_kwargs": {}}, {"ground_truth": None}])
def test_the_checker_takes_the_ground_truth_of_the_row(create: dict[str, Any]) -> None:
    assert checked("72", create=create, agent_data=SimpleNamespace(ground_truth=72)) == (0.0, 1.0)
    with pytest.raises(ToolUnavailable, match=r"calc_gsm8k_reward\.create_kwargs\.ground_truth"):
        checked("72", create=create, agent_data=SimpleNamespace(ground_truth=None))


def test_the_checker_without_a_right_answer_is_as_verls(caplog: pytest.LogCaptureFixture) -> None:
    # A loop of mid-2025: `await tool.create()`, then `await tool.execute(instance_id, arguments)`.
    assert checked("72", create={}) == (-0.05, 0.0)
    assert "has no right answer to compare with" in caplog.text


def test_every_tool_begins_without_arguments() -> None:
    for tool in (CalculatorTool(), Gsm8kTool(), PythonSandboxTool({})):
        instance, response = asyncio.run(tool.create())
        assert isinstance(instance, str)
        assert response.is_empty()
