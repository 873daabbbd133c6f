"""Sizes that a config.json does not say are named, with the values that are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from plan_configs import SMALL, config_of

from strop.trainer.plan.plan import make_plan

OTHERS: dict[str, tuple[Any, dict[str, int]]] = {
    # Both spellings of a size say it; the size of a head follows from others.
    "gpt2": (transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4), {"n_layer": 12, "vocab_size": 50257}),
    "llama": (
        transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=128),
        {"num_key_value_heads": 4, "num_hidden_layers": 32},
    ),
    "mixtral": (
        transformers.MixtralConfig(
            hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
            num_hidden_layers=2,
        ),
        {"num_local_experts": 8},
    ),
}  # fmt: skip


def lines_of(folder: Path, *overrides: str, without: tuple[str, ...], model: Any = SMALL) -> list[str]:
    """Assumptions of a plan that name sizes, of a config.json without some."""
    config = config_of(folder, "resources.device=cpu", *overrides, model=model)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in written.items() if name not in without}))
    plan = make_plan(config, device="h100", advises=False)
    return [line for line in plan.assumptions if "does not say" in line]


def test_a_whole_config_says_all(tmp_path: Path) -> None:
    assert lines_of(tmp_path, without=()) == []


def test_sizes_are_named_with_the_values_of_transformers(tmp_path: Path) -> None:
    unsaid = {"vocab_size": 151936, "num_key_value_heads": 32, "head_dim": 128}
    model = transformers.Qwen3Config(**{**SMALL.to_dict(), "num_attention_heads": 32})
    sizes = ", ".join(f"{name} ({value})" for name, value in unsaid.items())
    sentence = f"config.json does not say {sizes}: the values are those that transformers takes for qwen3"
    roles = ("algorithm=ppo", "algorithm.kl_loss_coef=0.1", f"critic.path='{tmp_path}'")
    assert lines_of(tmp_path, *roles, without=tuple(unsaid), model=model) == [
        f"actor, reference, critic: {sentence}"
    ]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_a_family_calls_otherwise_or_derives(tmp_path: Path, kind: str) -> None:
    model, unsaid = OTHERS[kind]
    (line,) = lines_of(tmp_path, without=tuple(unsaid), model=model)
    assert line.count("(") == len(unsaid)
    assert all(f"{name} ({value})" in line for name, value in unsaid.items())
    without = {"gpt2": ("hidden_size",), "llama": ("head_dim",), "mixtral": ("num_experts",)}[kind]
    assert lines_of(tmp_path, without=without, model=model) == []


def test_an_override_says_a_size_too(tmp_path: Path) -> None:
    model, _ = OTHERS["llama"]
    override = "model.override_config={num_hidden_layers: 3}"
    assert lines_of(tmp_path, override, without=("num_hidden_layers",), model=model) == []
