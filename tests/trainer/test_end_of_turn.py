"""Generation stops at the token with which the chat template ends an answer, whatever that token is called."""

from __future__ import annotations

import pytest
from tiny_runs import Project

from strop.engines.config import ModelConfig
from strop.engines.model import load_tokenizer
from strop.trainer.setup import end_of_turn, stop_token_ids

TURNS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}END{% endfor %}"


@pytest.mark.parametrize(("end", "is_token"), [("<|turn_ends|>", True), (" that is all", False), ("", False)])
def test_an_added_token_behind_an_answer_stops_generation(project: Project, end: str, is_token: bool) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(project.model)))
    tokenizer.add_tokens(["<|turn_ends|>"])
    tokenizer.chat_template = TURNS.replace("END", end)
    number = tokenizer.convert_tokens_to_ids("<|turn_ends|>")
    assert number not in tokenizer.all_special_ids
    assert end_of_turn(tokenizer) == (number if is_token else None)
    model = ModelConfig(path=str(project.model))
    assert (number in stop_token_ids(model, tokenizer)) == is_token


def test_a_template_that_refuses_such_a_chat_and_none_at_all_add_nothing(project: Project) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(project.model)))
    tokenizer.chat_template = "{{ raise_exception('only one message') }}"
    assert end_of_turn(tokenizer) is None
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None
