"""Weights of the Megatron engine under their Hugging Face names: checkpoints, export, digests, generation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from test_megatron_engine import Mesh
from torch import Tensor

from references.engine_steps import PAIRS, Result, Setting, engine_of, run_engine_step
from references.language_models import exact_norms
from references.own_ranks import own_ranks
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import alone
from strop.engines.role_checkpoint import load_optimizer, load_role, save_role

__all__ = ["own_ranks"]  # the fixture

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
Folder = Callable[[str], Path]
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


@dataclass(frozen=True)
class Trip:
    """What a rank saw on the way from one checkpoint to the next."""

    step: Result
    checksum: str
    generating: list[Tensor]
    """Log-probs and entropies of all rows by the model that generates."""


def trip(ranks: Ranks, model: str, mesh: Mesh, start: Path, out: Path, in_background: bool) -> Trip:
    """In a rank: continue from a checkpoint, take a step, save everything."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine

    engine = megatron_engine(ranks, model, mesh)
    load_role(start, engine)
    result = run_engine_step(engine, PAIRS)
    pending = save_role(out / "role", engine, in_background=in_background)
    if pending is not None:
        pending.result()
    engine.parallel.barrier("the checkpoint")
    engine.save_model(out / "model")
    with exact_norms(), engine.full_parameters():
        generating = list(log_probs_of(engine.model, every_row(), temperature=0.7))
    return Trip(result, engine.checksum(), generating)


def every_row() -> object:
    return make_rows([torch.tensor(p) for p, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("qwen3", Mesh(tp=2)),
        ("llama", Mesh(pp=2)),
        ("qwen3_moe", Mesh(dp=2, ep=2)),
        ("qwen2", Mesh(dp=2, distributed=True, dtype="float32")),
    ],
)
def test_checkpoints_move_between_the_engines(
    tiny_folder: Folder, tmp_path: Path, kind: str, mesh: Mesh
) -> None:
    """The torch engine takes a step, the Megatron engine the second one, the torch engine the third one."""
    setting = Setting(folder=str(tiny_folder(kind)), dtype=mesh.dtype)
    close = CLOSE if mesh.dtype == "float64" else {"atol": 1e-4, "rtol": 1e-4}
    if mesh.ep > 1:
        close = {"atol": 1e-6, "rtol": 1e-6}
    with exact_norms():
        engine = engine_of(alone("cpu"), setting)
        run_engine_step(engine, PAIRS)
        save_role(tmp_path / "first", engine)
        second = run_engine_step(engine, PAIRS)
        trips = run_ranks(
            trip, mesh.size, setting.folder, mesh, tmp_path / "first", tmp_path, mesh.pp > 1, timeout_s=200
        )
        third = run_engine_step(engine, PAIRS)
        continued = engine_of(alone("cpu"), setting)
        load_role(tmp_path / "role", continued)
        checksum = continued.checksum()
        ours = run_engine_step(continued, PAIRS)
    for name, weight in second.weights.items():
        torch.testing.assert_close(
            trips[0].step.weights[name], weight, **close, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert {seen.checksum for seen in trips} == {checksum}
    for seen in trips:
        for values, expected in zip(seen.generating, second.after, strict=True):
            torch.testing.assert_close(values, expected, **close)
    assert ours.grad_norm == pytest.approx(third.grad_norm, rel=close["rtol"] * 10)
    for name, weight in third.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, **close)
    dtype = torch.float64 if mesh.dtype == "float64" else torch.float32
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.detach(), second.weights[name], **close)


def moments_alone(ranks: Ranks, model: str, start: Path) -> Result:
    """In a rank: the optimizer's state of another run."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine

    engine = megatron_engine(ranks, model, Mesh(tp=2))
    load_optimizer(start, engine)
    return run_engine_step(engine, PAIRS)


def test_a_new_run_takes_over_moments(tiny_folder: Folder, tmp_path: Path) -> None:
    setting = Setting(folder=str(tiny_folder("qwen3")))
    with exact_norms():
        engine = engine_of(alone("cpu"), setting)
        for _ in range(2):  # moments of two gradients, which those of one alone do not equal
            run_engine_step(engine, PAIRS)
        save_role(tmp_path, engine)
        fresh = engine_of(alone("cpu"), setting)
        load_optimizer(tmp_path, fresh)
        expected = run_engine_step(fresh, PAIRS)
        without = run_engine_step(engine_of(alone("cpu"), setting), PAIRS)
    results = run_ranks(moments_alone, 2, setting.folder, tmp_path, timeout_s=200)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(without.weights[name], expected.weights[name], atol=1e-4)
    for key, weight in expected.weights.items():
        torch.testing.assert_close(results[1].weights[key], weight, **CLOSE)
