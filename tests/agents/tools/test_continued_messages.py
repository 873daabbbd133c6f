"""Agents whose first answer goes on with the last message of the row."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from agent_cases import ScriptedModel, play, prompt_of, sampling_of, setup_with
from template_family import BY_NAME, tokenizer_of

from strop.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from strop.agents.tools.conversation import Conversation
from strop.agents.tools.parsed_output import ParsedTurn
from strop.data.chat import Chat, encode, render_prompt
from strop.protocol.trajectory import Prompt, Trajectory

SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}


class Echo(BaseTool):
    """Says what it was asked."""

    def __init__(self) -> None:
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=f"{parameters['value']} is 3"), 0.0, {}


def continued(tokenizer: Any, content: Any) -> Prompt:
    """A question, and an answer that somebody has begun."""
    messages = (
        {"role": "user", "content": "How much is it?"},
        {"role": "assistant", "content": content, "name": "bot"},
    )
    chat = Chat(messages=messages, tools=(SCHEMA,), where="row 1")
    ids = tuple(encode(tokenizer, render_prompt(tokenizer, chat)))
    return replace(prompt_of(tokenizer, tools=[SCHEMA]), messages=messages, token_ids=ids)


MACRO = """\
{%- macro text(content) %}{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}{%- endmacro %}"""
"""A content of texts or of parts."""


def played(name: str, content: Any, before_call: str) -> tuple[ScriptedModel, tuple[Trajectory, ...]]:
    """An episode of two answers, the first of which calls the tool."""
    family, template = BY_NAME[name], BY_NAME[name].template
    if not isinstance(content, str):
        template = MACRO + template.replace("m.content", "text(m.content)")
    tokenizer = tokenizer_of(template, control=family.control, end=family.end)
    call = family.write_calls([("look_up", {"value": "it"})])
    answers = [
        encode(tokenizer, f"{before_call}{call}{family.call_end or family.end}"),
        encode(tokenizer, f"So 3.{family.end}"),
    ]
    model = ScriptedModel(answers)
    setup = setup_with(
        tokenizer, [Echo()], tool_format=family.format, max_parallel_calls=1, max_tool_response_tokens=100
    )
    return model, play(continued(tokenizer, content), model, setup, sampling=sampling_of(tokenizer))


PARTS = [{"type": "text", "text": "It is "}]


@pytest.mark.parametrize(
    ("name", "content"),
    [("qwen25", "It is "), ("qwen25", PARTS), ("qwen3", "It is "), ("deepseek", "It is ")],
)
def test_the_calls_of_an_answer_that_goes_on_are_made(name: str, content: Any) -> None:
    """A template that begins answers in thinking has not begun this one."""
    model, sequences = played(name, content, "what I look up: ")
    assert len(model.requests) == 2
    first = sequences[0].messages[0]
    assert first["content"].strip() == "what I look up:"
    assert "reasoning" not in first
    assert first["tool_calls"][0]["arguments"] == '{"value": "it"}'


@pytest.mark.parametrize(
    ("name", "content"),
    [("qwen25", "It is "), ("qwen25", PARTS), ("qwen3", "It is "), ("deepseek", "It is ")],
)
def test_the_conversation_is_rendered_as_it_was_played(name: str, content: Any) -> None:
    sequences = played(name, content, "what I look up: ")[1]
    assert sequences[-1].numbers["template_drift"] == 0.0


def test_a_message_may_be_continued_inside_its_thinking() -> None:
    model, sequences = played("qwen3", "<think>\nI could ", "look it up.\n</think>\n\n")
    assert len(model.requests) == 2
    assert sequences[0].messages[0]["reasoning"].strip() == "look it up."
    assert sequences[0].messages[0]["content"].strip() == ""


def test_the_message_of_the_row_keeps_its_other_keys() -> None:
    family = BY_NAME["qwen25"]
    tokenizer = tokenizer_of(family.template, control=family.control, end=family.end)
    model = ScriptedModel([encode(tokenizer, f"3.{family.end}")])
    setup = setup_with(tokenizer, [Echo()], tool_format=family.format)
    prompt, sampling = continued(tokenizer, "It is "), sampling_of(tokenizer)
    context = setup.context(prompt, sampling, deadline=1e9)
    first = Trajectory(uid="u", sample_index=0, prompt_ids=prompt.token_ids)
    conversation = Conversation(prompt, first, context)
    output = asyncio.run(model.generate("r", prompt.token_ids, sampling))
    conversation.add_answer(output, ParsedTurn("3.", ()))
    assert conversation._messages[-1] == {"role": "assistant", "content": "It is 3.", "name": "bot"}
