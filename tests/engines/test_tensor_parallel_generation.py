"""Generation by the ranks of a tensor-parallel group with the parts of each matrix that they hold: the tokens of one
process, and the memory of a part."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from references.engine_steps import Setting, engine_of
from references.language_models import VOCAB
from references.rank_processes import Ranks, run_ranks
from strop.engines.gradients import local
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.training import TrainEngine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]
PROMPTS = [
    torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (3, 3, 9, 1, 6, 12)
]
SAMPLINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6, "temperature": 1.3},
    {"temperature": 0.0},
]


@dataclass(frozen=True)
class Output:
    tokens: list[int]
    log_probs: list[float]
    stop: str


def of(output: TokenOutput) -> Output:
    return Output(list(output.token_ids), list(output.log_probs), output.stop_reason)


async def ask(engine: NativeEngine, number: int, **changes: Any) -> Output:
    options = {"key": 100 + number, "max_tokens": 4 + 3 * number, **SAMPLINGS[number], **changes}
    return of(await engine.generate(f"request {number}", PROMPTS[number], Sampling(**options)))


def played(trained: TrainEngine, requests: Sequence[int], *, deterministic: bool = False) -> list[Output]:
    """Outputs of these requests of this rank, two of them at a time in one process."""

    async def call() -> list[Output]:
        engine = NativeEngine(trained.model, max_running=2, deterministic=deterministic)
        outputs = await asyncio.gather(*(ask(engine, number) for number in requests))
        await engine.leave()
        return outputs

    async def bounded() -> list[Output]:
        async with asyncio.timeout(60):
            return await call()

    with trained.full_parameters():
        return asyncio.run(bounded())


def trained(parallel: Parallel, folder: str, *, dtype: str = "float64") -> TrainEngine:
    return engine_of(parallel, Setting(folder=folder, tp_size=parallel.tp_size, dtype=dtype))


def on_ranks(ranks: Ranks, tp_size: int, folder: str, requests: list[list[int]], deterministic: bool) -> Any:
    engine = trained(ranks.join(tensor_parallel=tp_size), folder)
    return played(engine, requests[ranks.rank], deterministic=deterministic)


def assert_equal(found: Sequence[Output], wanted: Sequence[Output]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-10, rtol=0)


# A head that is the embedding; one of its own; windows; one key head, which both ranks attend with; biases.
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        pytest.param("llama_mqa", marks=pytest.mark.slow),
        pytest.param("llama", marks=SLOW),
        pytest.param("gemma3", marks=SLOW),
        pytest.param("llama_biased", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "requests", [[[0, 1, 2, 4], [3, 5]], pytest.param([[], [0, 1, 2, 3, 4, 5]], marks=SLOW)]
)
def test_two_ranks_sample_the_tokens_of_one_process(
    tiny_folder: Folder, kind: str, requests: list[list[int]]
) -> None:
    folder = str(tiny_folder(kind))
    alone_ = played(trained(alone("cpu"), folder), range(len(PROMPTS)))
    assert len({tuple(output.tokens[:4]) for output in alone_}) > 3, "requests that differ"
    found = run_ranks(on_ranks, 2, 2, folder, requests, False, timeout_s=90)
    for outputs, numbers in zip(found, requests, strict=True):
        assert_equal(outputs, [alone_[number] for number in numbers])


def test_each_request_alone_too(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    alone_ = played(trained(alone("cpu"), folder), range(4), deterministic=True)
    found = run_ranks(on_ranks, 2, 2, folder, [[0, 2], [1, 3]], True, timeout_s=90)
    assert_equal(found[0], [alone_[0], alone_[2]])
    assert_equal(found[1], [alone_[1], alone_[3]])


@pytest.mark.dist
@pytest.mark.parametrize("tp_size", [2, 4])
def test_four_ranks_in_groups(tiny_folder: Folder, tp_size: int) -> None:
    """Parameters are gathered over the data-parallel ranks alone; groups do not wait for each other."""
    folder = str(tiny_folder("qwen3"))
    alone_ = played(trained(alone("cpu"), folder), range(len(PROMPTS)))
    requests = [[0, 4], [5], [], [1, 2, 3]]
    found = run_ranks(on_ranks, 4, tp_size, folder, requests, False, timeout_s=120)
    for outputs, numbers in zip(found, requests, strict=True):
        assert_equal(outputs, [alone_[number] for number in numbers])


def alive() -> dict[int, int]:
    """Bytes of every storage of a tensor that is alive, by address."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            part = local(thing)
            if part.device.type == "cpu" and part.untyped_storage().nbytes():
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return storages


