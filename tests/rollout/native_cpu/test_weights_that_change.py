"""Decoding in C keeps packed copies of the weights: they are those of the policy after every kind of optimizer step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_cases import Ask, generate_all, run, tokens

from references.token_passes import log_probs_of, of_log_probs
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.rollout.native.cpu.steps import FusedStep
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the step is compiled by gcc")


def asks(number: int) -> list[Ask]:
    return [(tokens(5, 7), Sampling(key=random_key(number, "test", 0, s), max_tokens=12)) for s in range(3)]


def difference(engine: NativeEngine, trained: TrainEngine, number: int) -> float:
    """Between the log-probs of what is generated now and the trainer's own of the same tokens."""
    given = asks(number)
    outputs = run(generate_all(engine, given))
    rows = make_rows(
        [torch.tensor(prompt) for prompt, _ in given], [torch.tensor(o.token_ids) for o in outputs]
    )
    expected, _ = log_probs_of(trained.model, rows, temperature=1.0, max_tokens=200)
    found = torch.tensor([value for output in outputs for value in output.log_probs])
    return float((found - expected).abs().max())


@pytest.mark.parametrize("says_version", [True, False])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_program_that_steps_by_itself_decodes_with_the_new_weights(
    tiny_folder: Callable[[str], Path], name: str, says_version: bool
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder("qwen3")), dtype="float32"), device="cpu")
    trained = TrainEngine(
        model,
        EngineConfig(),
        OptimizerConfig(name=name, lr=0.05),
        total_steps=None,  # type: ignore[arg-type]
    )
    engine = NativeEngine(model, max_running=4)
    assert difference(engine, trained, 0) < 1e-4
    assert isinstance(engine._batch._steps, FusedStep)
    assert engine._batch._steps._layers, "packed"
    for step in (1, 2):
        rows = make_rows([torch.tensor(tokens(5, step))], [torch.tensor(tokens(6, 10 + step))])
        trained.accumulate(rows, of_log_probs(lambda log_probs, *_: -log_probs.sum(), temperature=1.0))
        trained.step()
        if says_version:
            run(engine.set_version(step))
        assert difference(engine, trained, step) < 1e-4
