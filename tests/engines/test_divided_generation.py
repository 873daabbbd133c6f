"""Generation by the ranks that hold a model's stages or experts, each with its part: the tokens of one process, and the
memory of a part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_pipeline_parallel import Folder
from test_tensor_parallel_generation import PROMPTS, Output, alive, ask, assert_equal, played
from torch import Tensor

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.engines.gradients import local
from strop.engines.parallel.ranks import alone
from strop.rollout.native import batch, paged_cache, running
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.types import Sampling

SLOW = pytest.mark.slow
ALL = range(len(PROMPTS))


def on_ranks(ranks: Ranks, setting: Setting, requests: Sequence[Sequence[int]]) -> list[Output]:
    engine = engine_of(ranks.join(**setting.axes), setting)
    once = played(engine, requests[ranks.rank])
    assert_equal(played(engine, requests[ranks.rank]), once)  # the parts are there again
    return once


def check_tokens(setting: Setting, requests: Sequence[Sequence[int]]) -> None:
    whole = played(engine_of(alone("cpu"), Setting(folder=setting.folder)), ALL)
    assert len({tuple(output.tokens[:4]) for output in whole}) > 3, "requests that differ"
    found = run_ranks(on_ranks, len(requests), setting, requests, timeout_s=120)
    for outputs, numbers in zip(found, requests, strict=True):
        assert_equal(outputs, [whole[number] for number in numbers])


# A head that is the embedding, on both stages; one of its own; windows.
@pytest.mark.parametrize(
    "kind", ["qwen3", pytest.param("llama", marks=SLOW), pytest.param("gemma3", marks=SLOW)]
)
@pytest.mark.parametrize(
    "requests", [pytest.param([[0, 1, 2, 4], [3, 5]], marks=pytest.mark.slow), [[], [0, 1, 2, 3, 4, 5]]]
)
def test_stages_sample_the_tokens_of_one_process(
    tiny_folder: Folder, kind: str, requests: list[list[int]]
) -> None:
    check_tokens(Setting(folder=str(tiny_folder(kind)), pp_size=2), requests)


# Softmax over all experts; sigmoid, groups and a shared expert.
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("deepseek_v3_experts", marks=SLOW)])
def test_ranks_with_half_of_the_experts_sample_the_tokens_of_one_process(
    tiny_folder: Folder, kind: str
) -> None:
    check_tokens(Setting(folder=str(tiny_folder(kind)), ep_size=2), [[0, 1, 2, 4], [3, 5]])


AXES: list[dict[str, Any]] = [
    {"tp_size": 2, "pp_size": 2}, {"pp_size": 2}, {"ep_size": 2}, {"pp_size": 2, "ep_size": 2},
    {"tp_size": 2, "ep_size": 4}, {"tp_size": 4, "ep_size": 2}, {"sp_size": 2, "ep_size": 2},
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_four_ranks(tiny_folder: Folder, axes: dict[str, Any]) -> None:
    """Copies of the model do not wait for each other."""
    kind = "glm4_moe" if axes.get("tp_size") == 4 else "qwen3_moe"
    check_tokens(Setting(folder=str(tiny_folder(kind)), **axes), [[0, 4], [5], [], [1, 2, 3]])


@pytest.mark.dist
def test_interleaved_stages_of_different_sizes(five_layers: Path) -> None:
    """One rank has three layers of five, the other two."""
    setting = Setting(folder=str(five_layers), pp_size=2, chunks=2, layers=(1, 1, 2, 1))
    check_tokens(setting, [[0, 4, 1], [5, 2, 3]])


def in_pages_on_ranks(
    ranks: Ranks, setting: Setting, requests: Sequence[Sequence[int]]
) -> tuple[list[Output], int]:
    """Outputs as on an accelerator, and pages of the largest pool; one rank has memory for at most 12 in one piece."""
    sizes = [0]

    def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        if ranks.rank == 1 and shape[2] > 12:
            return None
        sizes.append(shape[2])
        return like.new_zeros(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "new_cache", lambda device, capacity: PagedCache(capacity, device))
        patch.setattr(batch, "fused_step", lambda model: None)
        patch.setattr(paged_cache, "PAGE_TOKENS", 4)
        patch.setattr(paged_cache, "zeros", zeros)
        outputs = played(engine_of(ranks.join(**setting.axes), setting), requests[ranks.rank])
    return outputs, sizes[-1]


@pytest.mark.dist
def test_stages_in_pages_have_pools_of_one_size(five_layers: Path) -> None:
    setting = Setting(folder=str(five_layers), pp_size=2, chunks=2, layers=(1, 1, 2, 1))
    whole = played(engine_of(alone("cpu"), Setting(folder=setting.folder)), ALL)
    requests = [[0, 4, 1], [5, 2, 3]]
    found = run_ranks(in_pages_on_ranks, 2, setting, requests, timeout_s=60)
    for (outputs, size), numbers in zip(found, requests, strict=True):
        assert_equal(outputs, [whole[number] for number in numbers])
        assert 0 < size <= 12


def memory(ranks: Ranks, setting: Setting) -> dict[str, int]:
    """Bytes of this rank's parameters, of those that it has while it generates, and of what came to life for that."""
    engine = engine_of(ranks.join(**setting.axes), setting)

    def held() -> int:
        parts = [local(parameter.detach()) for parameter in engine.model.module.parameters()]
        return sum(part.nbytes for part in parts if not part.is_meta)

    facts, before = {"trained": held()}, alive()
    with engine.full_parameters():
        facts["generates"] = held()
        facts["new"] = sum(size for at, size in alive().items() if at not in before)

        async def call() -> None:
            generator = NativeEngine(engine.model, max_running=2)
            await generator.generate("x", PROMPTS[2], Sampling(key=1, max_tokens=3))
            facts["cache"] = int((await generator.health())["cache_bytes"])
            await generator.leave()

        asyncio.run(call())
    assert held() == facts["trained"]
    return facts


