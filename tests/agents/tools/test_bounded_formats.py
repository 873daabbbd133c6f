"""Readers of tool calls take time in proportion to what a model wrote, and read what plain expressions read."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

import growth
import pytest
from agent_cases import ScriptedModel, prompt_of, sampling_of, setup_with, tool_plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from template_family import family_tokenizer

import references.tool_call_patterns as patterns
from strop.agents.episodes import play_episode
from strop.agents.tools.calculator import CalculatorTool
from strop.agents.tools.formats import FunctionCall, MalformedCall, formats
from strop.agents.tools.formats.calls import typed_value
from strop.agents.tools.formats.parser import FormatParser, ToolFormat
from strop.utils.sanitize import read_json
from strop.utils.sanitize.values import MAX_JSON_DEPTH

PLAIN = [*"{}[]()<>\"'\\,:=`|.-+#", " ", "\n", "a", "1", "```json\n", '{"name":"f"}', "f(", "a=", "f", "'''"]
ATTACKS = {
    "glm": [
        ("<tool_call>f", "<arg_key>", "</tool_call>"), ("<tool_call>f", "<arg_key>a</arg_key>", "</tool_call>"),
        ("<tool_call>f", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
    ],
    "pythonic": [
        ("[f(a=", "(", ")]"), ("[f(", "a((", ")]"), ("[f(a=", "{'a':", ")]"), ("[", "f(a=1), ", "f()]"),
        ("[f(a=", "-", "1)]"), ("[f(a='x", "\\'", ")]"), ("[f(a=1", ".a", ")]"),
    ],
    "deepseek": [
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", ""),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", " ", "x"),
    ],
    "kimi": [("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "")],
    "qwen3_coder": [
        ("<tool_call><function=f>", "<parameter=", "</tool_call>"),
        ("<tool_call><function=f>", "<parameter=\n", "></tool_call>"),
    ],
}  # fmt: skip
"""Beginning, what is repeated, and end: each of them took quadratic time or worse."""


def marks_of(one: ToolFormat) -> list[str]:
    """The texts that a format looks for: constants of its reader, of what that calls, and of their module."""
    module = vars(sys.modules[one.read.__module__])
    found = [part for value in module.values() if isinstance(value, tuple) for part in value]
    found += module.values()
    codes = [value.__code__ for value in module.values() if hasattr(value, "__code__")]
    while codes:
        constants = codes.pop().co_consts
        codes += [part for part in constants if isinstance(part, CodeType)]
        found += constants
    texts = {part for part in found if isinstance(part, str) and 0 < len(part) < 40}
    return sorted(text for text in texts if " " not in text and any(c in "<>[]|{}" for c in text))


def shapes(name: str, count: int) -> Iterator[tuple[str, str, str]]:
    """Beginnings, repeated parts and ends, made of the marks of a format and of signs."""
    choose = random.Random(name)
    marks = marks_of(formats[name])
    assert marks, "a format without marks of its own is not tested"
    yield from ATTACKS.get(name, ())
    yield from (("", mark, "") for mark in marks)
    pieces = marks * (1 + 2 * len(PLAIN) // len(marks)) + PLAIN
    for _ in range(count):
        begin, repeated, end = ("".join(choose.choices(pieces, k=choose.randint(low, high)))
                                for low, high in ((0, 4), (1, 3), (0, 2)))  # fmt: skip
        yield begin, repeated, end


@pytest.mark.parametrize("name", sorted(formats))
def test_reading_takes_time_in_proportion_to_the_text(name: str) -> None:
    one = formats[name]

    def read(text: str) -> None:
        one.read(one.thinking(text)[1] if one.thinking else text, ())

    for begin, repeated, end in shapes(name, 60):
        growth.assert_linear(read, lambda n, b=begin, r=repeated, e=end: b + r * n + e)  # type: ignore[misc]


def of_pieces(*pieces: str) -> st.SearchStrategy[str]:
    words = st.sampled_from(
        ["f", "g.h", "a", " ", "\n", "1", "{}", '{"a": 1}', "x y", "```", "functions.f:0", ">"]
    )
    return st.lists(st.one_of(st.sampled_from(pieces), words), max_size=16).map("".join)


TEXTS = {
    "qwen3_coder": of_pieces(
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<function=", "<parameter=a>", "<parameter=b>",
        "<parameter=", "</parameter>", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    ),
    "glm": of_pieces(
        "<tool_call>", "</tool_call>", "<tool_call>f<arg_key>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>", "</arg_key>\n<arg_value>", "<arg_key>a</arg_key><arg_value>1</arg_value>",
        "</arg_value></tool_call>",
    ),
    "deepseek": of_pieces(
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```\n",
        "\n```json\n",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>",
    ),
    "kimi": of_pieces(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", ":1",
    ),
    "gpt_oss": of_pieces(
        "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "commentary to=functions.f",
        "to=", "<|start|>assistant<|channel|>commentary to=f<|message|>",
    ),
}  # fmt: skip


def as_found(call: FunctionCall | MalformedCall) -> tuple[str, Any]:
    return (call.name, call.arguments) if isinstance(call, FunctionCall) else ("", None)


def as_json(found: tuple[str, Any]) -> tuple[str, Any]:
    """A call of the reference, with the values of its parameters read."""
    name, given = found
    if isinstance(given, dict):
        values = {key: typed_value(text, None) for key, text in given.items()}
        return name, json.dumps(values, ensure_ascii=False)
    return (name, given) if given is not None else ("", None)


@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_calls_are_those_that_an_expression_finds(name: str, data: st.DataObject) -> None:
    text = data.draw(TEXTS[name])
    expected = [as_json(one) for one in getattr(patterns, name)(text)]
    found = [as_found(one) for one in formats[name].read(text, ())[1]]
    assert found[: len(expected)] == expected
    assert found[len(expected) :] in ([], [("", None)])  # what is begun and has no end


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["f", "g.h"]), st.dictionaries(st.sampled_from(["a", "b"]), VALUES)),
        min_size=1,
    )
)
def test_a_list_of_calls_is_read_as_python_reads_it(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [
        f"{name}({', '.join(f'{key} = {value!r}' for key, value in given.items())})" for name, given in calls
    ]
    text = f"[{', '.join(written)}]"
    found = [(one.name, json.loads(one.arguments)) for one in formats["pythonic"].read(text, ())[1]
             if isinstance(one, FunctionCall)]  # fmt: skip
    assert found == patterns.pythonic(text) == calls


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([
    "f(", "a=", "b =", ")", "[", "]", "{", "}", ",", ":", "1", "-1", "0x1f", "1_0", "1e5", ".5", "007", "1j", "'x'",
    '"y"', "b'z'", "r'\\d'", "'''q'''", "'\\n'", "True", "None", "(", "#c\n", " ", "\n", "...", "*", "f'x'", "lambda",
]), max_size=8).map("".join))  # fmt: skip
def test_values_are_those_that_python_reads(written: str) -> None:
    text = f"[f(a={written})]"
    expected = patterns.pythonic(text)
    found = formats["pythonic"].read(text, ())[1]
    if expected is not None:
        assert [
            (one.name, json.loads(one.arguments)) for one in found if isinstance(one, FunctionCall)
        ] == expected
    elif len(found) == 1 and isinstance(
        found[0], FunctionCall
    ):  # of a keyword that Python has for itself, at most
        pytest.fail(f"{text!r} was read as {found[0]}")


@pytest.mark.parametrize("text", [
    "[" * 10**4, '{"a":' * 10**4, "9" * 5000 + "]", "[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1), "", "NaN]",
    '"\\ud800',
])  # fmt: skip
def test_json_that_cannot_be_read_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)
    for one in formats.values():
        for written in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"[f(a={text})]"):
            one.read(written, ())


HOSTILE = {
    "glm": "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 700 + "</tool_call>",
    "pythonic": "[" + "f(a=1), " * 1800 + "f()]",
    "deepseek": "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>" * 1500,
    "kimi": "<|tool_calls_section_begin|>" + "<|tool_call_begin|>" * 1500,
    "qwen3_coder": "<tool_call><function=f>" + "<parameter=" * 1500 + "</tool_call>",
}


@pytest.mark.parametrize("name", sorted(formats))
def test_an_episode_with_hostile_answers_lets_others_play(name: str) -> None:
    """The event loop is never held for long: the processor time of one hold is far below the episode's time."""
    tokenizer = family_tokenizer("qwen25")
    setup = setup_with(tokenizer, [CalculatorTool()], timeout_s=60.0)
    tool_plugin(setup).parser = FormatParser(formats[name], tokenizer)
    marks = marks_of(formats[name])
    texts = [
        HOSTILE.get(name, marks[0] * 1500),
        "".join(marks) * 200,
        "<think>" * 1000 + "</think>" + marks[-1] * 1000,
    ]
    answers = [
        [*tokenizer(one, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for one in texts
    ]
    held: list[float] = []

    def answering(ids: list[int]) -> Any:
        async def answer() -> list[int]:
            await asyncio.sleep(0)
            return ids

        return answer

    model = ScriptedModel([answering(ids) for ids in answers])

    async def beat() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            before, last = time.thread_time(), before
            held.append(before - last)

    async def episode() -> None:
        beating = asyncio.create_task(beat())
        prompt, sampling = prompt_of(tokenizer), sampling_of(tokenizer, max_tokens=50_000)
        try:
            await play_episode(prompt, 0, sampling, client=model, seed=0, setup=setup)
            for _ in range(2):  # the last hold is counted too
                await asyncio.sleep(0)
        finally:
            beating.cancel()

    asyncio.run(episode())
    assert held
    assert max(held) < 5.0  # 1,801 results in one turn: 0.5 s of processor time, 1.7 s on a slow machine
