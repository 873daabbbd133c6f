"""Prompts that are rendered together: the tokens of each alone, and an error that belongs to its row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from template_family import family_tokenizer

from strop.data import rendering
from strop.data.chat import Chat, encode_all, render_prompt
from strop.data.prompts import encode_prompts
from strop.data.sft.conversations import TrainedChat, tokenize_chat, tokenize_chats

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


@contextlib.contextmanager
def counted_renderings() -> Iterator[mock.Mock]:
    with mock.patch.object(
        rendering, "apply_template_to_all", wraps=rendering.apply_template_to_all
    ) as together:
        yield together


def test_conversations_that_are_alike_are_rendered_at_once_and_have_the_tokens_of_each_alone() -> None:
    tokenizer = family_tokenizer("qwen25")
    chats = [
        *(chat(number) for number in range(150)),
        *(chat(number, "assistant") for number in range(150, 153)),
        *(chat(number, tools=[TOOL]) for number in range(153, 156)),
        chat(156),
    ]
    alone = encode_all(tokenizer, [render_prompt(tokenizer, one) for one in chats])
    with counted_renderings() as together:
        assert [list(ids) for ids in encode_prompts(tokenizer, chats)] == alone
    assert [len(call.args[1]) for call in together.call_args_list] == [3, 64, 64, 22, 3, 1]


def test_a_conversation_that_the_template_refuses_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = family_tokenizer("qwen25")
    monkeypatch.setattr(tokenizer, "chat_template", USERS_ONLY)
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


def trained_chats() -> list[TrainedChat]:
    """Conversations of one to three answers, and one with tools."""
    chats = []
    for number in range(40):
        turns = [
            {"role": role, "content": f"{role} {number}.{turn}"}
            for turn in range(1 + number % 3)
            for role in ("user", "assistant")
        ]
        chats.append(TrainedChat(chat(number, messages=turns)))
    return [*chats, TrainedChat(chat(40, messages=chats[38].chat.messages, tools=[TOOL]), first_trained=2)]


def test_trained_conversations_are_rendered_at_once_and_have_the_tokens_and_mask_of_each_alone() -> None:
    tokenizer = family_tokenizer("qwen25")
    chats = trained_chats()
    alone = [tokenize_chat(tokenizer, each.chat, first_trained=each.first_trained) for each in chats]
    assert any(any(mask) for _, mask in alone)
    with counted_renderings() as together:
        assert tokenize_chats(tokenizer, chats) == alone
    sizes = [len(call.args[1]) for call in together.call_args_list]
    assert sizes == [64, 15, 2, 64, 15, 2]  # what is trained up to its end, then what is before an answer


def test_a_trained_conversation_that_the_template_refuses_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = family_tokenizer("qwen25")
    refused = "{% if messages[-1].content == 'assistant 1.0' %}{{ raise_exception('no') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refused + tokenizer.chat_template)
    chats = trained_chats()[:4]
    results = tokenize_chats(tokenizer, chats)
    assert isinstance(results[1], ValueError)
    assert str(results[1]).startswith("row 1: the chat template cannot render the messages")
    assert [results[number] for number in (0, 2, 3)] == [
        tokenize_chat(tokenizer, chats[number].chat) for number in (0, 2, 3)
    ]
