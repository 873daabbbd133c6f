"""Generation stops at the token with which the chat template ends an answer, whatever that token is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import Project
from transformers import AutoTokenizer, GenerationConfig

from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.model_folder import end_tokens
from strop.engines.tokenizer import load_tokenizer
from strop.evaluation.evaluate import evaluate
from strop.trainer.setup import end_of_turn, load_training_data, stop_token_ids

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


def test_a_stop_token_beyond_the_model_is_refused_by_its_configuration_alone(
    project: Project, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()  # no tokenizer, no weights
    shutil.copy(project.model / "config.json", tmp_path / "bare")
    for ends in ("[70000]", "[-1]"):
        config = project.config(f"model.path='{tmp_path / 'bare'}'", f"rollout.stop_token_ids={ends}")
        for load in (load_training_data, lambda config: evaluate(config, say=lambda line: None)):
            with pytest.raises(
                ValueError, match=r"stop_token_ids has .*, but the model in .* has the ids 0 to"
            ):
                load(config)


def test_a_stop_token_beyond_the_tokenizer_is_refused_before_a_role_starts(
    project: Project, tmp_path: Path
) -> None:
    model = tmp_path / "padded"
    shutil.copytree(project.model, model)
    settings = json.loads((model / "config.json").read_text())
    beyond = settings["vocab_size"]
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": beyond + 64}))
    config = project.config(f"model.path='{model}'", f"rollout.stop_token_ids=[{beyond}]")
    with pytest.raises(ValueError, match=rf"stop_token_ids has {beyond}, but the tokenizer of"):
        load_training_data(config)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_folder_without_generation_settings_ends_as_its_configuration_says(
    tmp_path: Path, part: str | None
) -> None:
    make_tiny_model(tmp_path, seed=0, hidden_size=32, num_layers=1, intermediate_size=32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    ends = {"eos_token_id": [tokenizer.eos_token_id, 50]}
    (tmp_path / "config.json").write_text(json.dumps(config | (ends if part is None else {part: ends})))
    # transformers makes the settings from config.json then.
    made = GenerationConfig.from_model_config(json.loads((tmp_path / "config.json").read_text()))
    model = ModelConfig(path=str(tmp_path))
    assert list(stop_token_ids(model, tokenizer)) == sorted(made.eos_token_id)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    assert stop_token_ids(model, tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(("named", "ends"), [(-1, []), ([-1, 50], [50]), (50, [50]), (None, [])])
def test_a_negative_end_in_a_configuration_is_none(
    tmp_path: Path, named: int | list[int] | None, ends: list[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": named}))
    assert end_tokens(tmp_path) == ends


@pytest.mark.parametrize(
    ("file", "named", "subject"),
    [("config.json", "x", "settings of the model"), ("generation_config.json", -1, "generation settings of")],
)
def test_a_bad_end_is_told_with_the_file_that_has_it(
    tmp_path: Path, file: str, named: object, subject: str
) -> None:
    (tmp_path / file).write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(ValueError, match=rf"the {subject} .* cannot be used: eos_token_id of {file} is "):
        end_tokens(tmp_path)
