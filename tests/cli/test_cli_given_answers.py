"""`strop generate --given`: a teacher's log over answers that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from cli_calls import Project, cli
from template_family import family_tokenizer
from transformers import AutoTokenizer

from strop.data.chat import Chat
from strop.evaluation.offline_answers import encoded


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_log_of_given_answers_is_that_of_sampled_ones(project: Project, tmp_path: Path) -> None:
    asked, sampled, again = tmp_path / "asked.txt", tmp_path / "sampled.jsonl", tmp_path / "again.jsonl"
    asked.write_text("abc\nbca\n")
    made = cli(
        "generate", project.model, "--prompts", asked, "--temperature", 1.0, "--samples", 2, "--max-tokens", 4,
        "--top-logprobs", 3, "--out", sampled,
    )  # fmt: skip
    assert made.code == 0, made.err
    given = cli(
        "generate", project.model, "--prompts", sampled, "--given", "--top-logprobs", 3, "--out", again
    )
    assert given.code == 0, given.err
    assert f"4 answers of {sampled} logged to {again}" in given.err
    for one, other in zip(rows_of(sampled), rows_of(again), strict=True):
        for name in ("prompt", "response", "prompt_ids", "response_ids", "teacher_ids", "num_tokens"):
            assert one[name] == other[name], name
        for mine, theirs in zip(one["teacher_logprobs"], other["teacher_logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_text_becomes_the_tokens_that_the_model_would_have_written(
    project: Project, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    file = written(tmp_path / "answers.jsonl", [{"prompt": "abc", "response": "cba"}])
    out = tmp_path / "logs.parquet"
    made = cli("generate", project.model, "--prompts", file, "--given", "--top-logprobs", 2, "--out", out)
    assert made.code == 0, made.err
    (row,) = pyarrow.parquet.read_table(out).to_pylist()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_dict=False
    )
    assert row["prompt_ids"] == asked
    assert tokenizer.decode(row["response_ids"][:-1]) == "cba"
    assert row["response_ids"][-1] == tokenizer.eos_token_id, (
        "the turn ends, and nothing stands behind its end"
    )
    assert (row["stop_reason"], len(row["teacher_ids"]), len(row["teacher_ids"][0])) == ("stop", 4, 2)


def test_what_a_template_writes_behind_the_end_of_a_turn_is_no_part_of_the_answer() -> None:
    tokenizer = family_tokenizer("qwen25")
    chat = Chat(messages=({"role": "user", "content": "abc"},), where="row 0", options={})
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompt_ids, response_ids = encoded(tokenizer, chat, "cba", stops, "row 0")
    assert tokenizer.decode(prompt_ids).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(response_ids) == "cba<|im_end|>"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": "abc"}, "row 0 of .* has no answer: name the column response, solution_str"),
        ({"prompt_ids": [1, 2], "response_ids": [99999]}, "response_ids has 99999, and the model has the tokens 0 to"),
        ({"prompt_ids": [1, 2], "response_ids": []}, "response_ids is empty, so nothing can be logged"),
        ({"prompt_ids": [1] * 5000, "response_ids": [2]}, "has 5001 tokens, more than the .* positions of the model"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_logged_is_named(
    project: Project, row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "answers.jsonl", [row])
    words = ["--prompts", file, "--given", "--top-logprobs", 2, "--out", tmp_path / "logs.jsonl"]
    assert re.search(sentence, cli("generate", project.model, *words).sentence)


def test_what_has_no_meaning_beside_given_answers_is_refused(project: Project, tmp_path: Path) -> None:
    file = written(tmp_path / "answers.jsonl", [{"prompt": "abc", "response": "cba"}])
    words = ["generate", project.model, "--prompts", file, "--given", "--out", tmp_path / "logs.jsonl"]
    assert "say --top-logprobs K" in cli(*words).sentence
    assert "--temperature would do nothing" in cli(*words, "--top-logprobs", 2, "--temperature", 1).sentence
