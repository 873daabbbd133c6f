"""Weights that are no numbers are refused at every load, also where the architecture was loaded before."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from references.language_models import save_tiny
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.finite_weights import check_finite
from strop.engines.lora.adapters import save_adapter
from strop.engines.model import load_model
from strop.engines.role_checkpoint import load_role, load_weights, save_role
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model

Folder = Callable[[str], Path]
Tiny = Callable[..., CausalLM]
NOT_FINITE = [math.nan, math.inf, -math.inf]


def load(folder: Path, **options: Any) -> CausalLM:
    return load_model(ModelConfig(path=str(folder), dtype="float32", **options), device="cpu")


def poison(file: Path, value: float, *, end: str, dtype: torch.dtype | None = None) -> str:
    """Write one such number into the last place of the first weight whose name ends so; the name."""
    tensors = {
        name: tensor if dtype is None else tensor.to(dtype) for name, tensor in load_file(file).items()
    }
    name = next(name for name in sorted(tensors) if name.endswith(end))
    tensors[name].flatten()[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.fixture
def second(tiny_folder: Folder, tmp_path: Path) -> Folder:
    """A copy of a tiny model's folder, of which the first was loaded in this process."""

    def copy(kind: str) -> Path:
        load(tiny_folder(kind))
        return Path(shutil.copytree(tiny_folder(kind), tmp_path / kind))

    return copy


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_second_folder_of_an_architecture_is_looked_at_too(
    second: Folder, value: float, dtype: torch.dtype
) -> None:
    folder = second("qwen3")
    name = poison(folder / "model.safetensors", value, end="layers.1.mlp.up_proj.weight", dtype=dtype)
    sentence = (
        rf"^model folder '{folder}' has a NaN or an infinity in {name}: the file is damaged, or the training"
    )
    with pytest.raises(ValueError, match=sentence):
        load(folder)


def test_what_no_pass_would_read_is_looked_at(second: Folder) -> None:
    """The last row of the embedding is of a token that no probe has; its norm is one number among many."""
    folder = second("qwen3")
    for end in ("embed_tokens.weight", "model.norm.weight"):
        poison(folder / "model.safetensors", math.nan, end=end)
    with pytest.raises(ValueError, match="in model.embed_tokens.weight and 1 more: "):
        load(folder)


def test_buffers_that_a_file_has_are_looked_at(tmp_path: Path) -> None:
    """The bias by which a router chooses experts is no parameter."""
    save_tiny("deepseek_v3_experts", tmp_path / "model")
    load(tmp_path / "model")
    name = poison(tmp_path / "model" / "model.safetensors", math.nan, end="e_score_correction_bias")
    with pytest.raises(ValueError, match=f"has a NaN or an infinity in {name}: "):
        load(tmp_path / "model")


def test_critics_and_reward_models_are_looked_at(second: Folder, tiny_folder: Folder, tmp_path: Path) -> None:
    policy, config = second("qwen3"), {"dtype": "float32"}
    poison(policy / "model.safetensors", math.nan, end="norm.weight")
    with pytest.raises(ValueError, match="has a NaN or an infinity in model"):
        load_value_model(ModelConfig(path=str(policy), **config), device="cpu")  # type: ignore[arg-type]
    scores = Path(shutil.copytree(tiny_folder("qwen3_score"), tmp_path / "score"))
    poison(scores / "model.safetensors", math.inf, end="score.weight")
    with pytest.raises(ValueError, match="has a NaN or an infinity in score.weight: "):
        load_value_model(ModelConfig(path=str(scores), **config), device="cpu")  # type: ignore[arg-type]


def test_models_that_are_held_in_half_precision_are_looked_at(second: Folder) -> None:
    """A reference in bfloat16 is read layer by layer."""
    folder = second("qwen3")
    poison(folder / "model.safetensors", math.nan, end="o_proj.weight", dtype=torch.bfloat16)
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    with pytest.raises(
        ValueError, match="has a NaN or an infinity in model.layers.0.self_attn.o_proj.weight"
    ):
        load_model(config, device="cpu", holds_half=True)


def test_adapters_are_looked_at(tiny_folder: Folder, tmp_path: Path) -> None:
    save_adapter(load(tiny_folder("qwen3"), lora=LoraConfig(rank=2)), tmp_path / "adapter")
    lora = LoraConfig(rank=2, path=str(tmp_path / "adapter"))
    load(tiny_folder("qwen3"), lora=lora)
    name = poison(tmp_path / "adapter" / "adapter_model.safetensors", math.nan, end="lora_B.weight")
    with pytest.raises(
        ValueError, match=rf"^model.lora.path '{lora.path}' has a NaN or an infinity in {name}"
    ):
        load(tiny_folder("qwen3"), lora=lora)


def test_checkpoints_are_looked_at(tiny: Tiny, tmp_path: Path) -> None:
    def engine() -> TrainEngine:
        optim = OptimizerConfig(lr=1e-3)
        return TrainEngine(
            tiny("qwen3", dtype="float32"), EngineConfig(max_tokens_per_device=12), optim, total_steps=None
        )

    saved = engine()
    save_role(tmp_path / "sound", saved)
    load_role(tmp_path / "sound", engine())
    with torch.no_grad():
        dict(saved.model.named_parameters())["model.norm.weight"][3] = math.nan
    save_role(tmp_path / "bad", saved)
    sentence = rf"^checkpoint {tmp_path / 'bad'} has a NaN or an infinity in model/model.norm.weight: "
    with pytest.raises(ValueError, match=sentence):
        load_role(tmp_path / "bad", engine())
    with pytest.raises(ValueError, match=sentence):
        load_weights(tmp_path / "bad", tiny("qwen3", dtype="float32"))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ],
)
def test_numbers_of_one_byte_are_looked_at(dtype: torch.dtype) -> None:
    check_finite([("largest", torch.full((3,), torch.finfo(dtype).max).to(dtype))], "x")
    with pytest.raises(ValueError, match="^x has a NaN or an infinity in bad: "):
        check_finite([("bad", torch.tensor([1.0, math.nan]).to(dtype))], "x")


def test_numbers_that_are_large_are_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    check_finite(
        [
            ("large", torch.full((1000,), largest)),
            ("half", torch.full((1000,), torch.finfo(torch.float16).max, dtype=torch.float16)),
            ("whole", torch.ones(3, dtype=torch.int64)),
            ("packed", torch.zeros(3, dtype=torch.float4_e2m1fn_x2)),
            ("none", torch.empty(0)),
            ("elsewhere", torch.empty(3, device="meta")),
        ],
        "x",
    )
