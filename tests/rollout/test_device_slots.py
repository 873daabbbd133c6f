"""Weights through memory of the sender's device, with host memory in its place: choice, waits for copies, processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.shared_host_device import HostDevice
from rollout.sync_cases import BUCKET_BYTES, Net, Pair, bits, connected, net, side_by_side
from rollout.sync_ranks import Peak, joined
from rollout.test_weight_sync_processes import full_bits, read_endpoint, write_endpoint
from rollout.test_weight_sync_shards import gathered
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from references.rank_processes import Ranks, leave, run_ranks
from strop.engines.checksum.models import digest_weights
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.device_slots import OpenedSlots, OwnedSlots
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.transport import Plan
from strop.rollout.weight_sync.types import SyncError, SyncIncomplete, SyncReport


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", path)
    return path


class Devices:
    """Devices of the sides of a test, in the order in which they were asked for: receivers, then the sender."""

    def __init__(self, kind: type[HostDevice] = HostDevice) -> None:
        self._kind = kind
        self.all: list[HostDevice] = []

    def __call__(self, device: torch.device) -> HostDevice:
        self.all.append(self._kind())
        return self.all[-1]


def transports(results: Sequence[Any]) -> list[str]:
    assert all(isinstance(result, SyncReport) for result in results), results
    return [result.transport for result in results]


def test_one_allocation_of_two_buckets_is_opened_once_by_each_receiver(folder: Path) -> None:
    devices = Devices()
    pairs = connected(device_of=devices)
    pair = next(pairs)
    for version in (1, 2, 3):
        results = pair.sync(version)
        assert transports(results) == ["cuda_ipc"] * 3
        assert all(bits(copy) == bits(pair.model) for copy in pair.copies)
        assert {result.digest for result in results} == {digest_weights(pair.model)}
        assert len({result.sent_bytes for result in results}) == 1
        assert results[0].sent_bytes >= results[0].num_bytes, "all weights travel, whole"  # type: ignore[union-attr]
        with torch.no_grad():
            pair.model.embed.weight.add_(1)
    assert [device.opened for device in devices.all[:2]] == [1, 1]
    assert [size for device in devices.all for size in device.allocated] == [2 * BUCKET_BYTES]
    assert list(folder.iterdir()) == [], "no file of the node's memory is left"
    exported = sum(device.num_exported for device in devices.all)
    pairs.close()
    assert exported == 1
    assert sum(device.num_exported for device in devices.all) == 0, "the owner takes its count back"


class Closed(HostDevice):
    """Other processes cannot open its memory, nor can it open theirs."""

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        raise OSError("no peer access")


class Small(HostDevice):
    def allocate(self, num_bytes: int) -> Tensor:
        raise OSError(f"no room for {num_bytes} bytes")


class Strange(HostDevice):
    """It opens another memory than the one that is meant."""

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        return torch.zeros(exported["num_bytes"], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Closed, "rollout worker 0: no peer access"),
        (Small, f"no room for {2 * BUCKET_BYTES} bytes"),
        (Strange, "rollout worker 0: host reads other bytes in memory of host"),
    ],
)
def test_what_cannot_be_opened_is_said_once_and_host_memory_serves(
    kind: type[HostDevice], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices = Devices(kind)
    pairs = connected(device_of=devices)
    pair = next(pairs)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            assert transports(pair.sync(version)) == ["shared_memory"] * 3
            assert all(bits(copy) == bits(pair.model) for copy in pair.copies)
            assert pair.sender._session is not None
            pair.sender._session._choice.drop()  # as after a sync that failed
    assert caplog.messages == [
        f"the weights go through host memory, not through memory of the device: {reason}"
    ]
    assert sum(device.num_exported for device in devices.all) == 0
    pairs.close()


def test_a_receiver_on_a_cpu_gets_its_weights_through_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    model, copies = net(1), [net(2), net(3)]
    sender = WeightSender(model, bucket_bytes=BUCKET_BYTES, timeout_s=20.0, device_of=HostDevice.of)
    endpoint = sender.open(num_receivers=2)
    assert endpoint is not None
    receivers = [
        WeightReceiver(ModuleTarget(copies[0]), timeout_s=20.0, device_of=HostDevice.of),
        WeightReceiver(ModuleTarget(copies[1]), timeout_s=20.0),
    ]
    for index, receiver in enumerate(receivers):
        receiver.join(endpoint, index=index)
    pair = Pair(sender, receivers, model, copies)
    with caplog.at_level(logging.WARNING):
        assert transports(pair.sync(1)) == ["shared_memory"] * 3
    assert caplog.messages == [], "that is no fault"
    pair.close()


def test_memory_of_another_owner_is_not_taken_for_the_senders() -> None:
    device = HostDevice()
    slots, other = OwnedSlots(device, 64), OwnedSlots(device, 64)
    plan = Plan(name="cuda_ipc", made_in=1, memory=slots.exported, slot_bytes=64)
    assert [len(slot) for slot in OpenedSlots(device, plan).slots] == [64, 64]
    memory = {**other.exported, "proof": slots.exported["proof"]}
    wrong = Plan(name="cuda_ipc", made_in=1, memory=memory, slot_bytes=64)
    with pytest.raises(OSError, match="host reads other bytes in memory of host"):
        OpenedSlots(device, wrong)
    with pytest.raises(OSError, match="not on such a device"):
        OpenedSlots(None, plan)
    slots.close()
    other.close()
    other.close()
    assert device.num_exported == 0


class LateWrites(HostDevice):
    """What its owner writes is seen by others once it has waited for it, as copies of a device's stream are."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def allocate(self, num_bytes: int) -> Tensor:
        shared = super().allocate(num_bytes)
        self._pairs.append((torch.zeros_like(shared), shared))
        return self._pairs[-1][0]

    def export(self, memory: Tensor) -> dict[str, Any]:
        self.synchronize()
        (shared,) = (theirs for ours, theirs in self._pairs if ours is memory)
        return super().export(shared)

    def synchronize(self) -> None:
        for ours, theirs in self._pairs:
            theirs.copy_(ours)


