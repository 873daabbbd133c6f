"""Syncs whose ranks each put their own part of every weight into shared memory: nothing is gathered."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.test_weight_sync_processes import full_bits, read_endpoint, write_endpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.engines.checksum import host
from strop.engines.checksum.models import digest_weights
from strop.engines.checksum.tensors import digest_tensor, finish
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.weight_parts import Part, Runs
from strop.engines.weights import weights_metadata
from strop.rollout.weight_sync import shards, shared_memory
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import SyncError, SyncReport

Folder = Callable[[str], Path]
BUCKET_BYTES = 1536
"""Rows of the largest matrices fill several of them, and end in the middle."""


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
    part = Part(first=first, stride=stride, runs=content)
    for start in range(0, 96, window):
        part.fill(found[start : start + window], start)
    assert found.tolist() == expected.tolist()


def test_the_sums_of_one_run_add_up_over_windows() -> None:
    content = torch.arange(1, 81).to(torch.uint8)
    for first, window in ((0, 80), (16, 24), (8, 32)):
        whole = torch.cat([torch.zeros(first, dtype=torch.uint8), content])
        found = torch.zeros_like(whole)
        part = Part(first=first, stride=0, runs=content[None])
        sums = [part.fill(found[at : at + window], at) for at in range(0, len(whole), window)]
        rest = Part(first=0, stride=0, runs=torch.zeros(1, max(first, 1), dtype=torch.uint8))
        sums += [rest.fill(found[:first], 0)] if first else []
        assert None not in sums
        assert finish(sum(filter(None, sums)), len(whole)) == digest_tensor(whole)
        assert torch.equal(found, whole)


@pytest.mark.parametrize("window", [1, 8, 13, 24, 96])
def test_what_lies_between_two_bytes_is_given_and_put_run_by_run(window: int) -> None:
    content = torch.arange(1, 49).to(torch.uint8).view(3, 16)
    part = Part(first=8, stride=24, runs=content)
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
            Part(first=low, stride=96, runs=whole[:, low:high].contiguous())
            for low, high in itertools.pairwise(cuts)
        ]
        assert all(part.places.is_between_words(whole.nbytes) for part in parts)
        assert finish(sum(part.word_sum(whole.nbytes) for part in parts), whole.nbytes) == digest_tensor(
            whole
        )


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


def joined(ranks: Ranks, **sizes: int) -> Parallel:
    """All processes but the last one, which receives."""
    parallel: Parallel = replace(ranks, world_size=ranks.world_size - 1).join(**sizes)
    return parallel


def sent_and_received(
    ranks: Ranks, directory: str, folder: str, tp_size: int, shard_size: int, dtype: str
) -> list[tuple[str, dict[str, bytes]]]:
    """Digest and bits of two syncs, on all ranks of the actor and in a process that receives."""
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    if ranks.rank == ranks.world_size - 1:
        copy = load_model(ModelConfig(path=folder, dtype=dtype)).module  # type: ignore[arg-type]
        if dtype == "bfloat16":
            copy.to(torch.bfloat16)
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
        receiver = WeightReceiver(ModuleTarget(copy), timeout_s=60.0)
        receiver.join(read_endpoint(file), index=0)
        received = [(receiver.receive(version).digest, bits_of(copy)) for version in (1, 2)]
        receiver.close()
        return received
    parallel = joined(ranks, tensor_parallel=tp_size, shard_size=shard_size)
    engine = engine_of(parallel, Setting(folder=folder, tp_size=tp_size, dtype=dtype))
    module = engine.model.module
    sender = WeightSender(
        module, rank=ranks.rank, bucket_bytes=BUCKET_BYTES, timeout_s=60.0,
        dtypes=dict.fromkeys(weights_metadata(module).dtypes, torch.bfloat16) if dtype == "bfloat16" else None,
    )  # fmt: skip
    if (endpoint := sender.open(num_receivers=1)) is not None:
        write_endpoint(endpoint, file)
    results = []
    gathers = DTensor.full_tensor
    for version in (1, 2):
        DTensor.full_tensor = gathered  # type: ignore[method-assign]
        report = sender.send(version)
        DTensor.full_tensor = gathers  # type: ignore[method-assign]
        assert report.transport == ("shared_memory" if ranks.rank == 0 else "shards")
        results.append((report.digest, {}))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
    parallel.barrier("the end")
    sender.close()
    return results


def gathered(*args: Any, **options: Any) -> Tensor:
    raise AssertionError("a weight was gathered")


def bits_of(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    return {name: full_bits(tensor.to(dtype or tensor.dtype)) for name, tensor in module.state_dict().items()}


def check(results: list[list[tuple[str, dict[str, bytes]]]], folder: str, dtype: str) -> None:
    """The receiver has the bits of one process, and rank 0 has their digest."""
    module = load_model(ModelConfig(path=folder, dtype=dtype)).module  # type: ignore[arg-type]
    first, *_, received = results
    for sync in range(2):
        assert received[sync][1] == bits_of(module, torch.bfloat16 if dtype == "bfloat16" else None)
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


def merged_and_received(ranks: Ranks, directory: str, setting: Setting) -> tuple[str, dict[str, bytes]]:
    """Digest and bits of a sync of weights with an adapter, on all ranks of the actor and in a receiver."""
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    if ranks.rank == ranks.world_size - 1:
        copy = load_model(ModelConfig(path=setting.folder, dtype="float64")).module
        receiver = WeightReceiver(ModuleTarget(copy), timeout_s=60.0)
        receiver.join(read_endpoint(file), index=0)
        received = receiver.receive(1).digest, bits_of(copy)
        receiver.close()
        return received
    parallel = joined(ranks, **setting.axes)
    engine = engine_of(parallel, setting)
    enlarge_adapters(engine.model.module)
    sender = WeightSender(engine.model.module, rank=ranks.rank, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    if (endpoint := sender.open(num_receivers=1)) is not None:
        write_endpoint(endpoint, file)
    report = sender.send(1, engine.streamed_weights())
    assert report.transport == ("shared_memory" if ranks.rank == 0 else "shards")
    parallel.barrier("the end")
    sender.close()
    return report.digest, {}


@torch.no_grad()
def enlarge_adapters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if ".lora_B." in name and not parameter.is_meta:
            parameter.add_(0.25)


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
    enlarge_adapters(alone_engine.model.module)
    cut = replace(setting, **axes)  # type: ignore[arg-type]
    first, *_, received = run_ranks(merged_and_received, 5, str(tmp_path), cut)
    assert received[0] == first[0] != ""
    expected = {name: full_bits(tensor) for name, tensor in alone_engine.streamed_weights() or ()}
    assert expected
    assert {name: received[1][name] for name in expected} == expected


def with_faults(ranks: Ranks, directory: str) -> list[str]:
    """What each process says of a sync that is refused, of one in which a rank fails, and of one that succeeds."""
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    model = nn.Linear(64, 48)
    if ranks.rank == 2:
        receiver = WeightReceiver(ModuleTarget(model), timeout_s=60.0)
        receiver.join(read_endpoint(file), index=0)
        calls: list[Callable[[], Any]] = [
            lambda: receiver.refuse(1, "busy"), lambda: receiver.receive(2), lambda: receiver.receive(3)
        ]  # fmt: skip
        said = [outcome(call) for call in calls]
        receiver.close()
        return said
    parallel = joined(ranks)
    fully_shard(model, mesh=parallel.mesh)
    sender = WeightSender(model, rank=ranks.rank, bucket_bytes=1024, timeout_s=60.0)
    if (endpoint := sender.open(num_receivers=1)) is not None:
        write_endpoint(endpoint, file)
    said = [outcome(lambda: sender.send(1))]
    fill, count = shards.ShardStream._fill, itertools.count()

    def failing(*args: Any) -> None:
        if ranks.rank == 1 and next(count) == 4:
            raise ValueError("no memory for a cast")
        fill(*args)

    shards.ShardStream._fill = failing  # type: ignore[method-assign]
    said.append(outcome(lambda: sender.send(2)))
    shards.ShardStream._fill = fill  # type: ignore[method-assign]
    said.append(outcome(lambda: sender.send(3)))
    parallel.barrier("the end")
    sender.close()
    return said


def outcome(call: Callable[[], Any]) -> str:
    try:
        result = call()
    except (SyncError, RuntimeError, ValueError) as error:
        return str(error)
    assert isinstance(result, SyncReport)
    return f"version {result.version}"


@pytest.mark.slow
def test_whatever_fails_all_ranks_hear_of_it_and_the_next_sync_succeeds(tmp_path: Path) -> None:
    first, second, received = run_ranks(with_faults, 3, str(tmp_path))
    assert "sync 1 refused: busy" in first[0]
    assert second[0] == "version 1", "it has done its part, and rank 0 says what came of it"
    assert received[0] == "sync 1 refused: busy"
    assert first[1] == "rank 1 of the actor could not give its part of the weights; its log says why"
    assert second[1] == "no memory for a cast"
    assert "the sender gave up: rank 1 of the actor could not give" in received[1]
    assert [said[2] for said in (first, second, received)] == ["version 3"] * 3


MODEL_BYTES, PEAK_BUCKET_BYTES = 96 << 20, 4 << 20


def memory_of_a_sync(ranks: Ranks, directory: str) -> int:
    """Most resident memory beyond that of the start of a sync, on two ranks of an actor and in a receiver."""
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    # A matrix of half the model, and small ones.
    side = 1 << 10
    model = nn.ModuleList(
        [nn.Linear(side, 12 * side, bias=False), *(nn.Linear(side, side) for _ in range(12))]
    )
    assert sum(p.nbytes for p in model.parameters()) > MODEL_BYTES
    if ranks.rank == 2:
        receiver = WeightReceiver(ModuleTarget(model), timeout_s=60.0)
        receiver.join(read_endpoint(file), index=0)
        with Peak() as used:
            receiver.receive(1)
        receiver.close()
        return used[0]
    parallel = joined(ranks)
    for layer in model:
        fully_shard(layer, mesh=parallel.mesh)
    sender = WeightSender(model, rank=ranks.rank, bucket_bytes=PEAK_BUCKET_BYTES, timeout_s=60.0)
    if (endpoint := sender.open(num_receivers=1)) is not None:
        write_endpoint(endpoint, file)
    digest_weights(model)  # what the ranks need to talk at all
    with Peak() as used:
        sender.send(1)
    parallel.barrier("the end")
    sender.close()
    return used[0]


class Peak:
    """Resident memory beyond that at the start, at most; in a list of one number."""

    def __enter__(self) -> list[int]:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self._before, self._used = status_bytes("VmRSS"), [0]
        return self._used

    def __exit__(self, *error: object) -> None:
        self._used[0] = status_bytes("VmHWM") - self._before


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_beside_the_shards_there_are_two_buckets_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    for used in run_ranks(memory_of_a_sync, 3, str(tmp_path)):
        assert used < 3 * PEAK_BUCKET_BYTES + (4 << 20), (
            used
        )  # the two slots, and what was never touched before
        assert used < MODEL_BYTES / 5
