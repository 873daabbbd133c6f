"""Syncs over the network and through a store, of which each rank of the actor sends its own pieces."""

from __future__ import annotations

import itertools
import json
import logging.handlers
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout import sync_ranks
from rollout.test_weight_sync_processes import (
    START_S,
    kill_this_process,
    read_endpoint,
    start,
    write_endpoint,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.controller.store_server import Rendezvous, RendezvousServer
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel import pipeline
from strop.engines.parallel.process_group import join_ranks
from strop.engines.parallel.ranks import alone
from strop.engines.weights import weights_metadata
from strop.rollout.weight_sync import collective, own_parts, pieces, shared_memory
from strop.rollout.weight_sync.broadcast_group import BroadcastGroup
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.store_transport import StoreSender
from strop.rollout.weight_sync.types import SyncIncomplete

__all__ = ["start"]  # the fixture

Folder = Callable[[str], Path]
VERSIONS = (1, 2, 3, 4)
"""All weights; after a change of few elements; of none; of all."""
NOWHERE = Path("/no/such/folder")


@torch.no_grad()
def change(module: nn.Module, version: int) -> None:
    """Change the weights before this version: the same way in a whole model and in its shards."""
    for parameter in module.parameters():
        if version == 2 and parameter.dim() > 1 and not parameter.is_meta:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local[local.abs() % 0.01 < 0.0003] *= 2  # about 3 % of them
        elif version == 4:
            parameter.mul_(1.5)


def synced(
    ranks: Ranks,
    directory: str,
    setting: Setting,
    dtype: str,
    axes: dict[str, int],
    store: str,
    num_receivers: int,
) -> list[tuple[str, int, sync_ranks.Bits]]:
    """Digest, sent bytes and bits of each sync, on a rank of the actor and in a receiver."""
    shared_memory.FOLDER = NOWHERE
    kind = getattr(torch, dtype)
    num_senders = ranks.world_size - num_receivers
    if ranks.rank >= num_senders:
        copy = sync_ranks.zeroed(setting.folder, "float64", kind)
        received = []
        with sync_ranks.receiving(copy, directory, index=ranks.rank - num_senders) as receiver:
            for version in VERSIONS:
                report = receiver.receive(version)
                received.append((report.digest, report.sent_bytes, sync_ranks.bits_of(copy)))
        return received
    parallel = sync_ranks.joined(ranks, num_receivers=num_receivers, **setting.axes, **axes)
    module = engine_of(parallel, setting).model.module
    dtypes = dict.fromkeys(weights_metadata(module).dtypes, kind)
    results: list[tuple[str, int, sync_ranks.Bits]] = []
    with sync_ranks.sending(
        module, parallel, directory, num_receivers=num_receivers, store=store, dtypes=dtypes
    ) as sender:
        for version in VERSIONS:
            change(module, version)
            with NothingGathered():
                report = sender.send(version)
            assert report.transport == ("store" if store else "collective")
            results.append((report.digest, report.sent_bytes, {}))
    return results


class NothingGathered:
    """Inside, a weight that is made whole from shards or stages is an error."""

    def __enter__(self) -> None:
        self._before = DTensor.full_tensor, pipeline.Pipeline.whole
        DTensor.full_tensor = pipeline.Pipeline.whole = _gathered  # type: ignore[method-assign,assignment]

    def __exit__(self, *error: object) -> None:
        DTensor.full_tensor, pipeline.Pipeline.whole = self._before  # type: ignore[method-assign]


def _gathered(*args: Any, **options: Any) -> Tensor:
    raise AssertionError("a weight was gathered")


def check(
    results: list[list[tuple[str, int, sync_ranks.Bits]]], folder: str, dtype: str, num_receivers: int
) -> None:
    """Every receiver has the bits of one process after each sync, and what the ranks sent is what it got."""
    module = load_model(ModelConfig(path=folder, dtype="float64")).module
    kind: torch.dtype = getattr(torch, dtype)
    senders, receivers = results[:-num_receivers], results[-num_receivers:]
    seen = []
    for sync, version in enumerate(VERSIONS):
        change(module, version)
        expected = sync_ranks.bits_of(module, kind)
        seen.append(expected)
        for received in receivers:
            digest, got_bytes, bits = received[sync]
            assert bits == expected
            assert digest == senders[0][sync][0] != ""
            sent_bytes = sum(rank[sync][1] for rank in senders)
            assert sent_bytes <= got_bytes <= sent_bytes + 64 * 200, "and the space between the weights"
    num_bytes = sum(p.numel() * kind.itemsize for p in module.parameters())
    first, few, none, all_again = (sum(rank[sync][1] for rank in senders) for sync in range(len(VERSIONS)))
    assert first == all_again == num_bytes
    assert none == 0
    assert 0 < few < num_bytes / 3, "changes alone"
    assert seen[0] != seen[1] == seen[2] != seen[3], "the versions must be told apart"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "dtype", "num_senders", "sizes", "axes"),
    [
        ("qwen3", "bfloat16", 2, {}, {}),
        ("qwen3", "float32", 2, {"tp_size": 2}, {}),  # 61 tokens, columns, a tied head
        ("llama_biased", "bfloat16", 2, {"tp_size": 2}, {}),
        ("qwen3", "bfloat16", 2, {"pp_size": 2}, {}),
        ("qwen3_moe", "bfloat16", 2, {"ep_size": 2}, {}),
        ("qwen3", "bfloat16", 4, {"tp_size": 2}, {}),
        ("qwen3", "bfloat16", 4, {"tp_size": 2, "pp_size": 2}, {}),
        ("qwen3", "float32", 4, {}, {"shard_size": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_of_any_mesh_send_their_pieces(
    tiny_folder: Folder, tmp_path: Path, kind: str, dtype: str, num_senders: int, sizes: dict[str, int],
    axes: dict[str, int],
) -> None:  # fmt: skip
    setting = Setting(folder=str(tiny_folder(kind)), **sizes)  # type: ignore[arg-type]
    results = run_ranks(synced, num_senders + 1, str(tmp_path), setting, dtype, axes, "", 1)
    check(results, setting.folder, dtype, 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_store", [False, True])
def test_two_ranks_send_to_two_receivers(tiny_folder: Folder, tmp_path: Path, is_store: bool) -> None:
    setting, store = Setting(folder=str(tiny_folder("qwen3"))), str(tmp_path / "store") if is_store else ""
    check(
        run_ranks(synced, 4, str(tmp_path), setting, "bfloat16", {}, store, 2), setting.folder, "bfloat16", 2
    )
    assert not is_store or list((tmp_path / "store").iterdir()) == []


def merged_over_the_network(
    ranks: Ranks, directory: str, setting: Setting
) -> tuple[str, str, sync_ranks.Bits]:
    """As `merged_and_received`."""
    shared_memory.FOLDER = NOWHERE
    return sync_ranks.merged_and_received(ranks, directory, setting)


@pytest.mark.dist
@pytest.mark.parametrize("axes", [{"pp_size": 2}, {"tp_size": 2}], ids=str)
def test_ranks_send_their_pieces_with_an_adapter(
    tiny_folder: Folder, tmp_path: Path, axes: dict[str, int]
) -> None:
    setting = Setting(folder=str(tiny_folder("qwen3")), lora=LoraConfig(rank=3, alpha=6.0))
    whole = engine_of(alone("cpu"), setting)
    sync_ranks.enlarge_adapters(whole.model.module)
    first, *_, received = run_ranks(merged_over_the_network, 3, str(tmp_path), replace(setting, **axes))  # type: ignore[arg-type]
    assert received[0] == first[0] == "collective"
    assert received[1] == first[1] != ""
    expected = {name: tensor.numpy().tobytes() for name, tensor in whole.streamed_weights() or ()}
    assert expected
    assert {name: received[2][name] for name in expected} == expected


ROWS, COLUMNS = 48, 64


def bytes_on_the_way(ranks: Ranks, directory: str) -> tuple[int, int, int]:
    """Bytes that a rank handed to its group, that it reports, and of the shards that it holds."""
    shared_memory.FOLDER = NOWHERE
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS, bias=False))
    if ranks.rank == ranks.world_size - 1:
        with sync_ranks.receiving(model, directory) as receiver:
            num_bytes = receiver.receive(1).sent_bytes
        return num_bytes, num_bytes, num_bytes
    parallel = sync_ranks.joined(ranks)
    fully_shard(model, mesh=parallel.mesh)
    begin, counted = BroadcastGroup.start, []

    def counting(group: BroadcastGroup, data: Tensor) -> None:
        counted.append(data.nbytes)
        begin(group, data)

    BroadcastGroup.start = counting  # type: ignore[method-assign]
    try:
        with sync_ranks.sending(model, parallel, directory) as sender:
            report = sender.send(1)
    finally:
        BroadcastGroup.start = begin  # type: ignore[method-assign]
    return sum(counted), report.sent_bytes, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("num_senders", [2, 4])
def test_each_rank_sends_its_share_and_no_more(tmp_path: Path, num_senders: int) -> None:
    *senders, received = run_ranks(bytes_on_the_way, num_senders + 1, str(tmp_path))
    num_bytes = 2 * 4 * ROWS * COLUMNS
    assert senders == [(num_bytes // num_senders,) * 3] * num_senders
    assert received == (num_bytes,) * 3


def with_faults(ranks: Ranks, directory: str, store: str) -> tuple[float, list[str]]:
    """Seconds of six syncs, and what each process says of them: one is refused, in one a rank fails, in one it cannot
    send, in one it has no memory for a piece, in one it never could send, and the last succeeds. Then its log."""
    shared_memory.FOLDER = NOWHERE
    model = nn.Linear(64, 48)
    if ranks.rank == 2:
        with sync_ranks.receiving(model, directory) as receiver:
            calls: list[Callable[[], Any]] = [
                lambda: receiver.refuse(1, "busy"), *(lambda v=v: receiver.receive(v) for v in range(2, 7))
            ]  # fmt: skip
            started = time.monotonic()
            said = [sync_ranks.outcome(call) for call in calls]
            return time.monotonic() - started, said
    parallel = sync_ranks.joined(ranks)
    # By columns: both ranks have bytes in each of the 12 buckets of the matrix.
    fully_shard(model, mesh=parallel.mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)

    def fails(sender: WeightSender, home: Any, name: str, number: int, error: Exception) -> str:
        """Outcome of a sync in which this call of a function fails on rank 1."""
        function, count = getattr(home, name), itertools.count()

        def failing(*arguments: Any) -> Any:
            if ranks.rank == 1 and next(count) == number:
                raise error
            return function(*arguments)

        setattr(home, name, failing)
        try:
            return sync_ranks.outcome(lambda: sender.send(len(said) + 1))
        finally:
            setattr(home, name, function)

    log = logging.handlers.BufferingHandler(100)
    pieces.logger.addHandler(log)
    transport = StoreSender if store else collective.CollectiveSender
    with sync_ranks.sending(model, parallel, directory, bucket_bytes=1024, store=store) as sender:
        started = time.monotonic()
        said = [sync_ranks.outcome(lambda: sender.send(1))]
        said.append(fails(sender, own_parts, "next_weight", 1, ValueError("no memory for a cast")))
        said.append(fails(sender, transport, "send", 3, ConnectionError("no route to the receivers")))
        said.append(fails(sender, pieces, "cut_to_places", 3, RuntimeError("no memory for a piece")))
        said.append(
            fails(sender, transport, "send", 0, ConnectionError("no way to them"))
        )  # before there is a group
        said.append(sync_ranks.outcome(lambda: sender.send(6)))
        seconds = time.monotonic() - started
        said += [record.getMessage() for record in log.buffer]
        pieces.logger.removeHandler(log)
    return seconds, said


@pytest.mark.slow
@pytest.mark.parametrize("is_store", [False, True])
def test_whatever_fails_all_ranks_hear_of_it_and_the_next_sync_succeeds(
    tmp_path: Path, is_store: bool
) -> None:
    store = str(tmp_path / "store") if is_store else ""
    seconds, results = zip(*run_ranks(with_faults, 3, str(tmp_path), store), strict=True)
    assert max(seconds) < 40, "nobody waits for a deadline"
    first, second, received = results
    sync_ranks.assert_refused_then_failed(first, second, received)
    assert first[2].startswith("sync 3 stopped: ")
    assert second[2] == "version 3", "rank 0 says what came of it"
    assert second[3] == "no memory for a piece"
    assert first[4].startswith("sync 5 stopped: ")
    assert second[4] == "version 5"
    for said in (*first[2:5], *received[2:5]):
        assert "rank 1 of the actor" in said
    assert received[2].startswith("sync 3 incomplete: ")
    assert received[3].startswith("sync 4 incomplete: ")
    assert [said[5] for said in (first, second, received)] == ["version 6"] * 3
    assert second[6] == "rank 1 of the actor cannot send weights: no route to the receivers"
    assert not is_store or list((tmp_path / "store").iterdir()) == []


def memory_of_a_sync(ranks: Ranks, directory: str, dtype: str) -> list[int]:
    """Most resident memory beyond that of the start of a sync, on two ranks of an actor and in a receiver: of the first
    sync, and of one after a change of few elements."""
    shared_memory.FOLDER = NOWHERE
    model, kind = sync_ranks.large_model(), getattr(torch, dtype)
    used = []
    if ranks.rank == 2:
        with sync_ranks.receiving(model.to(kind), directory) as receiver:
            for version in (1, 2):
                with sync_ranks.Peak() as peak:
                    receiver.receive(version)
                used += peak
        return used
    parallel = sync_ranks.joined(ranks)
    for layer in model.children():
        fully_shard(layer, mesh=parallel.mesh)
    dtypes = dict.fromkeys(weights_metadata(model).dtypes, kind)
    with sync_ranks.sending(
        model, parallel, directory, bucket_bytes=sync_ranks.PEAK_BUCKET_BYTES, dtypes=dtypes
    ) as sender:
        if dtype == "float32":
            sender._last._free_bytes = lambda: 0  # keeps no bits, which are no part of what a sync takes
        parallel.barrier("what the ranks need to talk at all")
        for version in (1, 2):
            change(model, version)
            with sync_ranks.Peak() as peak:
                sender.send(version)
            used += peak
    return used


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_the_shards_there_are_three_buckets_whatever_the_size_of_a_tensor(
    tmp_path: Path, dtype: str
) -> None:
    *senders, receiver = run_ranks(memory_of_a_sync, 3, str(tmp_path), dtype)
    # Cast or not, what a rank has of three buckets; and what was never touched before: the groups, and multipliers of
    # digests. Of the changes 32 bytes for each element of the largest matrix, of which about 3 % changed.
    changed_bytes = 0 if dtype == "float32" else 32 * 0.03 * 12 * 2**20
    for rank, (first, second) in enumerate([*senders, receiver]):
        share = 1 if rank == 2 else 2
        if dtype == "float32" or rank == 2:  # else it keeps what it has sent
            assert first < 3 * sync_ranks.PEAK_BUCKET_BYTES + (12 << 20), first
        assert second < 3 * sync_ranks.PEAK_BUCKET_BYTES + (4 << 20) + changed_bytes / share, second
        assert second < sync_ranks.MODEL_BYTES / 4


def test_what_is_large_goes_by_itself_and_what_is_small_together() -> None:
    large, small = collective._MESSAGE_BYTES, collective._MESSAGE_BYTES - 1
    sizes = [small, 1, large, large, small, small, 0, large + 7, 3]
    cuts = [(0, 2), (2, 3), (3, 4), (4, 7), (7, 8), (8, 9)]
    assert collective.messages(sizes) == [slice(*cut) for cut in cuts]
    assert collective.messages([]) == []


def sent_while_loading(ranks: Ranks, directory: str) -> list[int]:
    """Buckets that the receiver expects while it loads each one."""
    shared_memory.FOLDER = NOWHERE
    model = nn.Sequential(*(nn.Linear(16, 24, bias=False) for _ in range(5)))  # a bucket each
    if ranks.rank == 0:
        with sync_ranks.sending(model, sync_ranks.joined(ranks), directory) as sender:
            sender.send(1)
        return []
    expected: list[int] = []
    with sync_ranks.receiving(model, directory) as receiver:
        load = receiver._target.load

        def counting(tensors: Sequence[tuple[str, Tensor]]) -> None:
            transport = receiver._joined()._transport
            assert isinstance(transport, collective.CollectiveReceiver)
            expected.append(len(transport._expected))
            load(tensors)

        receiver._target.load = counting  # type: ignore[method-assign]
        receiver.receive(1)
    return expected


@pytest.mark.dist
def test_while_a_bucket_is_loaded_the_next_ones_are_on_their_way(tmp_path: Path) -> None:
    assert run_ranks(sent_while_loading, 2, str(tmp_path))[1] == [2, 2, 2, 1, 0]


# Processes that die.


def actor_rank(
    rank: int, rendezvous: Rendezvous, directory: str, num_receivers: int, fatal_piece: int
) -> None:
    """Sends version 1, and writes what came of it; on rank 1 it dies when it is to send the piece of this number."""
    torch.set_num_threads(1)
    shared_memory.FOLDER = NOWHERE
    parallel = join_ranks(rank=rank, world_size=2, rendezvous=rendezvous, device="cpu", timeout_s=30.0)
    model = nn.Linear(64, 48)
    fully_shard(model, mesh=parallel.mesh)
    send, number = collective.CollectiveSender.send, itertools.count()

    def dying(transport: collective.CollectiveSender, contents: list[Tensor]) -> None:
        if rank == 1 and next(number) == fatal_piece:
            kill_this_process()
        send(transport, contents)

    collective.CollectiveSender.send = dying  # type: ignore[method-assign]
    sender = WeightSender(model, rank=rank, bucket_bytes=1024, timeout_s=30.0)
    if (endpoint := sender.open(num_receivers=num_receivers)) is not None:
        write_endpoint(endpoint, Path(directory) / "endpoint")
    said = sync_ranks.outcome(lambda: sender.send(1))
    (Path(directory) / f"said-{rank}.part").write_text(json.dumps(said))
    (Path(directory) / f"said-{rank}.part").rename(Path(directory) / f"said-{rank}")
    sender.close()


def receiver_that_dies(directory: str, index: int) -> None:
    """Joins, and dies when a part of the matrix is loaded."""
    torch.set_num_threads(1)
    target = ModuleTarget(nn.Linear(64, 48))
    target.load_part = lambda *args: kill_this_process()  # type: ignore[method-assign]
    receiver = WeightReceiver(target, timeout_s=30.0)
    receiver.join(read_endpoint(Path(directory) / "endpoint"), index=index)
    receiver.receive(1)


def said_by(directory: Path, rank: int) -> str:
    deadline = time.monotonic() + START_S
    while not (directory / f"said-{rank}").exists():
        assert time.monotonic() < deadline, f"rank {rank} hangs"
        time.sleep(0.02)
    said: str = json.loads((directory / f"said-{rank}").read_text())
    return said


@pytest.mark.slow
def test_a_rank_of_the_actor_killed_midway_ends_the_sync_for_all(
    tmp_path: Path, start: Callable[..., BaseProcess]
) -> None:
    place = RendezvousServer("127.0.0.1")
    processes = [start(actor_rank, rank, place.rendezvous, str(tmp_path), 1, 4) for rank in range(2)]
    receiver = WeightReceiver(ModuleTarget(nn.Linear(64, 48)), timeout_s=30.0)
    receiver.join(read_endpoint(tmp_path / "endpoint"), index=0)
    started = time.monotonic()
    with pytest.raises(SyncIncomplete, match="^sync 1 incomplete: "):
        receiver.receive(1)
    assert "version" not in said_by(tmp_path, 0)
    assert time.monotonic() - started < 30, "noticed when it happened, not at the deadline"
    processes[1].join(START_S)
    assert processes[1].exitcode == -signal.SIGKILL
    assert receiver.version is None
    receiver.close()
    place.close()


@pytest.mark.slow
def test_a_receiver_killed_midway_ends_the_sync_for_all(
    tmp_path: Path, start: Callable[..., BaseProcess]
) -> None:
    place = RendezvousServer("127.0.0.1")
    for rank in range(2):
        start(actor_rank, rank, place.rendezvous, str(tmp_path), 2, -1)
    process = start(receiver_that_dies, str(tmp_path), 1)
    receiver = WeightReceiver(ModuleTarget(nn.Linear(64, 48)), timeout_s=30.0)
    receiver.join(read_endpoint(tmp_path / "endpoint"), index=0)
    with pytest.raises(SyncIncomplete, match="^sync 1 incomplete: .*the sender gave up"):
        receiver.receive(1)
    process.join(START_S)
    assert process.exitcode == -signal.SIGKILL
    assert said_by(tmp_path, 0).startswith("sync 1 stopped: ")
    assert said_by(tmp_path, 1) == "version 1", "rank 0 says what came of it"
    assert receiver.version is None
    receiver.close()
    place.close()
