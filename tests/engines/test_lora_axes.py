"""LoRA on a model whose layers or matrices are divided over ranks: steps, folders and checkpoints of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_pipeline_parallel import continued, rows, step_of, stepped_and_saved
from test_tensor_parallel_generation import Output, assert_equal, played
from torch import Tensor

from references.engine_steps import PAIRS, Setting, check, engine_of, run_step, value_model
from references.language_models import exact_norms
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig
from strop.engines.lora.adapters import adapter_off, adapter_tensors, save_adapter, save_merged
from strop.engines.model import load_model
from strop.engines.parallel.experts import check_adapted_experts
from strop.engines.parallel.ranks import alone
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model
from strop.rollout.weight_sync.stream import parameter_stream

SLOW, DIST = pytest.mark.slow, pytest.mark.dist
Folder = Callable[[str], Path]
LORA = LoraConfig(rank=3, alpha=6.0)  # three rows do not divide over two ranks
CLOSE = {"atol": 1e-10, "rtol": 1e-9}


def adapted(folder: Path, target: Path, lora: LoraConfig = LORA, *, values: bool = False) -> Setting:
    """A model with an adapter that is not zero, so that both halves of it have a gradient."""
    load: Callable[..., Any] = load_value_model if values else load_model
    model = load(ModelConfig(path=str(folder), dtype="float64", lora=lora), device="cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or name == "score.weight":
                parameter.normal_(std=0.3, generator=generator)
    save_adapter(model, target / "adapter")
    return Setting(
        folder=str(folder),
        values=values,
        lora=dataclasses.replace(lora, path=str(target / "adapter"), target_modules=("all-linear",)),
    )


# A tied head; biases of all matrices; one key head for both ranks; a second data-parallel rank, of the axes below.
TWO: list[Any] = [
    pytest.param("qwen3", {"pp_size": 2, "max_tokens": 28, "checkpointing": True}, marks=SLOW),
    ("qwen3", {"tp_size": 2, "max_tokens": 28}),
    pytest.param("llama_biased", {"tp_size": 2, "checkpointing": True}, marks=SLOW),
    pytest.param("llama_mqa", {"tp_size": 2}, marks=SLOW),
    pytest.param("qwen3_moe", {"tp_size": 2, "ep_size": 2, "max_tokens": 28}, marks=SLOW),
    pytest.param("qwen3_moe", {"tp_size": 2, "sync": "each", "max_tokens": 28}, marks=SLOW),
    pytest.param("llama_biased", {"pp_size": 2, "sync": "each", "max_tokens": 28}, marks=SLOW),
]


@pytest.mark.parametrize(("kind", "axes"), TWO, ids=str)
def test_two_ranks_take_the_step_of_one_process(
    tiny_folder: Folder, tmp_path: Path, kind: str, axes: dict[str, Any]
) -> None:
    setting = adapted(tiny_folder(kind), tmp_path)
    expected = run_step(alone("cpu"), setting, PAIRS)
    check(dataclasses.replace(setting, **axes), PAIRS, 2, expected, CLOSE)


FOUR: list[dict[str, Any]] = [
    {"pp_size": 2, "tp_size": 2, "chunks": 2}, {"pp_size": 2, "layers": (4, 1)}, {"tp_size": 2},
    {"tp_size": 2, "cp_size": 2}, {"tp_size": 4},
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("axes", FOUR, ids=str)
def test_four_ranks_take_the_step_of_one_process(
    five_layers: Path, tmp_path: Path, axes: dict[str, Any]
) -> None:
    setting = adapted(five_layers, tmp_path)
    expected = run_step(alone("cpu"), setting, PAIRS)
    cut = dataclasses.replace(setting, max_tokens=28, checkpointing=True, **axes)
    check(cut, PAIRS, 4, expected, CLOSE)


@pytest.mark.parametrize("axes", [{"pp_size": 2}, pytest.param({"tp_size": 2}, marks=SLOW)], ids=str)
def test_a_value_head_is_trained_beside_the_adapter(tmp_path: Path, axes: dict[str, Any]) -> None:
    value_model(tmp_path / "classifier")
    setting = adapted(tmp_path / "classifier", tmp_path, values=True)
    expected = run_step(alone("cpu"), setting, PAIRS)
    check(dataclasses.replace(setting, max_tokens=28, **axes), PAIRS, 2, expected, CLOSE)


@pytest.mark.parametrize("layer", ["1", pytest.param("0", marks=SLOW)])
def test_a_stage_without_anything_trained(tiny_folder: Folder, tmp_path: Path, layer: str) -> None:
    lora = dataclasses.replace(LORA, target_modules=(f"{layer}.self_attn.q_proj", f"{layer}.mlp.down_proj"))
    setting = adapted(tiny_folder("qwen3"), tmp_path, lora)
    expected = run_step(alone("cpu"), setting, PAIRS)
    cut = dataclasses.replace(setting, pp_size=2, max_tokens=28, checkpointing=True)
    check(cut, PAIRS, 2, expected, CLOSE)
    # A checkpoint of it goes on.
    saved = str(tmp_path / "saved")
    digest, _ = run_ranks(stepped_and_saved, 2, cut, saved)
    expected_after = continued(None, setting, saved)
    assert expected_after[0] == digest
    for found in run_ranks(continued, 2, cut, saved):
        assert found == expected_after


def facts(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Of an adapter after a step: what it and the base compute, its tensors, weights with it, and samples."""
    before = engine.checksum()
    step_of(engine)
    is_first = engine.parallel.rank == 0
    save_adapter(engine.model, folder / "adapter", write=is_first)
    save_merged(engine.model, folder / "merged", write=is_first)
    streamed: dict[str, Tensor] = {}
    for bucket in parameter_stream(engine.model.module, weights=engine.streamed_weights(), bucket_bytes=3000):
        streamed |= {weight.name: tensor.clone() for weight, tensor in bucket.tensors()}
    with adapter_off(engine.model):
        off = log_probs_of(engine, rows(), temperature=0.7)[0]
    return {
        "before": before,
        "after": engine.checksum(),
        "on": log_probs_of(engine, rows(), temperature=0.7)[0],
        "off": off,
        "adapter": {name: tensor.clone() for name, tensor in adapter_tensors(engine.model)},
        "streamed": streamed,
        "sampled": played(engine, range(3)),
    }


