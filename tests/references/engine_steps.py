"""One optimizer step of an engine, in one process and on ranks that share each row, with all that can be compared.

Ranks are real processes over gloo, with sharded parameters. The expected values come from the same engine in one
process, which tests/engines/test_packed_forward.py compares with the models' own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from references.language_models import VOCAB, config, exact_norms
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of, of_log_probs, of_values, values_of
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model

CLOSE = {"atol": 1e-10, "rtol": 1e-10}
Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response ids of a row."""


def ids(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


# Three samples of one prompt apart from each other, one of them a single token; a lone row; the shortest row; a pair.
A, B, C, D = ids(9, 1), ids(1, 2), ids(14, 3), ids(6, 4)
PAIRS: tuple[Pair, ...] = (
    (A, ids(7, 11)),
    (B, ids(1, 12)),
    (A, ids(1, 13)),
    (C, ids(12, 14)),
    (D, ids(2, 15)),
    (A, ids(13, 16)),
    (D, ids(11, 17)),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the same step."""

    folder: str
    values: bool = False
    """Train a value model instead of a policy."""
    sp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    chunks: int = 1
    layers: tuple[int, ...] = ()
    schedule: str = "1f1b"
    ep_size: int = 1
    max_tokens: int = 1000
    """Per device; a row of twice as many fits on two devices."""
    checkpointing: bool = False
    sync: str = "last"
    dtype: str = "float64"
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: str = "adamw"
    offload: str = "none"

    @property
    def ranks_per_row(self) -> int:
        return self.sp_size * self.tp_size * self.cp_size

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_tokens_per_device=self.max_tokens,
            sequence_parallel=self.sp_size,
            tensor_parallel=self.tp_size,
            context_parallel=self.cp_size,
            pipeline_parallel=self.pp_size,
            pipeline_chunks=self.chunks,
            pipeline_layers=self.layers,
            pipeline_schedule=self.schedule,  # type: ignore[arg-type]
            expert_parallel=self.ep_size,
            gradient_sync=self.sync,  # type: ignore[arg-type]
            offload=self.offload,  # type: ignore[arg-type]
        )

    @property
    def axes(self) -> dict[str, int]:
        """As `Ranks.join` takes them."""
        return {
            "sequence_parallel": self.sp_size,
            "tensor_parallel": self.tp_size,
            "context_parallel": self.cp_size,
            "pipeline_parallel": self.pp_size,
            "expert_parallel": self.ep_size,
        }


@dataclass(frozen=True)
class Result:
    """What a rank saw, for its rows, and the whole weights after the step."""

    rows: list[int]
    before: list[Tensor]  # per token: log-probs and entropies, or values
    loss: float
    grad_norm: float
    weights: dict[str, Tensor]
    after: list[Tensor]


def run_step(parallel: Parallel, setting: Setting, pairs: Sequence[Pair]) -> Result:
    """One optimizer step on this rank's share of the rows."""
    with exact_norms():
        return run_engine_step(engine_of(parallel, setting), pairs, values=setting.values)


def run_engine_step(engine: Any, pairs: Sequence[Pair], *, values: bool = False) -> Result:
    """The same with an engine of any kind."""
    parallel = engine.parallel
    share = list(range(parallel.dp_rank, len(pairs), parallel.dp_size))
    rows = make_rows([torch.tensor(pairs[i][0]) for i in share], [torch.tensor(pairs[i][1]) for i in share])
    place = torch.cat([_places(pairs)[i] for i in share]) if share else torch.zeros(0)
    before = _outputs(engine, values, rows)
    loss = _accumulate(engine, values, rows, place)
    report = engine.step()
    after = _outputs(engine, values, rows)
    weights = {}
    for name, parameter in engine.streamed_weights() or engine.model.named_parameters():
        weight = parameter.detach()
        if weight.is_meta:  # of another stage
            continue
        weights[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()
    return Result(share, before, loss, report.grad_norm, weights, after)


def engine_of(parallel: Parallel, setting: Setting) -> TrainEngine:
    load: Callable[..., Any] = load_value_model if setting.values else load_model
    model = load(
        ModelConfig(
            path=setting.folder,
            dtype=setting.dtype,  # type: ignore[arg-type]
            gradient_checkpointing=setting.checkpointing,
            lora=setting.lora,
        ),
        parallel=parallel,
    )
    # A large eps: an update does not hang on the rounding of gradients that are almost 0.
    optim = OptimizerConfig(name=setting.optimizer, lr=0.05, eps=1e-2, max_grad_norm=3.0)  # type: ignore[arg-type]
    return TrainEngine(model, setting.engine, optim, total_steps=None, parallel=parallel)


def _places(pairs: Sequence[Pair]) -> list[Tensor]:
    """Each row's token numbers in the whole batch."""
    ends = torch.tensor([len(response) for _, response in pairs]).cumsum(0).tolist()
    return [torch.arange(end - len(response), end) for end, (_, response) in zip(ends, pairs, strict=True)]


def _outputs(engine: Any, values: bool, rows: Any) -> list[Tensor]:
    return [values_of(engine, rows)] if values else list(log_probs_of(engine, rows, temperature=0.7))


def _accumulate(engine: Any, values: bool, rows: Any, place: Tensor) -> float:
    """A loss that is not linear and weighs each token by its place in the whole batch."""

    def weight(token_index: Tensor) -> Tensor:
        return torch.cos(1.0 + place[token_index])

    def policy_loss(log_probs: Tensor, entropies: Tensor, token_index: Tensor) -> Tensor:
        terms = log_probs + 0.3 * torch.exp(log_probs) + 0.2 * entropies
        return (weight(token_index) * terms).sum()

    def value_loss(values: Tensor, token_index: Tensor) -> Tensor:
        return ((values - weight(token_index)) ** 2).sum()

    if values:
        return float(engine.accumulate(rows, of_values(value_loss)))
    return float(engine.accumulate(rows, of_log_probs(policy_loss, temperature=0.7)))


def rank_step(ranks: Ranks, setting: Setting, pairs: Sequence[Pair]) -> Result:
    """In a rank."""
    return run_step(ranks.join(**setting.axes), setting, pairs)


def check(
    setting: Setting, pairs: Sequence[Pair], size: int, expected: Result, close: dict[str, float] = CLOSE
) -> None:
    """Every rank of every group that shares its rows has their results and the weights of one process."""
    compare(setting, pairs, run_ranks(rank_step, size, setting, pairs), expected, close)


def compare(
    setting: Setting,
    pairs: Sequence[Pair],
    results: Sequence[Result],
    expected: Result,
    close: dict[str, float] = CLOSE,
) -> None:
    """As `check`, of results that are there."""
    size = len(results)
    heads = results[: size // setting.pp_size : setting.ranks_per_row]
    assert sorted(i for head in heads for i in head.rows) == list(range(len(pairs)))
    assert sum(head.loss for head in heads) == pytest.approx(
        expected.loss, abs=close["atol"], rel=close["rtol"]
    )
    places = _places(pairs)
    for rank, result in enumerate(results):
        head = heads[rank // setting.ranks_per_row % len(heads)]
        assert (result.rows, result.loss) == (head.rows, head.loss)
        assert result.grad_norm == pytest.approx(expected.grad_norm, abs=close["atol"], rel=close["rtol"])
        mine = torch.cat([places[i] for i in result.rows]) if result.rows else torch.zeros(0).long()
        for ours, whole in zip(result.before + result.after, expected.before + expected.after, strict=True):
            torch.testing.assert_close(ours, whole[mine], **close)
        for name, weight in result.weights.items():
            expected_weight = expected.weights[name]
            torch.testing.assert_close(weight, expected_weight, msg=lambda m, n=name: f"{n}: {m}", **close)
    assert {name for result in results for name in result.weights} == set(expected.weights)


@lru_cache(maxsize=50)
def one_process(setting: Setting, pairs: tuple[Pair, ...] = PAIRS) -> Result:
    """The step without other ranks, which many tests compare with; do not write into it."""
    result = run_step(alone("cpu"), setting, pairs)
    assert result.grad_norm > 3.0, "the step must clip: its size is that of all ranks together"
    return result


def value_model(folder: Path) -> None:
    """A classifier with one label whose values differ from token to token."""
    generator = torch.Generator().manual_seed(5)
    shape = config("qwen3")
    shape.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