def memory(ranks: Ranks, folder: str, dtype: str) -> dict[str, int]:
    """Bytes of this rank's parameters, and of what came to life for generation; matrices of which it has all.

    The process may still hold engines of earlier tests, whose gathered parameters FSDP2 has emptied.
    """
    engine = trained(ranks.join(tensor_parallel=2), folder, dtype=dtype)
    parts = {p.untyped_storage().data_ptr(): p for p in map(local, engine.model.module.parameters())}
    facts = {"parameters": sum(part.untyped_storage().nbytes() for part in parts.values())}
    cut = {tuple(p.shape) for p in engine.model.module.parameters() if local(p).shape != p.shape}
    before = alive()
    with engine.full_parameters():
        inside = alive()
        facts["gathered"] = sum(size for at, size in inside.items() if at not in before)
        facts["same"] = sum(
            local(p).untyped_storage().data_ptr() in parts for p in engine.model.module.parameters()
        )

        async def call() -> None:
            generator = NativeEngine(engine.model, max_running=2)
            facts["whole matrices"] = 0

            def hear(*token: Any) -> None:
                plain = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
                filled = [
                    thing
                    for thing in plain
                    if thing.device.type == "cpu" and thing.untyped_storage().nbytes()
                ]
                new = [thing for thing in filled if thing.untyped_storage().data_ptr() not in inside]
                facts["whole matrices"] += sum(tuple(thing.shape) in cut for thing in new)

            await generator.generate("x", PROMPTS[2], Sampling(key=1, max_tokens=3), on_token=hear)
            await generator.leave()

        asyncio.run(call())
    return facts


def test_nothing_is_gathered_and_nothing_copied_where_a_group_is_alone(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama"))
    module = trained(alone("cpu"), folder).model.module
    whole = sum(p.nbytes for p in module.parameters())
    norms = sum(p.nbytes for p in module.parameters() if p.dim() == 1)
    for facts in run_ranks(memory, 2, folder, "float64", timeout_s=90):
        # A rank of two: half of every matrix (of 61 tokens 31 or 30), and the norms.
        assert abs(facts["parameters"] - (whole + norms) / 2) < 0.03 * whole
        assert facts["gathered"] == 0
        assert facts["same"] == sum(1 for _ in module.parameters())
        assert facts["whole matrices"] == 0


def test_in_half_precision_a_rank_rounds_its_own_part(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama"))
    for facts in run_ranks(memory, 2, folder, "bfloat16", timeout_s=90):
        assert 0 < facts["gathered"] <= facts["parameters"] / 2 + 4096  # float32 parameters, half of the bits


def gives_up(ranks: Ranks, folder: str) -> list[str]:
    """The first rank gives up while the second one waits for tokens; then both generate again."""
    engine = trained(ranks.join(tensor_parallel=2), folder)
    said = []

    async def call(generator: NativeEngine) -> None:
        if ranks.rank == 0:
            await generator.leave("a reward function failed")
            return
        try:
            await ask(generator, 5, max_tokens=50)
        except RuntimeError as error:
            said.append(str(error))
        try:
            await ask(generator, 4)
        except RuntimeError as error:
            said.append(str(error))
        await generator.leave("for the same reason")

    async def again(generator: NativeEngine) -> str:
        output = await ask(generator, ranks.rank)
        await generator.leave()
        return str(output.tokens)

    with engine.full_parameters():
        generator = NativeEngine(engine.model, max_running=2)
        asyncio.run(call(generator))
        said.append(asyncio.run(again(generator)))
    return said


def test_a_rank_that_gives_up_is_heard_of_and_the_next_call_works(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    expected = played(trained(alone("cpu"), folder), [0, 1])
    first, second = run_ranks(gives_up, 2, folder, timeout_s=90)
    sentence = "rank 0 of the 2 that generate together gave up: a reward function failed"
    assert first == [str(expected[0].tokens)]
    assert second == [sentence, sentence, str(expected[1].tokens)]


def aborts_and_pauses(ranks: Ranks, folder: str) -> dict[str, Any]:
    engine = trained(ranks.join(tensor_parallel=2), folder)

    async def call() -> dict[str, Any]:
        generator = NativeEngine(engine.model, max_running=2)
        heard: list[int] = []
        facts: dict[str, Any] = {}

        def hear(token: int, log_prob: float, version: int) -> None:
            heard.append(token)
            if len(heard) == 3:
                tasks.add(asyncio.ensure_future(generator.abort(["long"])))

        tasks: set[Any] = set()
        if ranks.rank == 0:
            prompt = PROMPTS[2]
            output = await generator.generate("long", prompt, Sampling(key=5, max_tokens=50), on_token=hear)
            facts["aborted"] = (output.stop_reason, output.token_ids == tuple(heard), 3 <= len(heard) < 20)
            cancelled = asyncio.ensure_future(ask(generator, 5, max_tokens=50))
            await asyncio.sleep(0.2)
            cancelled.cancel()
            await asyncio.sleep(0)
            await generator.flush_cache()
            facts["again"] = (await ask(generator, 5)).tokens  # the id of the one that was cancelled
        facts["own"] = (await ask(generator, ranks.rank)).tokens
        facts["health"] = (await generator.health())["paused"]
        await generator.leave()
        await generator.sleep()
        await generator.set_version(3)
        facts["next"] = (await ask(generator, 2 + ranks.rank)).tokens
        await generator.leave()
        return facts

    async def bounded() -> dict[str, Any]:
        async with asyncio.timeout(60):
            return await call()

    with engine.full_parameters():
        return asyncio.run(bounded())


def test_requests_end_early_on_all_ranks_and_others_go_on(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    expected = played(trained(alone("cpu"), folder), range(len(PROMPTS)))
    first, second = run_ranks(aborts_and_pauses, 2, folder, timeout_s=90)
    assert first["aborted"] == ("aborted", True, True)
    assert first["again"] == expected[5].tokens
    for rank, facts in enumerate((first, second)):
        assert facts["own"] == expected[rank].tokens
        assert facts["next"] == expected[2 + rank].tokens
        assert facts["health"] == 0.0
