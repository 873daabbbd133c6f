"""Which special tokens stay in the text of an answer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from references.chat_templates import CHATML, make_tokenizer
from strop.data.sft.token_rows import check_text
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.utils.chat_template.answers import answer_text, keep_special_tokens, kept_special_tokens

CONTROL = (
    "<s>", "</s>", "<|im_start|>", "<think>", "</think>", "[THINK]", "[/THINK]", "[INST]", "[/INST]", "<alone>",
    "<|im_end|>",
)  # fmt: skip
INSTRUCT = """\
{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}
{%- else %}{{ m['content'] + '<|im_end|>' }}{%- endif %}{%- endfor %}"""
ANSWER = "<think>3 + 4</think>[THINK]or[/THINK] 7<alone><|im_start|>[INST]<|im_end|>"


def tokenizer_of(template: str = INSTRUCT) -> Any:
    tokenizer = make_tokenizer(template, CONTROL)
    tokenizer.bos_token, tokenizer.pad_token = "<s>", "</s>"
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_pairs_that_open_and_close_a_part_of_an_answer_stay() -> None:
    tokenizer = tokenizer_of()
    assert answer_text(tokenizer, ids_of(tokenizer, ANSWER)) == "<think>3 + 4</think>[THINK]or[/THINK] 7"
    assert kept_special_tokens(tokenizer) == ("<think>", "</think>", "[THINK]", "[/THINK]")
    # The template does not write [INST] around a message here, so it is a pair like the others.
    assert "[INST]" in kept_special_tokens(tokenizer_of(CHATML))


def test_others_stay_where_they_are_named_and_none_where_none_is() -> None:
    tokenizer = tokenizer_of()
    keep_special_tokens(tokenizer, ["<alone>"])
    assert answer_text(tokenizer, ids_of(tokenizer, ANSWER)) == "3 + 4or 7<alone>"
    keep_special_tokens(tokenizer, [])
    assert answer_text(tokenizer, ids_of(tokenizer, ANSWER)) == "3 + 4or 7"
    with pytest.raises(
        ValueError, match=r"model.keep_special_tokens has '<thin>', which is no special token"
    ):
        keep_special_tokens(tokenizer, ["<thin>"])


@pytest.mark.parametrize("text", ["plain [text]", "<think>", "<|im_end|>", "", "a </think> b"])
def test_without_such_tokens_it_is_what_transformers_decodes(text: str) -> None:
    tokenizer = make_tokenizer(CHATML)  # whose <think> is text
    ids = ids_of(tokenizer, text)
    assert answer_text(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert kept_special_tokens(tokenizer) == ()


def test_the_setting_reaches_the_tokenizer_of_a_model(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.save_pretrained(folder)
    ids = ids_of(tokenizer, "<think>a</think>b")
    assert answer_text(load_tokenizer(ModelConfig(path=str(folder))), ids) == "<think>a</think>b"
    without = ModelConfig(path=str(folder), keep_special_tokens=())
    assert answer_text(load_tokenizer(without), ids) == "ab"


def test_tokens_of_a_sample_say_its_text_whatever_tokens_stayed_in_it() -> None:
    tokenizer = tokenizer_of()
    ids = ids_of(tokenizer, ANSWER)
    for text in ("<think>3 + 4</think>[THINK]or[/THINK] 7", "3 + 4or 7"):
        check_text(tokenizer, {"response": text, "response_ids": ids}, "row 0")
    with pytest.raises(ValueError, match="they are those of another tokenizer"):
        check_text(tokenizer, {"response": "3 + 4 or 7", "response_ids": ids}, "row 0")
