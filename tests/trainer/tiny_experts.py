"""A tiny model with experts, for runs."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer


def make_expert_model(folder: Path, like: Path, *, head_dim: int = 8) -> Path:
    """Two layers of four experts, with the tokenizer of the model at `like`."""
    tokenizer = load_tokenizer(ModelConfig(path=str(like)))
    torch.manual_seed(0)
    shape = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, initializer_range=0.3,
        max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
