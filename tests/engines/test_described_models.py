"""The saved configuration of a model is that of the model that is saved."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from strop.engines import model_facts
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.model_facts import check_saved


def saved(folder: Path, **settings: object) -> Path:
    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, **settings,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def change(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_head_that_the_configuration_denies_is_said_and_saved_as_one_of_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=False)
    change(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = load_model(ModelConfig(path=str(folder)), device="cpu")
    assert "its files hold two that differ" in caplog.text
    head = model.module.get_output_embeddings().weight
    with torch.no_grad():
        head.add_(1.0)
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.get_output_embeddings().weight, head)


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_as_it_says_stays_and_is_not_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_tied: bool
) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=is_tied)
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    model.save(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is is_tied
    assert "tie_word_embeddings" not in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        {"vocab_size": 65},
        {"tie_word_embeddings": True},
    ],
)
def test_files_of_another_model_than_the_configuration_says_are_refused(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=False)
    check_saved(folder)
    change(folder, **settings)
    with pytest.raises(
        ValueError, match=r"config.json describes a model of [\d,]+ numbers, and the files .* hold"
    ):
        check_saved(folder)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="hold"):
        check_saved(folder)


def test_what_a_configuration_describes_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (saved(tmp_path / name, tie_word_embeddings=False) for name in ("first", "second"))
    monkeypatch.setattr(model_facts, "_DESCRIBED", {})
    check_saved(first)
    monkeypatch.delattr(model_facts, "_described_numbers")
    check_saved(second)
    weights = load_file(second / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, second / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="hold"):
        check_saved(second)
