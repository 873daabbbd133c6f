"""Histories that a session has not sampled: answers with thinking and calls, as clients send them."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_cases import Open, ScriptedEngine, served
from template_family import FAMILIES, family_tokenizer

from strop.agents.openai_server import session as session_module
from strop.agents.openai_server.chat_model import ChatModel
from strop.agents.openai_server.messages import Message
from strop.agents.openai_server.session import Session
from strop.agents.tools.templates import ChatTemplate
from strop.utils.chat_template import apply_template

QUESTION = {"role": "user", "content": "How much?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}  # fmt: skip
ARGUMENTS = {"value": "wörd"}


def history(field: str | None, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if field is not None:
        answer[field] = "It is small."
    reply = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    return [QUESTION, answer, reply]


def asked(name: str, messages: list[dict[str, Any]]) -> str:
    """What the model is shown of a conversation."""
    tokenizer = family_tokenizer(name)
    engine = ScriptedEngine(tokenizer, ["Three."])

    def work(opened: Open) -> None:
        opened.client().chat.completions.create(model="any", messages=messages, tools=[TOOL])  # type: ignore[arg-type, list-item]

    served(engine, work, tokenizer=tokenizer)
    return str(tokenizer.decode(engine.prompts[0]))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_thinking_of_an_earlier_answer_is_shown_where_the_template_shows_it(field: str) -> None:
    shown = asked("qwen3", history(field, json.dumps(ARGUMENTS)))
    expected = apply_template(
        family_tokenizer("qwen3"), history("reasoning_content", ARGUMENTS), [TOOL],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert shown == expected
    assert "It is small." in shown
    assert "It is small." not in asked("qwen3", history(None, json.dumps(ARGUMENTS)))


def test_the_thinking_of_a_sampled_answer_is_shown_where_the_conversation_is_rendered_anew() -> None:
    tokenizer = family_tokenizer("qwen3")
    call = '<tool_call>\n{"name": "look_up", "arguments": {"value": "a"}}\n</tool_call><|im_end|>'
    engine = ScriptedEngine(tokenizer, [f"<think>\nIt is small.\n</think>\n\n{call}", "Three.<|im_end|>"])

    def work(opened: Open) -> None:
        client = opened.client()
        create: Any = client.chat.completions.create
        first = create(model="any", messages=[QUESTION], tools=[TOOL]).choices[0].message
        (made,) = first.tool_calls
        answer = {"role": "assistant", "content": "", "tool_calls": [made.model_dump()]}
        reply = {"role": "tool", "tool_call_id": made.id, "content": "3"}
        # The answer behind the reply is another one than was sampled, so all is rendered up to here.
        create(
            model="any", messages=[QUESTION, answer, {"role": "assistant", "content": "Wait."}], tools=[TOOL]
        )
        create(model="any", messages=[QUESTION, answer, reply], tools=[TOOL])

    served(engine, work, tokenizer=tokenizer)
    assert all("It is small." in tokenizer.decode(prompt) for prompt in engine.prompts[1:])


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.name != "gemma"])
def test_calls_that_were_not_sampled_here_are_shown_by_every_template(name: str) -> None:
    shown = asked(name, history(None, json.dumps(ARGUMENTS)))
    assert "look_up" in shown.rpartition("How much?")[2]
    assert "wörd" in shown or json.dumps("wörd") in shown


CALLS = "\n".join(
    f'<tool_call>\n{{"name": "look_up", "arguments": {{"value": "{value}"}}}}\n</tool_call>' for value in "ab"
)


def two_calls(opened: Open) -> Any:
    create: Any = opened.client().chat.completions.create
    return create(model="any", messages=[QUESTION], tools=[TOOL]).choices[0].message


@pytest.mark.parametrize("is_turned", [False, True])
def test_results_stand_in_the_order_of_the_calls(is_turned: bool) -> None:
    tokenizer = family_tokenizer("qwen25")
    engine = ScriptedEngine(tokenizer, [f"{CALLS}<|im_end|>", "Three.<|im_end|>"])

    def work(opened: Open) -> None:
        answer = two_calls(opened)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.function.arguments}"}
            for call in answer.tool_calls
        ]
        create: Any = opened.client().chat.completions.create
        create(model="any", messages=[QUESTION, answer, *results[:: -1 if is_turned else 1]], tools=[TOOL])

    _, sessions = served(engine, work, tokenizer=tokenizer)
    shown = str(tokenizer.decode(engine.prompts[1]))
    assert 0 < shown.find('result of {"value": "a"}') < shown.find('result of {"value": "b"}')
    assert sessions["one"].num_sequences == 1


def test_outputs_between_the_calls_of_one_answer_leave_it_whole() -> None:
    tokenizer = family_tokenizer("qwen25")
    engine = ScriptedEngine(tokenizer, [f"{CALLS}<|im_end|>", "Three.<|im_end|>"])
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]

    def work(opened: Open) -> None:
        create: Any = opened.client().responses.create
        items: list[Any] = [QUESTION]
        for call in create(model="any", input=items, tools=[tool]).output:
            items += [
                call.model_dump(),
                {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
            ]
        create(model="any", input=items, tools=[tool])

    _, sessions = served(engine, work, tokenizer=tokenizer)
    (sequence,) = sessions["one"].sequences()
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert tokenizer.decode(sequence.response_ids).startswith(
        f"{CALLS}<|im_end|>\n<|im_start|>user\n<tool_response>"
    )


def test_reused_ids_of_calls_have_the_place_of_their_last_use() -> None:
    def turn(*names: str) -> list[dict[str, Any]]:
        calls = [
            {"id": name, "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
            for name in names
        ]
        results = [{"role": "tool", "tool_call_id": name, "content": f"result of {name}"} for name in names]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    shown = asked("qwen25", [QUESTION, *turn("b"), *turn("a", "b")])
    assert 0 < shown.find("result of a") < shown.rfind("result of b")


TEXT_TAKERS = [family.name for family in FAMILIES if family.name not in ("gemma", "glm", "coder", "pythonic")]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.name != "gemma"])
@pytest.mark.parametrize(
    "arguments",
    [
        "[1, 2",
        pytest.param("[1, 2]", marks=pytest.mark.slow),
        "null",
        pytest.param(" ", marks=pytest.mark.slow),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_they_are_where_the_template_takes_a_text(
    name: str, arguments: str
) -> None:
    shown = asked(name, history(None, arguments)).rpartition("How much?")[2]
    assert "look_up" in shown
    if name in TEXT_TAKERS:
        assert arguments in shown.partition("look_up")[2]
    else:
        assert shown == asked(name, history(None, "{}")).rpartition("How much?")[2]


def test_no_arguments_are_an_empty_object() -> None:
    assert '"arguments": {}' in asked("qwen25", history(None, ""))


def test_thinking_is_left_out_where_the_template_refuses_it() -> None:
    messages = history("reasoning", json.dumps(ARGUMENTS))
    assert "It is small." in asked("gpt_oss", messages)
    messages[1]["content"] = "Wait."
    shown = asked("gpt_oss", messages)
    assert "It is small." not in shown
    assert "wörd" in shown or json.dumps("wörd") in shown


def test_arguments_stay_as_they_are_where_thinking_alone_is_refused() -> None:
    messages = history("reasoning", "[1, 2")
    messages[1]["content"] = "Wait."
    shown = asked("gpt_oss", messages)
    assert "[1, 2" in shown
    assert "It is small." not in shown


def test_messages_without_a_thought_are_taken_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = family_tokenizer("qwen25")
    session = Session(ChatModel("any", tokenizer, ChatTemplate(tokenizer), ()), uid="one")
    given = [Message("user", "How much?"), Message("assistant", "Three."), Message("user", "Sure?")]
    made_anew: list[object] = []

    def replace(message: Message, **changes: Any) -> Message:
        made_anew.append(message)
        return dataclasses.replace(message, **changes)

    monkeypatch.setattr(session_module, "dataclasses", SimpleNamespace(replace=replace))
    session.chat_ids(given, [])
    assert not made_anew
