"""The same training run on one process or several: what the tests of sharded engines compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from references.language_models import VOCAB
from references.padded_training import PlainTraining, policy_terms, token_weights, value_terms
from references.rank_processes import Ranks
from references.token_passes import log_probs_of, of_log_probs, of_values, values_of
from strop.engines import gradients
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model
from strop.protocol import DataProto

# eps is large, so that an update is a smooth function of the gradient also where that is near 0.
NUMBERS = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 3.0}
OPTIM = OptimizerConfig(**NUMBERS)

# Two prompts that several rows share, one token alone, and lengths from 1 up.
_PROMPTS = (0, 0, 1, 2, 0, 2, 3, 0)
_LENGTHS = (4, 1, 7, 3, 2, 9, 1, 5)
NUM_ROWS = len(_LENGTHS)
ALONE = (tuple(range(NUM_ROWS)),)


def pairs(step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Prompts and responses of a step."""
    generator = torch.Generator().manual_seed(step)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 1, 8, 3)]
    responses = [torch.randint(0, VOCAB, (n,), generator=generator) for n in _LENGTHS]
    return [(prompts[p], r) for p, r in zip(_PROMPTS, responses, strict=True)]


def first_tokens() -> list[int]:
    """Place of each row's first token in the flat token axis of a step."""
    return [sum(_LENGTHS[:row]) for row in range(NUM_ROWS)]


def batch(step: int) -> DataProto:
    """The rows of a step."""
    return make_rows(*zip(*pairs(step), strict=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of two steps."""

    folder: str
    dtype: str = "float64"
    assignment: tuple[tuple[int, ...], ...] = ALONE
    """Rows of each rank."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    gradient_checkpointing: bool = False
    values: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    losses: list[float]
    """Its share of the loss of each step."""
    norms: list[float]
    weights: dict[str, NDArray[Any]]
    checksums: list[str]
    """Before the first step and after the last."""
    outputs: NDArray[Any]
    """Log-probs, or values, of its rows before the first step."""


def engine_of(case: Case, parallel: Parallel | None) -> TrainEngine:
    """The engine of a case."""
    config = ModelConfig(
        path=case.folder,
        dtype=case.dtype,  # type: ignore[arg-type]
        gradient_checkpointing=case.gradient_checkpointing,
    )
    load = load_value_model if case.values else load_model
    model = load(config, device="cpu", parallel=parallel)
    return TrainEngine(model, case.engine, OPTIM, total_steps=None, parallel=parallel)


def accumulate(engine: TrainEngine, case: Case, step: int, which: Sequence[int]) -> float:
    """Loss and gradient of some rows of a step."""
    loss = of_log_probs(lambda lp, h, index: policy_terms(lp, h, _weights(index)), temperature=1.0)
    if case.values:
        loss = of_values(lambda v, index: value_terms(v, _weights(index)))
    return float(engine.accumulate(batch(step), loss, rows=which))


def run_case(ranks: Ranks, case: Case) -> Outcome:
    """Two steps on this rank's rows; rank 0 of 1 runs alone."""
    parallel = None
    if ranks.world_size > 1:
        parallel = ranks.join(**vars(case.engine))
    return train(engine_of(case, parallel), case, ranks.rank)


def train(engine: TrainEngine, case: Case, rank: int) -> Outcome:
    """Two steps."""
    which = case.assignment[rank]
    before = engine.checksum()
    own = batch(0)[list(which)]
    outputs = values_of(engine, own) if case.values else log_probs_of(engine, own, temperature=1.0)[0]
    losses, norms = [], []
    for step in range(2):
        losses.append(accumulate(engine, case, step, which))
        report = engine.step()
        assert not report.skipped
        norms.append(report.grad_norm)
    return Outcome(
        losses=losses,
        norms=norms,
        weights=whole_weights(engine),
        checksums=[before, engine.checksum()],
        outputs=outputs.numpy(),
    )


def whole_weights(engine: TrainEngine) -> dict[str, NDArray[Any]]:
    """Every parameter, gathered."""
    return {
        name: gradients.full(parameter.detach()).numpy().copy()
        for name, parameter in engine.model.named_parameters()
    }


def expected_outcome(case: Case) -> Outcome:
    """The run as plain transformers makes it, on all rows at once."""
    plain = PlainTraining(Path(case.folder), values=case.values, **NUMBERS)
    with torch.no_grad():
        outputs = torch.cat([a for a, _ in plain.outputs(pairs(0))]).numpy()
    steps = [plain.step(pairs(step), first_tokens()) for step in range(2)]
    return Outcome(
        losses=[loss for loss, _ in steps],
        norms=[norm for _, norm in steps],
        weights=plain.weights(),
        checksums=[],
        outputs=outputs,
    )


def assert_same_run(outcomes: list[Outcome], case: Case, expected: Outcome, tolerance: float) -> None:
    """Losses add up, norms and weights are equal everywhere, log-probs or values are those of the rows."""
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(np.sum([o.losses for o in outcomes], axis=0), expected.losses, **close)
    firsts, lengths = first_tokens(), [len(r) for _, r in pairs(0)]
    for outcome, which in zip(outcomes, case.assignment, strict=True):
        np.testing.assert_allclose(outcome.norms, expected.norms, **close)
        assert outcome.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(outcome.weights[name], weight, err_msg=name, **close)
        assert outcome.checksums == outcomes[0].checksums
        places = [np.arange(firsts[row], firsts[row] + lengths[row]) for row in which]
        wanted = expected.outputs[np.concatenate([np.arange(0), *places])]
        np.testing.assert_allclose(outcome.outputs, wanted, **close)


def _weights(index: Tensor) -> Tensor:
    return token_weights(0, sum(_LENGTHS))[index]
