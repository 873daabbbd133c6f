"""Histories that a session has not sampled: answers with thinking and calls, as clients send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_cases import Open, ScriptedEngine, served
from template_family import FAMILIES, family_tokenizer

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
