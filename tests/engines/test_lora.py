"""LoRA adapters: exact zero at first, the gradient in closed form, merged weights, and PEFT's own folders."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from default_cases import by_default
from safetensors.torch import load_file
from torch import Tensor

from references.language_models import load_plain, plain_greedy, plain_log_probs
from references.token_passes import log_probs_of, of_log_probs, of_values, values_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.lora.adapters import (
    ADAPTER,
    adapter_off,
    add_lora,
    has_adapter,
    merged_tensors,
    save_adapter,
    save_merged,
)
from strop.engines.model import check_language_model, load_model
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model
from strop.engines.weights import weights_metadata
from strop.protocol import DataProto
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.rollout.weight_sync.stream import parameter_stream

Folders = Callable[[str], Path]
PROMPT, RESPONSES = [5, 9, 2, 40], [[7, 3, 3, 11], [60], [8, 21, 30, 4, 17]]
KINDS = ["qwen3", "gpt2", "phi"]
"""A tied head; transposed weights (Conv1D); biases on linear layers."""


def rows() -> DataProto:
    return make_rows([torch.tensor(PROMPT)] * 3, [torch.tensor(r) for r in RESPONSES])


def load(folder: Path, lora: LoraConfig | None = None, **options: Any) -> CausalLM:
    config = ModelConfig(path=str(folder), lora=lora or LoraConfig(), **{"dtype": "float64", **options})
    return load_model(config, device="cpu")


def log_probs(model: CausalLM) -> Tensor:
    return log_probs_of(model, rows(), temperature=0.7, max_tokens=100)[0]


def engine_of(model: CausalLM) -> TrainEngine:
    optim = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    return TrainEngine(model, EngineConfig(max_tokens_per_device=12), optim, total_steps=None)


def train(model: CausalLM, num_steps: int = 3) -> list[float]:
    engine, losses = engine_of(model), []
    for _ in range(num_steps):
        losses.append(
            engine.accumulate(rows(), of_log_probs(lambda lp, _, __: -lp.sum() / 10, temperature=1.0))
        )
        engine.step()
    return losses


def trained(folder: Path, **options: Any) -> CausalLM:
    model = load(folder, LoraConfig(rank=3, alpha=6.0), **options)
    train(model)
    return model


def parameters(model: CausalLM) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen3", "gpt2"))
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_an_adapter_of_zeros_changes_no_bit(tiny_folder: Folders, kind: str, dtype: str) -> None:
    base = log_probs(load(tiny_folder(kind), dtype=dtype))
    assert torch.equal(log_probs(load(tiny_folder(kind), LoraConfig(rank=4), dtype=dtype)), base)


def test_training_moves_adapters_alone_and_lowers_the_loss(tiny_folder: Folders) -> None:
    model = load(tiny_folder("qwen3"), LoraConfig(rank=4), dtype="float32")
    before = parameters(model)
    losses = train(model, 8)
    assert losses[-1] < 0.8 * losses[0]
    after = parameters(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if f".{ADAPTER}." in name}
    # Seven linear layers in each of two decoder layers, A and B each.
    assert len(changed) == 2 * 7 * 2
    assert all(after[name].dtype == torch.float32 for name in changed)
    tensors, _ = engine_of(model).optimizer.state()
    assert len(tensors) == 3 * len(changed)
    assert "exp_avg/model.layers.1.mlp.down_proj.lora_B.default.weight" in tensors


def test_the_first_gradient_in_closed_form(tiny_folder: Folders) -> None:
    # W + s B A with B = 0: dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW = 0. dL/dW comes from the plain model.
    plain, model = load(tiny_folder("qwen3")), load(tiny_folder("qwen3"), LoraConfig(rank=4, alpha=6.0))
    for each in (plain, model):
        engine_of(each).accumulate(rows(), of_log_probs(lambda lp, _, __: -lp.sum(), temperature=1.0))
    full = dict(plain.named_parameters())
    adapted = dict(model.named_parameters())
    name = "model.layers.1.self_attn.k_proj"
    a, b = adapted[f"{name}.lora_A.default.weight"], adapted[f"{name}.lora_B.default.weight"]
    gradient = full[f"{name}.weight"].grad
    assert gradient is not None
    assert b.grad is not None
    assert a.grad is not None
    torch.testing.assert_close(b.grad, 6.0 / 4 * gradient @ a.detach().T, atol=1e-10, rtol=1e-10)
    assert not a.grad.any()
    assert all(p.grad is None for n, p in adapted.items() if "lora_" not in n)


def test_gradient_checkpointing_gives_the_same_gradient(tiny_folder: Folders) -> None:
    plain = load(tiny_folder("qwen3"), LoraConfig(rank=4))
    recomputed = load(tiny_folder("qwen3"), LoraConfig(rank=4), gradient_checkpointing=True)
    train(plain)
    train(recomputed)
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("kind", by_default(KINDS, "gpt2"))
def test_without_the_adapter_the_model_is_the_base(tiny_folder: Folders, kind: str) -> None:
    base = log_probs(load(tiny_folder(kind)))
    model = trained(tiny_folder(kind))
    on = log_probs(model)
    with adapter_off(model):
        assert torch.equal(log_probs(model), base)
        assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert torch.equal(log_probs(model), on)
    assert float((on - base).abs().max()) > 0.01


def test_the_adapter_comes_back_after_an_error(tiny_folder: Folders) -> None:
    model = trained(tiny_folder("qwen3"))
    on = log_probs(model)
    with pytest.raises(KeyError), adapter_off(model):
        raise KeyError
    assert torch.equal(log_probs(model), on)


@pytest.mark.usefixtures("float64_models")
@pytest.mark.parametrize("kind", by_default(KINDS, "gpt2", "phi"))
def test_merged_weights_in_plain_transformers_give_the_same_log_probs(
    tiny_folder: Folders, tmp_path: Path, kind: str
) -> None:
    model = trained(tiny_folder(kind))
    base = load_plain(tiny_folder(kind), dtype=torch.float64)
    assert [name for name, _ in merged_tensors(model)] == [weight.name for weight in weights_metadata(base)]
    before = parameters(model)
    save_merged(model, tmp_path)
    config = json.loads((tiny_folder(kind) / "config.json").read_text().replace("float32", "float64"))
    assert json.loads((tmp_path / "config.json").read_text()).items() >= config.items()
    plain = load_plain(tmp_path, dtype=torch.float64)
    expected = torch.cat([plain_log_probs(plain, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), expected, atol=1e-9, rtol=0)
    assert all(
        torch.equal(p, before[name]) for name, p in parameters(model).items()
    )  # nothing was merged in place


def test_merged_weights_travel_in_the_stream_of_the_base(tiny_folder: Folders) -> None:
    model, base = trained(tiny_folder("qwen3")), load(tiny_folder("qwen3"))
    stream = parameter_stream(model.module, bucket_bytes=5000, weights=merged_tensors(model))
    got = {weight.name: tensor.clone() for bucket in stream for weight, tensor in bucket.tensors()}
    assert list(got) == [weight.name for weight in weights_metadata(base.module)]
    name = "model.layers.0.mlp.up_proj"
    adapted = parameters(model)
    low_rank = adapted[f"{name}.lora_B.default.weight"] @ adapted[f"{name}.lora_A.default.weight"]
    expected = parameters(base)[f"{name}.weight"] + 2.0 * low_rank
    torch.testing.assert_close(got[f"{name}.weight"], expected, atol=1e-12, rtol=0)
    assert torch.equal(got["model.norm.weight"], parameters(base)["model.norm.weight"])


@pytest.mark.usefixtures("float64_models")
@pytest.mark.parametrize("kind", by_default(KINDS, "gpt2", "phi"))
def test_peft_loads_the_saved_adapter(tiny_folder: Folders, tmp_path: Path, kind: str) -> None:
    model = trained(tiny_folder(kind))
    save_adapter(model, tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    plain = peft.PeftModel.from_pretrained(
        load_plain(tiny_folder(kind), dtype=torch.float64), tmp_path / "adapter", autocast_adapter_dtype=False
    )
    expected = torch.cat([plain_log_probs(plain, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen3", "gpt2"))
def test_a_saved_adapter_continues_with_the_same_bits(
    tiny_folder: Folders, tmp_path: Path, kind: str
) -> None:
    model = trained(tiny_folder(kind), dtype="float32")
    model.module.requires_grad_(False)
    save_adapter(model, tmp_path / "one")
    again = load(tiny_folder(kind), LoraConfig(rank=3, path=str(tmp_path / "one")), dtype="float32")
    assert all(torch.equal(p, parameters(again)[name]) for name, p in parameters(model).items())
    assert torch.equal(log_probs(again), log_probs(model))
    save_adapter(again, tmp_path / "two")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    one_more = load(tiny_folder(kind), LoraConfig(rank=3, path=str(tmp_path / "two")), dtype="float32")
    assert train(again, 2) == train(one_more, 2)


def test_an_adapter_that_peft_wrote_is_continued(tiny_folder: Folders, tmp_path: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3"), dtype=torch.float32)
    settings = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, use_rslora=True
    )
    theirs = peft.get_peft_model(plain, settings).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    model = load(tiny_folder("qwen3"), LoraConfig(path=str(tmp_path), rank=2), dtype="float32")
    expected = torch.cat([plain_log_probs(theirs, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), expected, atol=1e-4, rtol=0)
    merged = theirs.merge_and_unload()
    for name, tensor in merged_tensors(model):
        torch.testing.assert_close(tensor, merged.get_parameter(name), atol=1e-6, rtol=0, msg=name)


def test_the_first_adapter_depends_on_the_seed_and_nothing_else(tiny_folder: Folders) -> None:
    def adapters(seed: int) -> dict[str, Tensor]:
        model = load(tiny_folder("qwen3"), dtype="float32")
        state = torch.get_rng_state()
        add_lora(model, LoraConfig(rank=4), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return {name: p for name, p in parameters(model).items() if "lora_A" in name}

    torch.manual_seed(1)
    first, other = adapters(0), adapters(5)
    torch.manual_seed(2)
    again = adapters(0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    for name, a in first.items():
        bound = a.shape[1] ** -0.5
        assert 0.9 * bound < float(a.abs().max()) <= bound, name
    assert not torch.equal(*list(first.values())[:2])


@pytest.mark.usefixtures("float64_models")
def test_native_generation_uses_the_adapter(tiny_folder: Folders, tmp_path: Path) -> None:
    model = trained(tiny_folder("qwen3"))
    plain = load_plain(tiny_folder("qwen3"), dtype=torch.float64)
    before = plain_greedy(plain, PROMPT, 12)
    plain.load_state_dict(dict(merged_tensors(model)), strict=False)

    async def generated() -> list[int]:
        engine = NativeEngine(model, max_running=2)
        output = await engine.generate("0", PROMPT, Sampling(key=1, max_tokens=12, temperature=0.0))
        return list(output.token_ids)

    assert asyncio.run(generated()) == plain_greedy(plain, PROMPT, 12) != before


def test_a_value_head_is_trained_beside_the_adapter(tiny_folder: Folders, tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_folder("qwen3")), dtype="float32", lora=LoraConfig(rank=2))
    model = load_value_model(config, device="cpu")
    engine = engine_of(model)
    for _ in range(3):
        engine.accumulate(rows(), of_values(lambda values, _: (values - 1).square().sum()))
        engine.step()
    values = values_of(engine, rows())
    assert float(values.abs().min()) > 0
    save_adapter(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert "base_model.model.score.weight" in load_file(tmp_path / "adapter_model.safetensors")
    lora = LoraConfig(rank=2, path=str(tmp_path))
    again = load_value_model(
        ModelConfig(path=str(tiny_folder("qwen3")), dtype="float32", lora=lora), device="cpu"
    )
    assert torch.equal(values_of(engine_of(again), rows()), values)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        tiny_folder("qwen3"), num_labels=1
    )
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    score = theirs.base_model.model.score
    torch.testing.assert_close(score.modules_to_save["default"].weight, model.head_weight)


def test_target_modules_choose_the_layers(tiny_folder: Folders) -> None:
    model = load(tiny_folder("qwen3"), LoraConfig(rank=2, target_modules=("q_proj", "layers.1.mlp.up_proj")))
    adapted = {name.split(".lora_")[0] for name in parameters(model) if "lora_" in name}
    attention = {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert adapted == {*attention, "model.layers.1.mlp.up_proj"}
    assert has_adapter(model)
    assert not has_adapter(load(tiny_folder("qwen3")))


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (
            {"rank": 2, "target_modules": ("no_proj",)},
            "target_modules has 'no_proj', which is the name of no layer",
        ),
        (
            {"rank": 2, "target_modules": ("embed_tokens",)},
            "adapt model.embed_tokens, .* only plain adapters",
        ),
        ({"rank": 2, "target_modules": ("lm_head",)}, "names the head lm_head, which takes no adapter"),
        ({"rank": 2, "path": "/nowhere"}, "model.lora.path '/nowhere' has no adapter_config.json"),
    ],
)
def test_layers_and_folders_that_do_not_fit_are_refused(
    tiny_folder: Folders, lora: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load(tiny_folder("llama"), LoraConfig(**lora))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "only plain adapters of linear layers"),
        ({"bias": "all"}, "with bias 'all' and whole modules \\[\\]; only plain LoRA can be continued"),
        ({"modules_to_save": ["lm_head"]}, "whole modules \\['lm_head'\\]; only plain LoRA"),
        ({"peft_type": "IA3", "r": None}, "adapter of type IA3|no usable adapter_config.json"),
        ({"target_modules": ["q_proj"]}, "holds no adapter of this model: base_model.model.model.layers.0"),
        ({"r": 5}, "holds no adapter of this model"),
    ],
)
def test_folders_with_other_adapters_are_refused(
    tiny_folder: Folders, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    save_adapter(trained(tiny_folder("llama")), tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=sentence):
        load(tiny_folder("llama"), LoraConfig(rank=change.get("r") or 3, path=str(tmp_path)))


def test_a_rank_that_contradicts_the_folder_is_refused(tiny_folder: Folders, tmp_path: Path) -> None:
    save_adapter(trained(tiny_folder("llama")), tmp_path)
    with pytest.raises(ValueError, match="model.lora.rank is 8, but the adapter in .* has rank 3"):
        load(tiny_folder("llama"), LoraConfig(path=str(tmp_path), rank=8))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="has no readable adapter_model.safetensors"):
        load(tiny_folder("llama"), LoraConfig(rank=3, path=str(tmp_path)))


def test_a_second_adapter_is_refused(tiny_folder: Folders) -> None:
    model = load(tiny_folder("llama"), LoraConfig(rank=2))
    with pytest.raises(ValueError, match="the model has an adapter already"):
        add_lora(model, LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rank": -1}, "model.lora.rank is -1, but it needs a whole number of at least 0"),
        ({"path": "adapter"}, "model.lora.path is 'adapter', but model.lora.rank is 0"),
        ({"alpha": 0.0}, "model.lora.alpha is 0.0, but it needs a finite number above 0"),
        ({"target_modules": ()}, "model.lora.target_modules is \\[\\]; name at least one layer"),
        ({"target_modules": ("all-linear", "q_proj")}, "all-linear stands alone"),
    ],
)
def test_wrong_lora_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LoraConfig(**settings)


def test_a_missing_peft_names_the_extra(tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ValueError, match=r"needs the package peft; install it with: pip install 'strop\[lora\]'"
    ):
        load(tiny_folder("llama"), LoraConfig(rank=2))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_model_with_stacked_experts_gets_adapters_in_its_linear_layers_and_rolls_out_merged(
    tiny_folder: Folders, tmp_path: Path, kind: str
) -> None:
    model = load(tiny_folder(kind), LoraConfig(rank=3, alpha=6.0), dtype="float32")
    adapted = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {
        f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in ("q", "k", "v", "o")
    }
    train(model)
    save_merged(model, tmp_path)
    plain = load_plain(tmp_path, dtype=torch.float32)
    wanted = torch.cat([plain_log_probs(plain, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), wanted, atol=2e-5, rtol=2e-5)
    save_adapter(model, tmp_path / "adapter")
    again = load(tiny_folder(kind), LoraConfig(rank=3, path=str(tmp_path / "adapter")), dtype="float32")
    torch.testing.assert_close(log_probs(again), log_probs(model))


# Beside stacked experts they have linear layers named gate_proj, up_proj and down_proj: shared experts, and the first
# layer, which has no experts.
@pytest.mark.filterwarnings("error::RuntimeWarning:peft")
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3_experts"])
def test_layers_without_experts_and_shared_experts_are_adapted_and_the_experts_are_not(
    tiny_folder: Folders, tmp_path: Path, kind: str
) -> None:
    plain = load_plain(tiny_folder(kind), dtype=torch.float32)
    linear = {name for name, part in plain.named_modules() if isinstance(part, torch.nn.Linear)}
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.shared_experts.down_proj"} < linear
    model = load(tiny_folder(kind), LoraConfig(rank=3, alpha=6.0), dtype="float32")
    assert {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad} == linear - {
        "lm_head"
    }
    train(model)
    save_merged(model, tmp_path)
    merged = load_plain(tmp_path, dtype=torch.float32)
    wanted = torch.cat([plain_log_probs(merged, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), wanted, atol=2e-5, rtol=2e-5)
    save_adapter(model, tmp_path / "adapter")
    again = load(tiny_folder(kind), LoraConfig(rank=3, path=str(tmp_path / "adapter")), dtype="float32")
    torch.testing.assert_close(log_probs(again), log_probs(model))


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])  # the experts have a stack of the second name
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3_experts"])
def test_one_of_these_layers_may_be_named_alone(tiny_folder: Folders, kind: str, name: str) -> None:
    model = load(tiny_folder(kind), LoraConfig(rank=3, target_modules=(name,)))
    assert {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        f"model.layers.0.mlp.{name}",
        f"model.layers.1.mlp.shared_experts.{name}",
    }


def test_peft_alone_gives_such_layers_no_adapters(tiny_folder: Folders) -> None:
    """The reason for `_names_of_this_model` in strop/engines/lora/adapters.py: once this fails, it can go."""
    plain = load_plain(tiny_folder("glm4_moe"), dtype=torch.float32)
    settings = peft.LoraConfig(r=3, target_modules=["gate_proj", "up_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(settings, plain)
    adapted = {name.split(".lora_")[0] for name, _ in plain.named_parameters() if ".lora_" in name}
    assert adapted
    assert not any(name.endswith(("gate_proj", "up_proj", "down_proj")) for name in adapted)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_that_are_named_are_adapted_merged_saved_and_sampled_with(
    tiny_folder: Folders, tmp_path: Path, kind: str
) -> None:
    lora = LoraConfig(
        rank=3, alpha=6.0, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj")
    )
    model = load(tiny_folder(kind), lora, dtype="float32")
    base = log_probs(load(tiny_folder(kind), dtype="float32"))
    torch.testing.assert_close(log_probs(model), base, atol=2e-5, rtol=0)  # B is 0
    before = parameters(model)
    train(model)
    moved = {name for name, p in parameters(model).items() if not torch.equal(p, before[name])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert sum("experts" in name for name in moved) == 2 * 2 * 2  # layers, parameters, A and B
    with adapter_off(model):
        torch.testing.assert_close(log_probs(model), base, atol=2e-5, rtol=0)
    # The merged weights in plain transformers.
    save_merged(model, tmp_path / "merged")
    plain = load_plain(tmp_path / "merged", dtype=torch.float32)
    wanted = torch.cat([plain_log_probs(plain, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(log_probs(model), wanted, atol=2e-5, rtol=0)
    assert float((wanted - base).abs().max()) > 1e-3
    # The saved adapter in PEFT, and here.
    save_adapter(model, tmp_path / "adapter")
    by_peft = peft.PeftModel.from_pretrained(
        load_plain(tiny_folder(kind), dtype=torch.float32), tmp_path / "adapter", autocast_adapter_dtype=False
    )
    there = torch.cat([plain_log_probs(by_peft, PROMPT, r, temperature=0.7)[0] for r in RESPONSES])
    torch.testing.assert_close(there, wanted, atol=2e-5, rtol=0)
    again = load(tiny_folder(kind), LoraConfig(rank=3, path=str(tmp_path / "adapter")), dtype="float32")
    torch.testing.assert_close(log_probs(again), wanted, atol=2e-5, rtol=0)
    engine = NativeEngine(model, max_running=2)
    output = asyncio.run(engine.generate("a", PROMPT, Sampling(key=1, max_tokens=6)))
    sampled, _ = plain_log_probs(plain, PROMPT, output.token_ids, temperature=1.0)
    torch.testing.assert_close(torch.tensor(output.log_probs), sampled.detach(), atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("experts.up", "stacked experts experts.down_proj, experts.gate_up_proj"),
        ("qproj", "the name of no layer of this model; its linear layers are k_proj, o_proj, q_proj, v_proj"),
    ],
)
def test_names_that_take_no_adapter_are_refused_before_a_weight_is_read(
    tiny_folder: Folders, tmp_path: Path, target: str, sentence: str
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_folder("qwen3_moe") / "config.json").read_bytes())
    lora = LoraConfig(rank=3, target_modules=("q_proj", target))
    with pytest.raises(ValueError, match=sentence):
        check_language_model(ModelConfig(path=str(tmp_path), lora=lora))
