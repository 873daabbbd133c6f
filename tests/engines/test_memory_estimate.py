"""What an update is said to need of a device, beside what was measured on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.engines.config import EngineConfig, LoraConfig, ModelConfig
from strop.engines.memory import GIB, describe_memory

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


def said(tmp_path: Path, *, total: float = 79.2, tokens: int = 16384, **model: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    return describe_memory(
        ModelConfig(path=str(tmp_path), **{"dtype": "bfloat16", **model}),  # type: ignore[arg-type]
        EngineConfig(max_tokens_per_device=tokens),
        device="cpu",
        ranks=1,
        total_bytes=int(total * GIB),
    )


def total_of(line: str) -> float:
    words = line.split()
    return float(words[words.index("about") + 1]) + float(words[words.index("head") + 2])


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "measured"),
    [(16368, False, 42.26), (12784, False, 36.35), (12784, True, 11.62)],
)
def test_the_estimate_is_near_what_an_h100_took(
    tmp_path: Path, tokens: int, checkpointing: bool, measured: float
) -> None:
    # Peaks of updates of 64 and 16 rows of 1,024 tokens, benchmarks/RESULTS.md.
    line = said(tmp_path, tokens=tokens, gradient_checkpointing=checkpointing)
    assert 0.93 * measured <= total_of(line) <= 1.17 * measured
    assert "too much" not in line


def test_what_does_not_fit_is_said_with_a_budget_that_does(tmp_path: Path) -> None:
    line = said(tmp_path, total=24)
    assert line.endswith("or set model.gradient_checkpointing=true")
    budget = int(line.split("max_tokens_per_device=")[1].split()[0])
    assert 0 < budget < 16384
    assert total_of(said(tmp_path, total=24, tokens=budget)) <= 24
    assert "too much" not in said(tmp_path, total=24, tokens=budget)


def test_a_model_whose_optimizer_does_not_fit_needs_ranks_or_adapters(tmp_path: Path) -> None:
    line = said(tmp_path, total=8, gradient_checkpointing=True)
    assert line.endswith("use more ranks, or adapters (model.lora.rank)")
    assert "too much" not in said(
        tmp_path, total=8, gradient_checkpointing=True, tokens=8192, lora=LoraConfig(rank=8)
    )


def test_a_cpu_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    assert describe_memory(ModelConfig(path=str(tmp_path)), EngineConfig(), device="cpu", ranks=1) == ""
