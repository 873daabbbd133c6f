"""LoRA on a model that FSDP2 shards over two gloo ranks: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of, of_log_probs
from strop.engines import gradients
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.lora.adapters import (
    adapter_at,
    adapter_off,
    adapter_values,
    merged_tensors,
    save_adapter,
    save_merged,
)
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.training import TrainEngine
from strop.protocol import DataProto

Folders = Callable[[str], Path]
PROMPTS = [[5, 9, 2, 40], [5, 9, 2, 40], [1, 1], [33, 2, 8]]
RESPONSES = [[7, 3, 3, 11], [60], [8, 21, 30, 4, 17], [2, 50]]
NUM_STEPS = 3


def rows(which: slice) -> DataProto:
    return make_rows([torch.tensor(p) for p in PROMPTS[which]], [torch.tensor(r) for r in RESPONSES[which]])


def config_of(folder: str, *, checkpointing: bool = False) -> ModelConfig:
    lora = LoraConfig(rank=3, alpha=6.0)  # three rows over two ranks: shards of unequal size
    return ModelConfig(path=folder, dtype="float64", lora=lora, gradient_checkpointing=checkpointing)


def trained(model: CausalLM, parallel: Parallel | None, which: slice) -> tuple[TrainEngine, list[Any]]:
    optim = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    engine = TrainEngine(
        model, EngineConfig(max_tokens_per_device=9), optim, total_steps=None, parallel=parallel
    )
    reports = []
    for _ in range(NUM_STEPS):
        engine.accumulate(rows(which), of_log_probs(lambda lp, _, __: -lp.sum() / 10, temperature=1.0))
        reports.append(engine.step())
    return engine, reports


def results(engine: TrainEngine, which: slice) -> dict[str, Any]:
    model = engine.model
    on = log_probs_of(engine, rows(which), temperature=0.7)[0]
    with adapter_off(model):
        off = log_probs_of(engine, rows(which), temperature=0.7)[0]
    assert torch.equal(log_probs_of(engine, rows(which), temperature=0.7)[0], on)
    with adapter_at(model, [torch.zeros_like(value) for value in adapter_values(model)]):
        zero = log_probs_of(engine, rows(which), temperature=0.7)[0]
    torch.testing.assert_close(zero, off, rtol=0, atol=1e-12)
    assert torch.equal(log_probs_of(engine, rows(which), temperature=0.7)[0], on)
    with engine.full_parameters(), torch.no_grad():
        gathered = engine.model.head_weight.detach().clone()
    return {
        "on": on,
        "off": off,
        "head": gathered,
        "parameters": {n: gradients.full(p.detach()).clone() for n, p in model.named_parameters()},
        "merged": {name: gradients.full(tensor).clone() for name, tensor in merged_tensors(model)},
        "state": {n: gradients.full(t).clone() for n, t in engine.optimizer.state()[0].items()},
    }


def on_ranks(ranks: Ranks, folder: str, out: str, checkpointing: bool) -> dict[str, Any]:
    parallel = ranks.join()
    model = load_model(config_of(folder, checkpointing=checkpointing), parallel=parallel)
    which = slice(0, 3) if ranks.rank == 0 else slice(3, 4)
    engine, reports = trained(model, parallel, which)
    adapters = [p for _, p in model.named_parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) for p in adapters)
    save_adapter(model, Path(out) / "adapter", write=ranks.rank == 0)
    save_merged(model, Path(out) / "merged", write=ranks.rank == 0)
    return {**results(engine, which), "reports": reports}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_ranks_train_the_adapter_of_one_process(
    tiny_folder: Folders, tmp_path: Path, checkpointing: bool
) -> None:
    folder = str(tiny_folder("qwen3"))
    first, second = run_ranks(on_ranks, 2, folder, str(tmp_path), checkpointing)
    alone, reports = trained(load_model(config_of(folder), device="cpu"), None, slice(0, 4))
    expected = results(alone, slice(0, 4))
    assert first["reports"] == second["reports"]
    assert [r.grad_norm for r in first["reports"]] == pytest.approx([r.grad_norm for r in reports], rel=1e-9)
    for kind in ("parameters", "merged", "state"):
        assert list(first[kind]) == list(expected[kind])
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(first[kind][name], tensor, atol=1e-9, rtol=0, msg=f"{kind} {name}")
            assert torch.equal(first[kind][name], second[kind][name])
    for which in ("on", "off"):
        got = torch.cat([first[which], second[which]])
        torch.testing.assert_close(got, expected[which], atol=1e-9, rtol=0)
    torch.testing.assert_close(first["head"], expected["head"])

    save_adapter(alone.model, tmp_path / "alone")
    config = "adapter_config.json"
    assert (tmp_path / "adapter" / config).read_text() == (tmp_path / "alone" / config).read_text()
    again = ModelConfig(path=folder, dtype="float64", lora=LoraConfig(rank=3, path=str(tmp_path / "adapter")))
    assert_parameters(load_model(again, device="cpu"), first["parameters"])
    merged = ModelConfig(path=str(tmp_path / "merged"), dtype="float64")
    assert_parameters(load_model(merged, device="cpu"), first["merged"])


def assert_parameters(model: CausalLM, expected: dict[str, Tensor]) -> None:
    assert {name for name, _ in model.named_parameters()} == set(expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