def test_a_bucket_is_announced_once_the_senders_copies_are_done() -> None:
    pairs = connected(device_of=Devices(LateWrites))
    pair = next(pairs)
    assert transports(pair.sync(1)) == ["cuda_ipc"] * 3
    pairs.close()


class LateReads(HostDevice):
    """Copies that wait in a stream until somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        while self.stream:
            self.stream.pop(0)()


class LateTarget(ModuleTarget):
    """It reads a bucket when its device comes to it."""

    def __init__(self, module: nn.Module, device: LateReads) -> None:
        super().__init__(module)
        self._late = device

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._late.stream.append(lambda: super(LateTarget, self).load(tensors))

    def load_part(self, name: str, start: int, data: Tensor) -> None:
        self._late.stream.append(lambda: super(LateTarget, self).load_part(name, start, data))


def test_a_slot_is_free_once_the_receivers_copies_are_done() -> None:
    model, copy, device = net(1), net(2), LateReads()
    sender = WeightSender(model, bucket_bytes=BUCKET_BYTES, timeout_s=20.0, device_of=HostDevice.of)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    receiver = WeightReceiver(LateTarget(copy, device), timeout_s=20.0, device_of=lambda _: device)
    receiver.join(endpoint, index=0)
    pair = Pair(sender, [receiver], model, [copy])
    assert transports(pair.sync(1)) == ["cuda_ipc"] * 2
    assert bits(copy) == bits(model)
    pair.close()


class Deaf(HostDevice):
    """Opening takes longer than anybody waits."""

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        time.sleep(1.5)
        return super().open(exported)


def test_who_does_not_answer_an_offer_ends_the_sync_at_its_deadline() -> None:
    pairs: Iterator[Pair] = connected(timeout_s=0.5, receiver_timeout_s=5.0, device_of=Devices(Deaf))
    pair = next(pairs)
    sent, *received = pair.sync(1)
    assert isinstance(sent, SyncError)
    assert str(sent) == (
        "sync 1 stopped: waited 0.5 s for rollout worker 0 to open memory of the device"
    )  # fmt: skip
    for result in received:
        assert isinstance(result, SyncIncomplete)
        assert "sync 1 did not begin: the sender gave up: waited 0.5 s" in str(result)
    pairs.close()


def test_a_receiver_that_refuses_after_an_offer_is_heard_and_the_next_sync_succeeds() -> None:
    pairs = connected(num_receivers=1, device_of=Devices())
    pair = next(pairs)
    sent, refused = side_by_side(
        [lambda: pair.sender.send(1), lambda: pair.receivers[0].refuse(1, "it is busy")]
    )
    assert "it is busy" in str(sent)
    assert "it is busy" in str(refused)
    assert transports(pair.sync(2)) == ["cuda_ipc"] * 2
    pairs.close()


# Two ranks of an actor and a receiver, in processes of their own.


def of_shards(ranks: Ranks, directory: str, closed_rank: int) -> list[tuple[str, str, dict[str, bytes]]]:
    """Transport, digest and bits of two syncs; the device of one rank may open nothing."""
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    devices = Devices(Closed if ranks.rank == closed_rank else HostDevice)
    model: Net = net(1 if ranks.rank < 2 else 2)
    model.norm.data, model.scale = model.norm.data.float(), nn.Parameter(model.scale.data.float().view(1))
    if ranks.rank == 2:
        leave()
        receiver = WeightReceiver(ModuleTarget(model), timeout_s=60.0, device_of=devices)
        receiver.join(read_endpoint(file), index=0)
        results = []
        for version in (1, 2):
            report = receiver.receive(version)
            results.append((report.transport, report.digest, bits(model)))
        receiver.close()
        return results
    parallel = joined(ranks)
    for part in (*model.layers, model):
        fully_shard(part, mesh=parallel.mesh)
    sender = WeightSender(
        model, rank=ranks.rank, bucket_bytes=BUCKET_BYTES, timeout_s=60.0, device_of=devices
    )
    if (endpoint := sender.open(num_receivers=1)) is not None:
        write_endpoint(endpoint, file)
    results = []
    gathers = DTensor.full_tensor
    for version in (1, 2):
        DTensor.full_tensor = gathered  # type: ignore[method-assign]
        report = sender.send(version)
        DTensor.full_tensor = gathers  # type: ignore[method-assign]
        whole = {name: full_bits(tensor) for name, tensor in model.state_dict().items()}
        results.append((report.transport, report.digest, whole))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    parallel.barrier("the end")
    sender.close()
    assert sum(device.num_exported for device in devices.all) == 0
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("closed_rank", "transport"), [(-1, "cuda_ipc"), (1, "shared_memory")])
def test_ranks_put_their_shards_into_memory_of_the_first_one(
    tmp_path: Path, closed_rank: int, transport: str
) -> None:
    first, second, received = run_ranks(of_shards, 3, str(tmp_path), closed_rank)
    for sync in range(2):
        assert [rank[sync][0] for rank in (first, second, received)] == [transport, "shards", transport]
        assert first[sync][1] == received[sync][1] != ""
        assert first[sync][2] == second[sync][2] == received[sync][2]
    assert first[0][2] != first[1][2], "the versions must be told apart"


MODEL_BYTES, PEAK_BUCKET_BYTES = 96 << 20, 4 << 20


def memory_of_a_sync(ranks: Ranks, directory: str) -> int:
    """Most resident memory beyond that of the start of a sync, in a sender and in a receiver."""
    leave()
    shared_memory.FOLDER = Path(directory)
    file = Path(directory) / "endpoint"
    side = 1 << 10  # a matrix of half the model, and small ones
    model = nn.ModuleList(
        [nn.Linear(side, 12 * side, bias=False), *(nn.Linear(side, side) for _ in range(12))]
    )
    assert sum(p.nbytes for p in model.parameters()) > MODEL_BYTES
    digest_weights(model)
    if ranks.rank == 1:
        receiver = WeightReceiver(ModuleTarget(model), timeout_s=60.0, device_of=HostDevice.of)
        receiver.join(read_endpoint(file), index=0)
        with Peak() as used:
            assert receiver.receive(1).transport == "cuda_ipc"
        receiver.close()
        return used[0]
    sender = WeightSender(model, bucket_bytes=PEAK_BUCKET_BYTES, timeout_s=60.0, device_of=HostDevice.of)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    write_endpoint(endpoint, file)
    with Peak() as used:
        sender.send(1)
    sender.close()
    return used[0]


@pytest.mark.slow
def test_beside_the_model_there_are_two_buckets(tmp_path: Path) -> None:
    for used in run_ranks(memory_of_a_sync, 2, str(tmp_path)):
        assert used < 3 * PEAK_BUCKET_BYTES + (4 << 20), used