def facts_on_ranks(ranks: Ranks, setting: Setting, folder: str) -> dict[str, Any]:
    with exact_norms():
        return facts(engine_of(ranks.join(**setting.axes), setting), Path(folder))


@pytest.mark.parametrize("axes", [{"pp_size": 2}, {"tp_size": 2}], ids=str)
def test_the_adapter_comes_out_of_all_ranks(
    tiny_folder: Folder, tmp_path: Path, axes: dict[str, Any]
) -> None:
    """As a PEFT folder, merged into a model folder, in the stream for a rollout engine, and in generation."""
    setting = adapted(tiny_folder("qwen3"), tmp_path)
    with exact_norms():
        expected = facts(engine_of(alone("cpu"), setting), tmp_path / "one")
    results = run_ranks(facts_on_ranks, 2, dataclasses.replace(setting, **axes), str(tmp_path / "two"))
    assert len({result["after"] for result in results}) == 1
    for found in results:
        assert found["before"] == expected["before"]
        for name in ("on", "off"):
            torch.testing.assert_close(found[name], expected[name], **CLOSE)
        for kind in ("adapter", "streamed"):
            assert list(found[kind]) == list(expected[kind])
            for name, tensor in expected[kind].items():
                torch.testing.assert_close(found[kind][name], tensor, **CLOSE)
        sampled: list[Output] = found["sampled"]
        assert_equal(sampled, expected["sampled"])
    one, two = tmp_path / "one" / "adapter", tmp_path / "two" / "adapter"
    assert (two / "adapter_config.json").read_text() == (one / "adapter_config.json").read_text()
    saved = load_file(two / "adapter_model.safetensors")
    assert set(saved) == set(expected["adapter"])
    assert all(torch.equal(saved[name], tensor) for name, tensor in results[0]["adapter"].items())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "merged", dtype="float64")
    weights = merged.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in results[0]["streamed"].items())


@pytest.mark.dist
def test_checkpoints_move_between_stages_matrices_and_data_parallel_ranks(
    five_layers: Path, tmp_path: Path
) -> None:
    one = adapted(five_layers, tmp_path)
    both = dataclasses.replace(one, pp_size=2, chunks=2, tp_size=2)
    saved = str(tmp_path / "both")
    digest, *others = run_ranks(stepped_and_saved, 4, both, saved)
    assert set(others) == {digest}
    expected = continued(None, one, saved)
    assert expected[0] == digest
    stages, matrices = dataclasses.replace(one, pp_size=2), dataclasses.replace(one, tp_size=2)
    for setting, size in ((one, 2), (both, 4), (stages, 2), (matrices, 2), (stages, 4)):
        for found in run_ranks(continued, size, setting, saved):
            assert found == expected
    saved = str(tmp_path / "one")
    digest = stepped_and_saved(None, one, saved)
    expected = continued(None, one, saved)
    for found in run_ranks(continued, 4, both, saved):
        assert found == expected
        assert found[0] == digest


EXPERTS = dataclasses.replace(LORA, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"pp_size": 2}], ids=str)
def test_adapters_of_experts(tiny_folder: Folder, tmp_path: Path, axes: dict[str, Any]) -> None:
    """On ranks that hold whole layers, also of some stages."""
    setting = adapted(tiny_folder("qwen3_moe"), tmp_path, EXPERTS)
    expected = run_step(alone("cpu"), setting, PAIRS)
    check(dataclasses.replace(setting, max_tokens=28, **axes), PAIRS, 2, expected, CLOSE)


def test_adapters_of_divided_experts_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    setting = adapted(tiny_folder("qwen3_moe"), tmp_path, EXPERTS)
    module = engine_of(alone("cpu"), setting).model.module
    check_adapted_experts(module, EngineConfig(pipeline_parallel=2))
    for key in ("expert_parallel", "tensor_parallel"):
        with pytest.raises(
            ValueError, match=rf"^critic.engine.{key} is 2, but the adapter changes the experts"
        ):
            check_adapted_experts(module, EngineConfig(**{key: 2}), section="critic.engine")
