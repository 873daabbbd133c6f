"""Configurations of small models for tests of plans."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig, Qwen3Config

from strop.trainer.config import Config
from strop.trainer.loading import load

SMALL = Qwen3Config(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
    intermediate_size=128, vocab_size=512, tie_word_embeddings=True,
)  # fmt: skip


def config_of(folder: Path, *overrides: str, model: PreTrainedConfig = SMALL) -> Config:
    """The configuration of a run with a model that is a config.json."""
    model.save_pretrained(folder)
    settings = [
        f"model.path='{folder}'", "model.dtype=bfloat16", "data.train_files=[x]", "reward.path=x",
        "data.prompts_per_step=16", "data.max_prompt_tokens=64", "data.max_response_tokens=192",
        "actor.engine.max_tokens_per_device=4096", "critic.engine.max_tokens_per_device=4096",
        "reference.engine.max_tokens_per_device=4096",
    ]  # fmt: skip
    return load(None, overrides=[*settings, *overrides])