def test_no_rank_has_the_layers_of_another(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama"))
    module = engine_of(alone("cpu"), Setting(folder=folder)).model.module
    whole, head = sum(p.nbytes for p in module.parameters()), module.get_output_embeddings().weight.nbytes
    first, last = run_ranks(memory, 2, Setting(folder=folder, pp_size=2), timeout_s=90)
    norm = module.base_model.norm.weight.nbytes
    assert (
        first["trained"] == (whole + norm) // 2 - norm
    )  # two equal stages; embedding and head are of one size
    assert first["trained"] + last["trained"] == whole
    assert first["generates"] == first["trained"] + head
    assert last["generates"] == last["trained"]
    assert first["new"] <= first["generates"]
    assert first["cache"] == last["cache"]


def test_no_rank_has_the_experts_of_another(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    module = engine_of(alone("cpu"), Setting(folder=folder)).model.module
    whole = sum(p.nbytes for p in module.parameters())
    experts = sum(p.nbytes for name, p in module.named_parameters() if ".experts." in name)
    for facts in run_ranks(memory, 2, Setting(folder=folder, ep_size=2), timeout_s=90):
        assert facts["generates"] == whole - experts // 2


def gives_up(ranks: Ranks, setting: Setting) -> list[str]:
    engine = engine_of(ranks.join(**setting.axes), setting)
    said = []

    async def call(generator: NativeEngine) -> None:
        if ranks.rank == 0:
            await generator.leave("a reward function failed")
            return
        with pytest.raises(RuntimeError) as caught:
            await ask(generator, 5, max_tokens=50)
        said.append(str(caught.value))
        await generator.leave("for the same reason")

    async def again(generator: NativeEngine) -> None:
        said.append(str((await ask(generator, ranks.rank)).tokens))
        await generator.leave()

    with engine.full_parameters():
        generator = NativeEngine(engine.model, max_running=2)
        asyncio.run(call(generator))
        asyncio.run(again(generator))
    return said


def test_a_stage_that_gives_up_is_heard_of_and_the_next_call_works(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    expected = played(engine_of(alone("cpu"), Setting(folder=folder)), [0, 1])
    first, second = run_ranks(gives_up, 2, Setting(folder=folder, pp_size=2), timeout_s=90)
    assert first == [str(expected[0].tokens)]
    assert second == [
        "rank 0 of the 2 that generate together gave up: a reward function failed",
        str(expected[1].tokens),
    ]


def serves(ranks: Ranks, setting: Setting, done: str) -> list[Output]:
    """The second rank has nothing to ask, and ends its call only when the first one has its answer."""
    engine = engine_of(ranks.join(**setting.axes), setting)

    async def call() -> list[Output]:
        generator, outputs = NativeEngine(engine.model, max_running=2), []
        await generator.wake_up()
        async with asyncio.timeout(60):
            if ranks.rank == 0:
                outputs.append(await ask(generator, 1))
                Path(done).touch()
            while not Path(done).exists():
                await asyncio.sleep(0.01)
            await generator.leave()
        return outputs

    with engine.full_parameters():
        return asyncio.run(call())


def test_a_rank_without_requests_of_its_own_takes_part_from_the_beginning(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = str(tiny_folder("qwen3"))
    expected = played(engine_of(alone("cpu"), Setting(folder=folder)), [1])
    setting = Setting(folder=folder, pp_size=2)
    first, second = run_ranks(serves, 2, setting, str(tmp_path / "done"), timeout_s=90)
    assert_equal(first, expected)
    assert second == []


def fails_in_leave(ranks: Ranks, setting: Setting) -> str:
    """A step fails while this rank has nothing to ask any more, or waits for its answer."""
    engine = engine_of(ranks.join(**setting.axes), setting)

    async def call() -> str:
        generator = NativeEngine(engine.model, max_running=2)

        def step(version: int) -> None:
            raise MemoryError("no room for the cache")

        generator._batch.step = step  # type: ignore[method-assign]
        try:
            if ranks.rank == 0:
                await ask(generator, 1)
            await generator.leave()
        except MemoryError as error:
            if ranks.rank == 0:
                await generator.leave(str(error))
            return str(error)
        return ""

    with engine.full_parameters():
        return asyncio.run(call())


def test_a_step_that_fails_behind_the_last_request_of_a_rank_is_told(tiny_folder: Folder) -> None:
    setting = Setting(folder=str(tiny_folder("qwen3")), pp_size=2)
    assert run_ranks(fails_in_leave, 2, setting, timeout_s=90) == ["no room for the cache"] * 2


def computes_otherwise(ranks: Ranks, setting: Setting) -> tuple[str, list[int]]:
    """The heads of the two ranks differ in one call, and are alike in the next one."""
    engine = engine_of(ranks.join(**setting.axes), setting)

    async def call(generator: NativeEngine) -> str:
        try:
            await ask(generator, ranks.rank, max_tokens=20)
            await generator.leave()  # where its own request ended with the first other token
        except RuntimeError as error:
            await generator.leave(str(error))
            return str(error)
        return ""

    async def again(generator: NativeEngine) -> list[int]:
        output = await ask(generator, ranks.rank)
        await generator.leave()
        return output.tokens

    with engine.full_parameters():
        generator = NativeEngine(engine.model, max_running=2)
        head = engine.model.head_weight.detach()
        head.mul_(1.0 - 2.0 * ranks.rank)
        said = asyncio.run(call(generator))
        head.mul_(1.0 - 2.0 * ranks.rank)
        engine.model.num_changes += 1
        return said, asyncio.run(again(generator))


def test_ranks_that_sample_other_tokens_end_with_a_sentence(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = played(engine_of(alone("cpu"), Setting(folder=folder)), [0, 1])
    found = run_ranks(computes_otherwise, 2, Setting(folder=folder, ep_size=2), timeout_s=90)
    for (said, tokens), output in zip(found, expected, strict=True):
        assert said.startswith("the 2 ranks that generate together sampled different tokens")
        assert tokens == output.tokens


def test_one_stage_rounds_its_layers_in_half_precision(tiny_folder: Folder) -> None:
    setting = Setting(folder=str(tiny_folder("llama")), pp_size=2, dtype="bfloat16")
    for facts in run_ranks(memory, 2, setting, timeout_s=90):
        assert facts["generates"] < facts["trained"], "float32 is kept, half of the bits are computed with"
