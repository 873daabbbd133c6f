"""Syncs whose ranks each put their own part of every weight into shared memory: nothing is gathered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout import sync_ranks
from rollout.test_weight_sync_processes import full_bits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.engines import weight_parts
from strop.engines.checksum import host
from strop.engines.checksum.models import digest_weights
from strop.engines.checksum.tensors import digest_tensor, finish
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel.ranks import alone
from strop.engines.weight_parts import Part, Runs
from strop.engines.weights import TensorMetadata, weights_metadata
from strop.rollout.weight_sync import shards, shared_memory
from strop.rollout.weight_sync.delta import SentParts

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("first", "stride", "count", "length"), [(0, 12, 5, 12), (4, 12, 5, 4), (8, 24, 3, 16)]
)
@pytest.mark.parametrize("window", [1, 8, 13, 24, 100])
def test_runs_fall_into_place_whatever_the_window(
    first: int, stride: int, count: int, length: int, window: int
) -> None:
    content = torch.arange(1, count * length + 1).to(torch.uint8).view(count, length)
    expected = torch.zeros(96, dtype=torch.uint8)
    for run in range(count):
        expected[first + run * stride : first + run * stride + length] = content[run]
    found = torch.zeros_like(expected)
    part = Part(first=first, stride=stride, runs=content, dtype=torch.uint8)
    for start in range(0, 96, window):
        part.fill(found[start : start + window], start)
    assert found.tolist() == expected.tolist()


def test_the_sums_of_one_run_add_up_over_windows() -> None:
    content = torch.arange(1, 81).to(torch.uint8)
    for first, window in ((0, 80), (16, 24), (8, 32)):
        whole = torch.cat([torch.zeros(first, dtype=torch.uint8), content])
        found = torch.zeros_like(whole)
        part = Part(first=first, stride=0, runs=content[None], dtype=torch.uint8)
        sums = [part.fill(found[at : at + window], at) for at in range(0, len(whole), window)]
        rest = Part(
            first=0, stride=0, runs=torch.zeros(1, max(first, 1), dtype=torch.uint8), dtype=torch.uint8
        )
        sums += [rest.fill(found[:first], 0)] if first else []
        assert None not in sums
        assert finish(sum(filter(None, sums)), len(whole)) == digest_tensor(whole)
        assert torch.equal(found, whole)


@pytest.mark.parametrize("window", [1, 8, 13, 24, 96])
def test_what_lies_between_two_bytes_is_given_and_put_run_by_run(window: int) -> None:
    content = torch.arange(1, 49).to(torch.uint8).view(3, 16)
    part = Part(first=8, stride=24, runs=content, dtype=torch.uint8)
    expected, found = torch.zeros(96, dtype=torch.uint8), torch.zeros(96, dtype=torch.uint8)
    for run in range(3):
        expected[8 + run * 24 : 24 + run * 24] = content[run]
    for start in range(0, 96, window):
        given, place = part.between(start, start + window), found[start : start + window]
        for places in part.places.within(start, start + window):
            places.put(given[: places.num_bytes], place)
            given = given[places.num_bytes :]
        assert len(given) == 0
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_sums_of_columns_add_up(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(host, "digest_kernel", lambda: None)
        monkeypatch.setattr(host, "_BLOCK_BYTES", 100)
    whole = torch.randint(256, (500, 96), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for cuts in ([0, 96], [0, 32, 96], [0, 8, 88, 96]):
        parts = [
            Part(first=low, stride=96, runs=whole[:, low:high].contiguous(), dtype=torch.uint8)
            for low, high in itertools.pairwise(cuts)
        ]
        assert all(part.places.is_between_words(whole.nbytes) for part in parts)
        assert finish(sum(part.word_sum(whole.nbytes) for part in parts), whole.nbytes) == digest_tensor(
            whole
        )


@pytest.mark.parametrize("placement", ["whole", "rows", "columns"])
def test_a_part_is_cast_block_by_block_and_is_that_of_the_cast_weight(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_parts, "_BLOCK_BYTES", 64)
    held = torch.randn(24, 20, generator=torch.Generator().manual_seed(0))
    first, stride, runs = {
        "whole": (0, 0, held.view(1, -1)),
        "rows": (8 * 40, 0, held[8:].reshape(1, -1)),
        "columns": (16, 40, held[:, 8:16].contiguous()),
    }[placement]
    part = Part(first=first, stride=stride, runs=runs, dtype=torch.bfloat16)
    cast = part.cast()
    assert part.is_cast
    assert not cast.is_cast
    assert part.places == cast.places
    assert len(list(part.blocks(8))) > 5
    assert part.word_sum(held.numel() * 2) == cast.word_sum(held.numel() * 2)
    expected = torch.zeros(24, 20, dtype=torch.bfloat16)
    expected.view(-1).view(torch.uint8).fill_(7)
    places = slice(8, 16) if placement == "columns" else slice(None)
    rows = slice(8, None) if placement == "rows" else slice(None)
    expected[rows, places] = held.bfloat16()[rows, places]
    found = torch.full((24 * 40,), 7, dtype=torch.uint8)
    for start in range(0, len(found), 104):
        part.fill(found[start : start + 104], start)
    assert found.tolist() == expected.view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
def test_changes_of_a_part_that_is_cast_block_by_block(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_parts, "_BLOCK_BYTES", 256)
    generator = torch.Generator().manual_seed(0)
    held = torch.randn(1, 3000, generator=generator)
    weight = TensorMetadata(name="w", shape=(3000,), dtype=torch.bfloat16)
    found = []
    for is_cast in (True, False):
        last, values = SentParts(), held.clone()
        for version in range(2):
            part = Part(first=0, stride=0, runs=values.clone(), dtype=torch.bfloat16)
            part = part if is_cast else part.cast()
            changes = last.changes(weight, part, part.word_sum(6000), is_known=version > 0)
            values[0, torch.arange(3000) % 1000 < 1000 * share] *= 2
        found.append(changes)
        bits = last._parts["w"].bits
        assert bits is not None
        assert torch.equal(bits, part.runs.bfloat16().view(torch.int16)[0]), "those sent last"
    lazy, eager = found
    if lazy is None or eager is None:
        assert share == 0.9
        assert lazy is eager
    else:
        assert len(lazy.positions) == 60 * (share == 0.02)
        assert torch.equal(lazy.positions, eager.positions)
        assert torch.equal(lazy.values, eager.values)


def test_parts_that_end_within_a_word_do_not_add_up() -> None:
    for first, stride, count, length, is_between in (
        (0, 0, 1, 80, True), (8, 0, 1, 77, True), (8, 0, 1, 76, False), (4, 0, 1, 81, False), (0, 16, 5, 8, True),
        (0, 12, 5, 8, False), (0, 16, 5, 4, False), (4, 16, 5, 8, False),
    ):  # fmt: skip
        runs = Runs(first=first, stride=stride, count=count, length=length)
        assert runs.is_between_words(85) == is_between, runs


@pytest.mark.parametrize(
    "value", [[0, 0, 1], [0, 0, 0, 4], [-8, 0, 1, 4], [0, 4, 2, 8], [0, 0, 1, "4"], "runs"]
)
def test_runs_of_another_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not runs of bytes"):
        Runs.from_json(value)


def sent_and_received(
    ranks: Ranks, directory: str, folder: str, tp_size: int, shard_size: int, dtype: str
) -> list[tuple[str, dict[str, bytes]]]:
    """Digest and bits of two syncs, on all ranks of the actor and in a process that receives."""
    shared_memory.FOLDER = Path(directory)
    if ranks.rank == ranks.world_size - 1:
        copy = sync_ranks.zeroed(folder, dtype, torch.bfloat16 if dtype == "bfloat16" else None)
        with sync_ranks.receiving(copy, directory) as receiver:
            return [(receiver.receive(version).digest, sync_ranks.bits_of(copy)) for version in (1, 2)]
    parallel = sync_ranks.joined(ranks, tensor_parallel=tp_size, shard_size=shard_size)
    engine = engine_of(parallel, Setting(folder=folder, tp_size=tp_size, dtype=dtype))
    module = engine.model.module
    dtypes = dict.fromkeys(weights_metadata(module).dtypes, torch.bfloat16) if dtype == "bfloat16" else None
    results = []
    gathers = DTensor.full_tensor
    with sync_ranks.sending(module, parallel, directory, dtypes=dtypes) as sender:
        for version in (1, 2):
            DTensor.full_tensor = gathered  # type: ignore[method-assign]
            report = sender.send(version)
            DTensor.full_tensor = gathers  # type: ignore[method-assign]
            assert report.transport == ("shared_memory" if ranks.rank == 0 else "shards")
            results.append((report.digest, {}))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1.5)
    return results


def gathered(*args: Any, **options: Any) -> Tensor:
    raise AssertionError("a weight was gathered")


def check(results: list[list[tuple[str, dict[str, bytes]]]], folder: str, dtype: str) -> None:
    """The receiver has the bits of one process, and rank 0 has their digest."""
    module = load_model(ModelConfig(path=folder, dtype=dtype)).module  # type: ignore[arg-type]
    first, *_, received = results
    for sync in range(2):
        assert received[sync][1] == sync_ranks.bits_of(
            module, torch.bfloat16 if dtype == "bfloat16" else None
        )
        assert received[sync][0] == first[sync][0] != ""
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
    assert received[0][1] != received[1][1], "the two versions must be told apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp_size", "dtype"),
    [
        ("qwen3", 2, "float32"),  # 61 tokens on two ranks, columns of two matrices of each layer, a tied head
        ("qwen3", 1, "float64"),
        ("llama_biased", 2, "bfloat16"),  # rounded on the way
    ],
)
def test_two_ranks_give_their_parts(
    tiny_folder: Folder, tmp_path: Path, kind: str, tp_size: int, dtype: str
) -> None:
    folder = str(tiny_folder(kind))
    check(run_ranks(sent_and_received, 3, str(tmp_path), folder, tp_size, 0, dtype), folder, dtype)


@pytest.mark.dist
@pytest.mark.parametrize(("tp_size", "shard_size"), [(2, 0), (2, 1), (4, 0), (1, 2)])
def test_four_ranks_of_any_mesh_give_their_parts(
    tiny_folder: Folder, tmp_path: Path, tp_size: int, shard_size: int
) -> None:
    """Rows of rows, rows of columns, replicas of shards."""
    folder = str(tiny_folder("qwen3"))
    results = run_ranks(sent_and_received, 5, str(tmp_path), folder, tp_size, shard_size, "float32")
    check(results, folder, "float32")


def merged_in_shared_memory(
    ranks: Ranks, directory: str, setting: Setting
) -> tuple[str, str, sync_ranks.Bits]:
    """As `merged_and_received`."""
    shared_memory.FOLDER = Path(directory)
    return sync_ranks.merged_and_received(ranks, directory, setting)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("qwen3", {"pp_size": 2}),
        ("glm4_moe", {"pp_size": 2}),  # buffers of the routers
        ("qwen3", {"tp_size": 2, "pp_size": 2}),
        ("qwen3", {"tp_size": 2}),
    ],
    ids=str,
)
def test_stages_and_matrices_give_their_parts_with_an_adapter(
    tiny_folder: Folder, tmp_path: Path, kind: str, axes: dict[str, int]
) -> None:
    setting = Setting(folder=str(tiny_folder(kind)), lora=LoraConfig(rank=3, alpha=6.0))
    alone_engine = engine_of(alone("cpu"), setting)
    sync_ranks.enlarge_adapters(alone_engine.model.module)
    cut = replace(setting, **axes)  # type: ignore[arg-type]
    first, *others, received = run_ranks(merged_in_shared_memory, 5, str(tmp_path), cut)
    assert [first[0], received[0]] == ["shared_memory"] * 2
    assert {transport for transport, *_ in others} == {"shards"}
    assert received[1] == first[1] != ""
    expected = {name: full_bits(tensor) for name, tensor in alone_engine.streamed_weights() or ()}
    assert expected
    assert {name: received[2][name] for name in expected} == expected


def with_faults(ranks: Ranks, directory: str) -> list[str]:
    """What each process says of a sync that is refused, of one in which a rank fails, and of one that succeeds."""
    shared_memory.FOLDER = Path(directory)
    model = nn.Linear(64, 48)
    if ranks.rank == 2:
        with sync_ranks.receiving(model, directory) as receiver:
            calls: list[Callable[[], Any]] = [
                lambda: receiver.refuse(1, "busy"), lambda: receiver.receive(2), lambda: receiver.receive(3)
            ]  # fmt: skip
            return [sync_ranks.outcome(call) for call in calls]
    parallel = sync_ranks.joined(ranks)
    fully_shard(model, mesh=parallel.mesh)
    fill, count = shards.ShardStream._fill, itertools.count()

    def failing(*args: Any) -> list[int | None]:
        if ranks.rank == 1 and next(count) == 4:
            raise ValueError("no memory for a cast")
        return fill(*args)

    with sync_ranks.sending(model, parallel, directory, bucket_bytes=1024) as sender:
        said = [sync_ranks.outcome(lambda: sender.send(1))]
        shards.ShardStream._fill = failing  # type: ignore[method-assign]
        said.append(sync_ranks.outcome(lambda: sender.send(2)))
        shards.ShardStream._fill = fill  # type: ignore[method-assign]
        said.append(sync_ranks.outcome(lambda: sender.send(3)))
    return said


@pytest.mark.slow
def test_whatever_fails_all_ranks_hear_of_it_and_the_next_sync_succeeds(tmp_path: Path) -> None:
    first, second, received = run_ranks(with_faults, 3, str(tmp_path))
    sync_ranks.assert_refused_then_failed(first, second, received)
    assert [said[2] for said in (first, second, received)] == ["version 3"] * 3


def memory_of_a_sync(ranks: Ranks, directory: str) -> int:
    """Most resident memory beyond that of the start of a sync, on two ranks of an actor and in a receiver."""
    shared_memory.FOLDER = Path(directory)
    model = sync_ranks.large_model()
    if ranks.rank == 2:
        with sync_ranks.receiving(model, directory) as receiver, sync_ranks.Peak() as used:
            receiver.receive(1)
        return used[0]
    parallel = sync_ranks.joined(ranks)
    for layer in model.children():
        fully_shard(layer, mesh=parallel.mesh)
    with sync_ranks.sending(model, parallel, directory, bucket_bytes=sync_ranks.PEAK_BUCKET_BYTES) as sender:
        digest_weights(model)  # what the ranks need to talk at all
        with sync_ranks.Peak() as used:
            sender.send(1)
    return used[0]


@pytest.mark.slow
def test_beside_the_shards_there_are_two_buckets_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    for used in run_ranks(memory_of_a_sync, 3, str(tmp_path)):
        assert used < 3 * sync_ranks.PEAK_BUCKET_BYTES + (4 << 20), (
            used
        )  # the two slots, and what was never touched before
        assert used < sync_ranks.MODEL_BYTES / 5
