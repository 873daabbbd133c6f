"""Collectives of tensor-parallel ranks, counted in a pass and in a decode step beside the numbers that a plan has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.data.tiny_model import make_tiny_model
from strop.engines.attention import PackedAttention
from strop.engines.segments import Segment
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.trainer.plan.generation_time import STEP_COLLECTIVES
from strop.trainer.plan.pass_time import BESIDE_LAYERS, COLLECTIVES
from strop.trainer.plan.rank_costs import LAYERS, NUM_COLLECTIVES


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """Names of those that any thread calls inside."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)
        return lambda *args, **kwargs: called.append(name) or function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            patch.setattr(dist, name, counted(name))
        yield called


def counts(ranks: Ranks, folder: str) -> list[float]:
    """Of layers, embeddings and hidden states; of a pass with its head; of a decode step."""
    engine = engine_of(ranks.join(tensor_parallel=2), Setting(folder=folder, tp_size=2, dtype="float32"))
    model, ids, cpu = engine.model, torch.arange(8), torch.device("cpu")
    attention = PackedAttention([Segment(start=0, length=8)], device=cpu)

    async def generate(max_tokens: int) -> None:
        native = NativeEngine(model, max_running=2)
        sampling = Sampling(key=1, max_tokens=max_tokens)
        await asyncio.wait_for(native.generate(f"{ranks.rank}", [1, 2, 3], sampling), 30)
        await native.leave()

    generated = []
    with engine.full_parameters():
        with collectives() as of_hidden, torch.no_grad():
            hidden = model.hidden(ids[None], ids[None], attention)
        with collectives() as of_head, torch.no_grad():
            model.head.log_probs(hidden, ids, temperature=1.0)
        for max_tokens in (4, 12):
            with collectives() as of_answer:
                asyncio.run(generate(max_tokens))
            generated.append(len(of_answer))
    of_step = (generated[1] - generated[0]) / 8
    return [len(of_hidden), len(of_hidden) + len(of_head), of_step]


@pytest.mark.dist
def test_planned_are_as_many_collectives_as_there_are(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, seed=0, hidden_size=32, num_layers=LAYERS, num_heads=2, head_dim=16)
    in_layers = COLLECTIVES * LAYERS
    planned = [NUM_COLLECTIVES, in_layers + BESIDE_LAYERS, in_layers + STEP_COLLECTIVES]
    assert run_ranks(counts, 2, str(tmp_path), timeout_s=60) == [planned] * 2
