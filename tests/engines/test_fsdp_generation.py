"""Generation with the shards of a trained model: every rank plays requests of its own, and none waits for another."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp_cases import ALONE, Case, accumulate, batch, engine_of, train, whole_weights
from torch.distributed.tensor import DTensor

from references.language_models import VOCAB
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.gradients import local
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

Folder = Callable[[str], Path]
UNEVEN = ((0, 3, 6, 7, 1), (4, 2, 5))
PROMPTS = [
    torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (3, 3, 9, 1, 6)
]


def generate(model: CausalLM, requests: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of these requests, all at once."""

    async def run() -> list[TokenOutput]:
        engine = NativeEngine(model, max_running=3)
        outputs = await asyncio.gather(
            *(
                engine.generate(str(r), PROMPTS[r], Sampling(key=100 + r, max_tokens=4 + 3 * r))
                for r in requests
            )
        )
        await engine.leave()
        return outputs

    async def bounded() -> list[TokenOutput]:
        async with asyncio.timeout(60):
            return await run()

    return [(list(o.token_ids), list(o.log_probs)) for o in asyncio.run(bounded())]


def generate_between_steps(ranks: Ranks, case: Case, requests: list[list[int]]) -> dict[str, Any]:
    """A step, generation of this rank's requests, another step."""
    parallel = ranks.join(**vars(case.engine)) if ranks.world_size > 1 else None
    engine = engine_of(case, parallel)
    mine = case.assignment[ranks.rank]
    accumulate(engine, case, 0, mine)
    engine.step()
    with engine.full_parameters():
        outputs = generate(engine.model, requests[ranks.rank])
        dtypes = {p.dtype for _, p in engine.model.named_parameters()}
        sharded = [name for name, p in engine.model.named_parameters() if isinstance(p, DTensor)]
    resharded = all(isinstance(p, DTensor) for _, p in engine.model.named_parameters())
    held = sum(local(p.detach()).untyped_storage().nbytes() for p in engine.model.module.parameters())
    loss = accumulate(engine, case, 1, mine)
    engine.step()
    again = log_probs_of(engine, batch(0), rows=(), temperature=1.0)[0]
    return {
        "outputs": outputs,
        "dtypes": dtypes,
        "sharded_inside": sharded,
        "resharded": resharded,
        "held": held,
        "loss": loss,
        "weights": whole_weights(engine),
        "empty": len(again),
    }


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "llama"])
@pytest.mark.parametrize(
    "requests", [[[0, 1, 2, 4], [3]], pytest.param([[], [0, 1, 2, 3, 4]], marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_one_process(tiny_folder: Folder, kind: str, requests: list[list[int]]) -> None:
    case = Case(folder=str(tiny_folder(kind)), dtype="float64")
    alone = generate_between_steps(Ranks(0, 1, 0), case, [[0, 1, 2, 3, 4]])
    two = dataclasses.replace(case, assignment=UNEVEN, engine=EngineConfig(max_tokens_per_device=20))
    results = run_ranks(generate_between_steps, 2, two, requests, timeout_s=60)
    for result, which in zip(results, requests, strict=True):
        for (tokens, log_probs), number in zip(result["outputs"], which, strict=True):
            expected_tokens, expected_log_probs = alone["outputs"][number]
            assert tokens == expected_tokens
            np.testing.assert_allclose(log_probs, expected_log_probs, atol=1e-9)
        assert result["sharded_inside"] == []
        assert result["resharded"]
    # Generation leaves training as it was.
    assert sum(result["loss"] for result in results) == pytest.approx(alone["loss"], abs=1e-9)
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(results[1]["weights"][name], weight, atol=1e-9, err_msg=name)
    # What a rank keeps between turns is its share, with a little padding.
    assert results[0]["held"] < 0.6 * alone["held"]


def test_generation_computes_in_the_compute_precision(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), dtype="bfloat16", assignment=UNEVEN)
    results = run_ranks(generate_between_steps, 2, case, [[0, 2], [1]], timeout_s=60)
    assert [result["dtypes"] for result in results] == [{torch.bfloat16}] * 2
    assert all(result["resharded"] for result in results)


def without_others(ranks: Ranks, case: Case) -> list[int]:
    """Forward passes of rank 1 alone, while rank 0 waits outside of them for a number that rank 1 sends then."""
    parallel = ranks.join()
    engine = engine_of(case, parallel)
    told = torch.zeros(1, dtype=torch.int64)
    with engine.full_parameters():
        if ranks.rank == 1:
            outputs = generate(engine.model, [0, 1])
            told += len(outputs[1][0])
        dist.all_reduce(told)
    return told.tolist()


def test_forward_passes_of_one_rank_do_not_wait_for_another(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("llama")), dtype="float32")
    assert run_ranks(without_others, 2, case, timeout_s=60) == [[7], [7]]


def fails_inside(ranks: Ranks, case: Case) -> list[bool]:
    engine = engine_of(case, ranks.join())
    try:
        with engine.full_parameters():
            raise ValueError("a reward function failed")
    except ValueError:
        pass
    outcome = train(engine, case, ranks.rank)
    return [outcome.losses[0] != 0, np.isfinite(outcome.norms[1])]


def test_an_error_inside_leaves_a_working_engine(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), assignment=UNEVEN)
    assert run_ranks(fails_inside, 2, case, timeout_s=60) == [[True, True]] * 2


def test_alone_nothing_is_gathered(tiny_folder: Folder) -> None:
    engine = engine_of(Case(folder=str(tiny_folder("qwen3")), assignment=ALONE), None)
    before = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    with engine.full_parameters():
        assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == before
