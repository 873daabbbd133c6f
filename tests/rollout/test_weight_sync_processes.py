"""Syncs between processes: sharded senders, and processes that are killed in the middle of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.shared_host_device import HostDevice
from rollout.sync_cases import BUCKET_BYTES, Net, bits, device_of, net, side_by_side
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from references.rank_processes import Ranks, leave, run_ranks
from strop.engines.checksum.models import digest_weights
from strop.engines.parallel.process_group import join_ranks
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.cuda_ipc import sharing_device
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import Endpoint, SyncError, SyncIncomplete, SyncReport

_SPAWN = multiprocessing.get_context("spawn")
START_S = 120.0
NOWHERE = "/no/such/folder"


def write_endpoint(endpoint: Endpoint, file: Path) -> None:
    """Hand it to the other processes."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(endpoint)))
    part.rename(file)


def read_endpoint(file: Path) -> Endpoint:
    """What another process has written, or will write."""
    deadline = time.monotonic() + START_S
    while not file.exists():
        assert time.monotonic() < deadline, "the sender did not start"
        time.sleep(0.02)
    return Endpoint(**json.loads(file.read_text()))


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Starts a function in a process of its own, which does not outlive the test."""
    started: list[BaseProcess] = []

    def call(function: Callable[..., None], *args: Any) -> BaseProcess:
        process = _SPAWN.Process(target=function, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.join(10)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sender_that_dies(file: Path, folder: str, fatal_bucket: int, transport: str) -> None:
    """Sends version 1, and dies when the bucket of this number is announced; -1: as soon as it listens."""
    torch.set_num_threads(1)
    shared_memory.FOLDER = Path(folder)
    sender = WeightSender(net(1), bucket_bytes=BUCKET_BYTES, timeout_s=60.0, device_of=device_of(transport))
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    write_endpoint(endpoint, file)
    if fatal_bucket < 0:
        kill_this_process()
    session = sender._session
    assert session is not None
    announce, number = session._announce, iter(range(100))

    def announced(bucket: Any) -> None:
        if next(number) == fatal_bucket:
            kill_this_process()
        announce(bucket)

    session._announce = announced  # type: ignore[method-assign]
    sender.send(1)


def receiver_that_dies(file: Path, index: int, transport: str) -> None:
    """Joins, and dies when the first bucket is loaded."""
    torch.set_num_threads(1)
    target = ModuleTarget(net(200))
    target.load = lambda tensors: kill_this_process()  # type: ignore[method-assign]
    receiver = WeightReceiver(target, timeout_s=60.0, device_of=device_of(transport))
    receiver.join(read_endpoint(file), index=index)
    receiver.receive(1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "cuda_ipc"])
def test_a_sender_killed_midway_leaves_an_incomplete_sync_and_no_memory(
    transport: str, tmp_path: Path, start: Callable[..., BaseProcess]
) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    process = start(
        sender_that_dies,
        tmp_path / "endpoint",
        NOWHERE if transport == "collective" else str(folder),
        3,
        transport,
    )
    receiver = WeightReceiver(ModuleTarget(net(2)), timeout_s=60.0, device_of=device_of(transport))
    receiver.join(read_endpoint(tmp_path / "endpoint"), index=0)
    with pytest.raises(SyncIncomplete) as caught:
        receiver.receive(1)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    # Bucket 0 with three tensors, and 1 and perhaps 2 with the fourth, were loaded before the end was noticed.
    assert str(caught.value).startswith(
        ("sync 1 incomplete: 6 of 10 tensors", "sync 1 incomplete: 7 of 10 tensors")
    )
    assert receiver.version is None
    assert list(folder.iterdir()) == [], "a killed sender leaves nothing behind once its memory was mapped"
    assert digest_of_next_sync(receiver) == digest_weights(net(7))


def digest_of_next_sync(receiver: WeightReceiver) -> str:
    """A sync from another sender, in this process."""
    sender = WeightSender(net(7), timeout_s=60.0)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    receiver.join(endpoint, index=0)
    sent, received = side_by_side([lambda: sender.send(2), lambda: receiver.receive(2)])
    sender.close()
    receiver.close()
    assert isinstance(sent, SyncReport), sent
    assert isinstance(received, SyncReport), received
    return received.digest


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "cuda_ipc"])
def test_a_receiver_killed_midway_is_named_and_the_others_are_told(
    transport: str, tmp_path: Path, start: Callable[..., BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", Path(NOWHERE) if transport == "collective" else folder)
    ours = HostDevice()
    side = (lambda _: ours) if transport == "cuda_ipc" else sharing_device
    sender = WeightSender(net(1), bucket_bytes=BUCKET_BYTES, timeout_s=START_S, device_of=side)
    endpoint = sender.open(num_receivers=2)
    assert endpoint is not None
    write_endpoint(endpoint, tmp_path / "endpoint")
    process = start(receiver_that_dies, tmp_path / "endpoint", 1, transport)
    copy = net(2)
    receiver = WeightReceiver(ModuleTarget(copy), timeout_s=START_S, device_of=device_of(transport))
    receiver.join(endpoint, index=0)
    started = time.monotonic()
    sent, received = side_by_side([lambda: sender.send(1), lambda: receiver.receive(1)])
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert isinstance(sent, SyncError)
    assert str(sent).startswith("sync 1 stopped: ")
    assert isinstance(received, SyncIncomplete)
    assert "the sender gave up" in str(received)
    assert time.monotonic() - started < START_S, "noticed when it happened, not at the deadline"
    assert len(ours.allocated) == (transport == "cuda_ipc")
    assert ours.num_exported == 0, "the memory that the dead one had open is free"
    assert list(folder.iterdir()) == []
    # Without the dead one, the rest goes on in a session of its own.
    assert digest_of_next_sync(receiver) == digest_weights(net(7))
    assert bits(copy) == bits(net(7))
    sender.close()


@pytest.mark.slow
def test_memory_of_a_sender_killed_before_it_was_mapped_is_removed_by_the_next_one(
    tmp_path: Path, start: Callable[..., BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    process = start(sender_that_dies, tmp_path / "endpoint", str(folder), -1, "shared_memory")
    process.join(START_S)
    assert process.exitcode == -signal.SIGKILL
    (left,) = folder.iterdir()
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    sender = WeightSender(net(1))
    sender.open(num_receivers=1)
    assert not left.exists()
    sender.close()
    assert list(folder.iterdir()) == []


# Two senders with a shard each, two receivers: four processes.

VERSIONS = (1, 2, 3)
"""All weights; after a change of few elements; after a change of all."""


def play(ranks: Ranks, directory: str, folder: str) -> list[tuple[str, str, int, dict[str, bytes]]]:
    """The part of one process in three syncs: transport, digest, number of tensors, and the bits afterwards."""
    shared_memory.FOLDER = Path(folder)
    file = Path(directory) / "endpoint"
    return send_shards(ranks, file) if ranks.rank < 2 else receive_copies(ranks, file)


def send_shards(ranks: Ranks, file: Path) -> list[tuple[str, str, int, dict[str, bytes]]]:
    parallel = join_ranks(
        rank=ranks.rank,
        world_size=2,
        rendezvous=ranks.rendezvous,
        device="cpu",
        timeout_s=60.0,
    )
    model = net(1)
    model.norm.data, model.scale.data = model.norm.data.float(), model.scale.data.float()
    model.scale = torch.nn.Parameter(model.scale.data.view(1))
    for part in (*model.layers, model):
        fully_shard(part, mesh=parallel.mesh)
    sender = WeightSender(model, rank=ranks.rank, bucket_bytes=BUCKET_BYTES, timeout_s=60.0)
    endpoint = sender.open(num_receivers=2)
    if endpoint is not None:
        write_endpoint(endpoint, file)
    results = []
    for version in VERSIONS:
        report = sender.send(version)
        if version == 2 and report.transport == "collective":
            assert 0 < report.sent_bytes < 0.2 * report.num_bytes, "only changes travel"
        whole = {name: full_bits(tensor) for name, tensor in model.state_dict().items()}
        digest = digest_weights(model)  # of all ranks together
        assert report.digest in (digest, "")
        results.append((report.transport, digest, report.num_tensors, whole))
        with torch.no_grad():
            for parameter in model.parameters():
                if version > 1:
                    parameter.add_(1)
                else:  # one element of each shard
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local.view(-1)[:1] += 1
    parallel.barrier("the end")
    sender.close()
    return results


def full_bits(tensor: Any) -> bytes:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    result: bytes = whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return result


def receive_copies(ranks: Ranks, file: Path) -> list[tuple[str, str, int, dict[str, bytes]]]:
    copy: Net = net(100 + ranks.rank)
    copy.norm.data = copy.norm.data.float()
    copy.scale = torch.nn.Parameter(copy.scale.data.float().view(1))
    leave()
    receiver = WeightReceiver(ModuleTarget(copy), timeout_s=60.0)
    receiver.join(read_endpoint(file), index=ranks.rank - 2)
    results = []
    for version in VERSIONS:
        report = receiver.receive(version)
        results.append((report.transport, report.digest, report.num_tensors, bits(copy)))
    receiver.close()
    return results


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_two_ranks_with_shards_bring_every_bit_to_two_receivers(transport: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if transport == "shared_memory" else NOWHERE
    results = run_ranks(play, 4, str(tmp_path), folder)
    for sync in range(len(VERSIONS)):
        first, second, *received = (result[sync] for result in results)
        assert first[0] == transport
        assert second[0] == ("shards" if transport == "shared_memory" else transport)
        assert received[0][0] == received[1][0] == transport
        for one in (second, *received):
            assert one[1:] == first[1:], "digest, number of tensors, bits"
    assert results[0][0][3] != results[0][1][3] != results[0][2][3], "the versions must be told apart"
