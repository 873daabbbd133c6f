"""Prompts that are rendered together: the tokens of each alone, and an error that belongs to its row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from template_family import family_tokenizer

from strop.data import prompts
from strop.data.chat import Chat, encode_all, render_prompt
from strop.data.prompts import encode_prompts

TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}

USERS_ONLY = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def chat(number: int, role: str = "user", **fields: Any) -> Chat:
    messages = [{"role": "user", "content": f"question {number}"}]
    if role == "assistant":
        messages.append({"role": "assistant", "content": f"begun {number}"})
    elif role != "user":
        messages = [{"role": role, "content": "x"}]
    return Chat(
        **{
            "messages": messages,
            "where": f"row {number}",
            "tools": None,
            "options": {},
            "media": (),
            **fields,
        }
    )


def test_conversations_that_are_alike_are_rendered_at_once_and_have_the_tokens_of_each_alone() -> None:
    tokenizer = family_tokenizer("qwen25")
    chats = [
        *(chat(number) for number in range(150)),
        *(chat(number, "assistant") for number in range(150, 153)),
        *(chat(number, tools=[TOOL]) for number in range(153, 156)),
        chat(156),
    ]
    alone = encode_all(tokenizer, [render_prompt(tokenizer, one) for one in chats])
    with mock.patch.object(prompts, "render_prompts", wraps=prompts.render_prompts) as together:
        assert [list(ids) for ids in encode_prompts(tokenizer, chats)] == alone
    assert [len(call.args[1]) for call in together.call_args_list] == [64, 64, 22, 3, 3, 1]


def test_a_conversation_that_the_template_refuses_costs_only_itself() -> None:
    tokenizer = family_tokenizer("qwen25")
    tokenizer.chat_template = USERS_ONLY
    chats = [chat(0), chat(1), chat(2, "robot"), chat(3)]
    errors: list[str] = []

    @contextlib.contextmanager
    def reading(chat: Chat) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            errors.append(str(error))

    encoded = encode_prompts(tokenizer, chats, reading=reading)
    assert [list(ids) for ids in encoded] == encode_all(
        tokenizer, [render_prompt(tokenizer, chats[number]) for number in (0, 1, 3)]
    )
    (error,) = errors
    assert error.startswith("row 2: the chat template cannot render the messages")
