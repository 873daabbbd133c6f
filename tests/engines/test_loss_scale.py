"""float16: gradients too small for it survive, those too large skip a step, and the factor adapts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from references.token_passes import of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.grad_scaler import FIRST, GROWTH_STEPS, LARGEST, LossScale
from strop.engines.model import load_model
from strop.engines.optimizer import StepReport
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine

Folders = Callable[[str], Path]


def engine_of(folder: Path, dtype: torch.dtype) -> TrainEngine:
    loaded = load_model(ModelConfig(path=str(folder)), device="cpu")
    model = CausalLM(loaded.module, compute_dtype=dtype)
    return TrainEngine(model, EngineConfig(), OptimizerConfig(lr=1e-3), total_steps=None)


def step(engine: TrainEngine, *, factor: float) -> StepReport:
    rows = make_rows([torch.tensor([5, 9, 2])] * 2, [torch.tensor([7, 3, 11]), torch.tensor([8, 21])])
    engine.accumulate(rows, of_log_probs(lambda lp, _, __: -factor * lp.sum(), temperature=1.0))
    return engine.step()


def test_gradients_that_float16_cannot_hold_are_those_of_float32(tiny_folder: Folders) -> None:
    # The smallest number of float16 is 6e-8, larger than almost all of these gradients.
    wanted = step(engine_of(tiny_folder("qwen3"), torch.float32), factor=1e-8)
    found = step(engine_of(tiny_folder("qwen3"), torch.float16), factor=1e-8)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=0.02)
    assert not found.skipped


def test_an_overflow_skips_the_step_and_halves_the_factor_also_after_a_resume(tiny_folder: Folders) -> None:
    engine = engine_of(tiny_folder("qwen3"), torch.float16)
    before = engine.checksum()
    report = step(engine, factor=1e6)
    assert f"losses in float16 are now scaled by {FIRST / 2:g}" in report.skipped
    assert engine.checksum() == before
    tensors, numbers = engine.optimizer.state()
    again = engine_of(tiny_folder("qwen3"), torch.float16)
    again.optimizer.load_state(tensors, numbers)
    assert f"scaled by {FIRST / 4:g}" in step(again, factor=1e6).skipped
    assert not step(again, factor=1.0).skipped


def test_the_factor_doubles_after_steps_without_an_overflow_and_stays_in_its_bounds() -> None:
    scale = LossScale()
    for _ in range(GROWTH_STEPS - 1):
        scale.update(is_finite=True)
    assert scale.value == FIRST
    scale.update(is_finite=True)
    assert scale.value == 2 * FIRST
    for _ in range(GROWTH_STEPS - 1):
        scale.update(is_finite=True)
    scale.update(is_finite=False)  # the count begins again
    for _ in range(GROWTH_STEPS - 1):
        scale.update(is_finite=True)
    assert scale.value == FIRST
    for _ in range(20 * GROWTH_STEPS):
        scale.update(is_finite=True)
    assert scale.value == LARGEST
    for _ in range(40):
        scale.update(is_finite=False)
    assert scale.value == 1.0


def test_a_cpu_does_not_compute_in_float16(tiny_folder: Folders) -> None:
    with pytest.raises(ValueError, match="model.dtype is float16, which needs an accelerator"):
        load_model(ModelConfig(path=str(tiny_folder("qwen3")), dtype="float16"), device="cpu")
