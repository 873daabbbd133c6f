"""Folders that strop saves, as a program with transformers 4 reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    StableLmConfig,
)

from strop.data.tiny_model import make_tiny_tokenizer
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.transformers4 import save_tokenizer, write_older_config

_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 8.0}


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / name).read_text())
    return settings


# The names are those of the configuration classes of transformers 4.57.
@pytest.mark.parametrize(
    ("config", "section", "older"),
    [
        (Qwen3Config(rope_theta=1e6), "", {"rope_theta": 1e6, "rope_scaling": None}),
        (
            LlamaConfig(rope_theta=5e5, rope_scaling=dict(_LLAMA3), max_position_embeddings=131072), "",
            {"rope_theta": 5e5, "rope_scaling": _LLAMA3},
        ),
        (StableLmConfig(), "", {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25}),
        (
            Gemma3TextConfig(rope_scaling=dict(_LINEAR)), "",
            {"rope_theta": 1e6, "rope_scaling": _LINEAR, "rope_local_base_freq": 1e4},
        ),
        (
            Gemma3Config(text_config={"rope_scaling": dict(_LINEAR)}), "text_config",
            {"rope_theta": 1e6, "rope_scaling": _LINEAR, "rope_local_base_freq": 1e4},
        ),
    ],
)  # fmt: skip
def test_rotary_embeddings_have_both_names_and_are_read_as_before(
    tmp_path: Path, config: PreTrainedConfig, section: str, older: dict[str, Any]
) -> None:
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    write_older_config(tmp_path)
    settings = read(tmp_path)[section] if section else read(tmp_path)
    assert {name: settings[name] for name in older} == older
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == before


_SLIDING = {"sliding_attention": {**_LINEAR, "rope_theta": 1e4}}


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(
            rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}, **_SLIDING}
        ),
        Gemma4TextConfig(),  # its older form raises an error
    ],
)
def test_what_the_older_names_cannot_say_is_left_as_it_is(tmp_path: Path, config: PreTrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    before = read(tmp_path)
    write_older_config(tmp_path)
    assert read(tmp_path) == before


def test_numbers_that_json_lacks_are_read(tmp_path: Path) -> None:
    GraniteMoeHybridConfig(rope_theta=1e6, position_embedding_type="rope").save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    write_older_config(tmp_path)
    assert read(tmp_path)["rope_theta"] == 1e6


def test_a_saved_model_has_both_names(tiny_model: Path, tmp_path: Path) -> None:
    load_model(ModelConfig(path=str(tiny_model)), device="cpu").save(tmp_path)
    settings = read(tmp_path)
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    assert settings["torch_dtype"] == settings["dtype"] == "float32"


def test_a_saved_tokenizer_has_the_older_names_and_is_read_as_before(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|tool|>"]})
    tokenizer.save_pretrained(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    save_tokenizer(tokenizer, tmp_path / "saved")
    settings = read(tmp_path / "saved", "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|user|>", "<|tool|>"]
    assert "extra_special_tokens" not in settings
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again) is type(tokenizer)
    assert again.extra_special_tokens == tokenizer.extra_special_tokens
    text = "<|user|>1 + 1<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
