"""Rows with a token that the tokenizer knows and the model has no row for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from strop.data.config import DataConfig
from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.prompts import PromptDataset
from strop.data.sft.config import SftDataConfig
from strop.data.sft.dataset import SftDataset
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """That of a model which does not know its last token."""
    make_tiny_model(tmp_path, seed=0, hidden_size=32, num_layers=1, head_dim=16, intermediate_size=32)
    grown = AutoTokenizer.from_pretrained(tmp_path)
    grown.add_tokens(["<more>"], special_tokens=True)
    grown.save_pretrained(tmp_path)
    return load_tokenizer(ModelConfig(path=str(tmp_path)))


def prompts(tokenizer: Any, texts: list[str]) -> object:
    config = DataConfig(default_data_source="x", ground_truth_key=None)
    return PromptDataset([{"prompt": text} for text in texts], tokenizer, config, split="train")


def conversations(tokenizer: Any, texts: list[str]) -> object:
    rows = [{"prompt": "a", "completion": text} for text in texts]
    return SftDataset(rows, tokenizer, SftDataConfig(), split="train")


def sequences(tokenizer: Any, texts: list[str]) -> object:
    rows = [{"prompt_ids": [5], "response_ids": tokenizer(text)["input_ids"]} for text in texts]
    return SftDataset(rows, tokenizer, SftDataConfig(), split="train")


def comparisons(tokenizer: Any, texts: list[str]) -> object:
    rows = [{"prompt": "a", "chosen": text, "rejected": "b"} for text in texts]
    return PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="dpo", split="train")


@pytest.mark.parametrize("kind", [prompts, conversations, sequences, comparisons])
def test_the_row_is_named_before_anything_is_trained(
    tokenizer: Any, kind: Callable[[Any, list[str]], object]
) -> None:
    assert kind(tokenizer, ["say it", "no more"]), "a token that no row has does no harm"
    with pytest.raises(
        ValueError, match=r"^train row 1 has the token '<more>' \(\d+\), for which the model has no row"
    ):
        kind(tokenizer, ["say it", "say <more>"])
