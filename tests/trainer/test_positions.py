"""Texts that are longer than a model is made for are refused before it is loaded, and in every pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import Project, train_in

from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.model_facts import max_positions
from strop.engines.packing import make_rows
from strop.engines.pretrained_config import load_model_config
from strop.engines.training import Engine
from strop.evaluation.evaluate import evaluate
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run


def short_model(project: Project, folder: Path, positions: int, **rope: object) -> Path:
    """The model of a project, made for few positions."""
    shutil.copytree(project.model, folder)
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": positions}
    if rope:
        settings["rope_parameters"] = settings.get("rope_parameters", {}) | rope
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_answers_that_a_model_has_no_positions_for_are_refused_before_a_role_starts(
    project: Project, tmp_path: Path
) -> None:
    model = short_model(project, tmp_path / "model", 20)
    config = project.config(f"model.path='{model}'", "data.max_response_tokens=12")
    with pytest.raises(ValueError, match=r"made for 20 positions: set data.max_response_tokens=\d+") as error:
        train_in(tmp_path / "run", config)
    room = int(str(error.value).split("data.max_response_tokens=")[1].split(",")[0])
    fits = project.config(f"model.path='{model}'", f"data.max_response_tokens={room}", "trainer.max_steps=1")
    done = train_in(tmp_path / "other", fits)
    assert len(done.records) == 1


def test_a_validation_is_refused_alike_and_so_is_an_evaluation(project: Project, tmp_path: Path) -> None:
    """Its prompts are longer than those of training."""
    rows = [{"data_source": "x", "prompt": "1 + 1 = ? " * 4, "reward_model": {"ground_truth": "2"}}]
    (tmp_path / "val.jsonl").write_text(json.dumps(rows[0]) + "\n")
    model = short_model(project, tmp_path / "model", 30)
    config = project.config(
        f"model.path='{model}'", f"data.val_files=['{tmp_path / 'val.jsonl'}']", "data.max_prompt_tokens=200"
    )
    with pytest.raises(ValueError, match=r"made for 30 positions: use shorter prompts"):
        train_in(tmp_path / "run", config)
    with pytest.raises(ValueError, match=r"made for 30 positions: use shorter prompts"):
        evaluate(config, say=lambda line: None)


def test_conversations_that_a_model_has_no_positions_for_are_refused(
    project: Project, tmp_path: Path
) -> None:
    model = short_model(project, tmp_path / "model", 8)
    config = project.config(f"model.path='{model}'")
    start = start_run(tmp_path / "run", config, command=["strop", "sft"])
    with start.run, pytest.raises(ValueError, match=r"made for 8 positions: set sft.data.max_tokens=8"):
        fine_tune(config, start.run, say=lambda line: None)


def test_a_pass_refuses_a_row_that_would_change_what_others_give(project: Project, tmp_path: Path) -> None:
    model = short_model(project, tmp_path / "model", 12)
    engine = Engine(load_model(ModelConfig(path=str(model)), device="cpu"), EngineConfig(), is_frozen=True)

    def scored(*lengths: int) -> torch.Tensor:
        rows = make_rows([torch.tensor([1, 2])] * len(lengths), [torch.arange(n) % 7 for n in lengths])
        return engine.map_tokens(rows, lambda tokens: {"log_probs": tokens.log_probs(temperature=1.0)[0]})[
            "log_probs"
        ]

    assert len(scored(11, 3)) == 14  # 2 + 11 - 1 inputs: the last token is none
    with pytest.raises(
        ValueError, match="a sample has 13 tokens .2 of prompt., but the model is made for 12 posit"
    ):
        scored(3, 12)


def test_dynamic_frequencies_end_where_they_would_change(project: Project, tmp_path: Path) -> None:
    model = short_model(
        project, tmp_path / "model", 64,
        rope_type="dynamic", factor=2.0, rope_theta=10000.0, original_max_position_embeddings=32,
    )  # fmt: skip
    assert max_positions(load_model_config(ModelConfig(path=str(model)))) == 32
