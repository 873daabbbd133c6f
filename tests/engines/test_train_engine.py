"""TrainEngine: steps that reduce a loss, and a checkpoint that continues bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.packing import make_rows
from strop.engines.role_checkpoint import load_role, save_role
from strop.engines.training import TrainEngine
from strop.protocol import DataProto

Tiny = Callable[..., CausalLM]
OPTIM = OptimizerConfig(lr=3e-3, schedule="linear", warmup_steps=1)


def rows(step: int) -> DataProto:
    generator = torch.Generator().manual_seed(step)
    prompts = [torch.randint(0, 61, (5,), generator=generator)] * 3
    responses = [torch.randint(0, 61, (length,), generator=generator) for length in (4, 1, 7)]
    return make_rows(prompts, responses)


def negative_log_likelihood(log_probs: Tensor, entropies: Tensor, token_index: Tensor) -> Tensor:
    return -log_probs.sum() / 12


def train(engine: TrainEngine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(
            engine.accumulate(rows(step % 2), of_log_probs(negative_log_likelihood, temperature=1.0))
        )
        engine.step()
    return losses


def engine_of(model: CausalLM) -> TrainEngine:
    return TrainEngine(model, EngineConfig(max_tokens_per_device=12), OPTIM, total_steps=20)


def test_training_reduces_the_loss_and_changes_the_checksum(tiny: Tiny) -> None:
    engine = engine_of(tiny("llama", dtype="float32"))
    before = engine.checksum()
    assert engine_of(tiny("llama", dtype="float32")).checksum() == before
    losses = train(engine, range(20))
    assert losses[-1] < 0.5 * losses[0]
    assert engine.checksum() != before


def test_checksum_sees_a_single_bit(tiny: Tiny) -> None:
    engine = engine_of(tiny("llama", dtype="float32"))
    before = engine.checksum()
    name, parameter = list(engine.model.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(torch.int32).flatten()[-1] ^= 1
    assert engine.checksum() != before, name


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("gpt2", "float64")])
def test_a_saved_engine_continues_bit_for_bit(tiny: Tiny, tmp_path: Path, kind: str, dtype: str) -> None:
    engine = engine_of(tiny(kind, dtype=dtype))
    train(engine, range(4))
    save_role(tmp_path, engine)
    again = engine_of(tiny(kind, dtype=dtype))
    load_role(tmp_path, again)
    assert again.checksum() == engine.checksum()
    assert train(again, range(4, 8)) == train(engine, range(4, 8))
    assert again.checksum() == engine.checksum()


def test_an_engine_saved_before_its_first_step_continues(tiny: Tiny, tmp_path: Path) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"))
    save_role(tmp_path, engine)
    again = engine_of(tiny("qwen3", dtype="float32"))
    load_role(tmp_path, again)
    assert train(again, range(3)) == train(engine, range(3))


def test_a_poisoned_loss_changes_no_weight(tiny: Tiny) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"))
    before = engine.checksum()
    engine.accumulate(
        rows(0), of_log_probs(lambda log_probs, _, __: (log_probs * torch.nan).sum(), temperature=1.0)
    )
    report = engine.step()
    assert "non-finite in model.embed_tokens.weight and" in report.skipped
    assert engine.checksum() == before
    assert train(engine, range(1))[0] > 0


def test_log_probs_carry_no_gradient_and_leave_none(tiny: Tiny) -> None:
    engine = engine_of(tiny("qwen3", dtype="float32"))
    log_probs, entropies = log_probs_of(engine, rows(0), temperature=1.0)
    assert not log_probs.requires_grad
    assert not entropies.requires_grad
    assert (log_probs.shape, entropies.shape) == ((12,), (12,))
    assert all(p.grad is None for _, p in engine.model.named_parameters())
