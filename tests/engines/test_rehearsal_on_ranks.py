"""A rehearsal on two ranks: each passes the longest rows, and the run behind it is the run without, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsdp_cases import NUM_ROWS, Case, accumulate, engine_of

from references.language_models import exact_norms
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig
from strop.workers.rehearsal import rehearsed

GROUPS = [(6, (8, 8))] * 3
"""Of 20 packed tokens each."""


def run(ranks: Ranks, case: Case, rehearses: bool) -> dict[str, Any]:
    exact_norms()
    engine = engine_of(case, ranks.join(**vars(case.engine)))
    found = None
    if rehearses:
        engine.make_optimizer_state()
        found = rehearsed(engine, GROUPS, lambda tokens: tokens.log_probs(temperature=1.0)[0].sum())
        assert engine.counts.tokens.of_rows == 0
        assert all(p.grad is None for _, p in engine.model.named_parameters())
    steps = []
    for step in range(2):
        loss = accumulate(engine, case, step, case.assignment[ranks.rank])
        steps.append((loss, engine.step().grad_norm, engine.checksum()))
    return {"steps": steps, "rehearsal": None if found is None else (found.num_micro_batches, found.tokens)}


@pytest.mark.parametrize(
    ("axes", "tokens"),
    [
        pytest.param({}, 20, marks=pytest.mark.slow),
        ({"gradient_sync": "each", "shard_size": 1}, 20),
        pytest.param({"tensor_parallel": 2}, 20, marks=pytest.mark.dist),
        pytest.param({"pipeline_parallel": 2}, 20, marks=pytest.mark.dist),
        pytest.param({"context_parallel": 2, "max_tokens_per_device": 14}, 20, marks=pytest.mark.dist),
    ],
    ids=lambda value: "-".join(value) or "dp" if isinstance(value, dict) else "",
)
def test_the_run_behind_a_rehearsal_is_the_run_without(
    tiny_folder: Callable[[str], Path], axes: dict[str, Any], tokens: int
) -> None:
    every = tuple(range(NUM_ROWS))
    is_shared = not axes or "gradient_sync" in axes
    rows = (every[::2], every[1::2]) if is_shared else (every, every)
    engine = EngineConfig(**{"max_tokens_per_device": 28} | axes)
    case = Case(folder=str(tiny_folder("qwen3")), dtype="float32", engine=engine, assignment=rows)
    plain, behind = (run_ranks(run, 2, case, rehearses) for rehearses in (False, True))
    assert max(ours["rehearsal"][0] for ours in behind) >= 2
    for ours, expected in zip(behind, plain, strict=True):
        assert ours["rehearsal"][1] == tokens
        assert ours["steps"] == expected["steps"]
