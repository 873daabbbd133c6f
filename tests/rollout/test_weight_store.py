"""Weights through a store: syncs that go well, and stores that fail, lie or show nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from rollout.sync_cases import Net, bits, net, side_by_side
from rollout.test_weight_sync_processes import read_endpoint, start, write_endpoint

from strop.rollout.weight_sync import store_transport
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import SyncError, SyncIncomplete, SyncReport
from strop.utils.hub.byte_store import ByteStore

__all__ = ["start"]  # the fixture


class Run:
    """A sender and two receivers that meet at a store."""

    def __init__(self, store: str, *, timeout_s: float = 20.0) -> None:
        self.model, self.copies = net(1), [net(100), net(101)]
        self.sender = WeightSender(self.model, bucket_bytes=1024, store=store, timeout_s=timeout_s)
        endpoint = self.sender.open(num_receivers=2)
        assert endpoint is not None
        assert endpoint.memory == ""
        self.receivers = [WeightReceiver(ModuleTarget(copy), timeout_s=timeout_s) for copy in self.copies]
        for index, receiver in enumerate(self.receivers):
            receiver.join(endpoint, index=index)

    def sync(self, version: int) -> list[Any]:
        return side_by_side(
            [lambda: self.sender.send(version), *(lambda r=r: r.receive(version) for r in self.receivers)]
        )

    def synced(self, version: int) -> SyncReport:
        """The sender's report of a sync that brought every bit."""
        results = self.sync(version)
        assert all(isinstance(result, SyncReport) for result in results), results
        assert [bits(copy) for copy in self.copies] == [bits(self.model)] * 2
        assert {result.transport for result in results} == {"store"}
        assert len({(result.digest, result.sent_bytes) for result in results}) == 1
        report: SyncReport = results[0]
        return report

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Files of which the largest tensor, of 1472 bytes, takes several."""
    monkeypatch.setattr(store_transport, "FILE_BYTES", 400)
    one = Run(str(tmp_path / "store"))
    yield one
    one.close()


def test_every_bit_arrives_through_a_folder_and_changes_alone_afterwards(run: Run, tmp_path: Path) -> None:
    first = run.synced(1)
    assert first.sent_bytes >= first.num_bytes
    with torch.no_grad():
        run.model.embed.weight[3, 5] += 1
    second = run.synced(2)
    assert second.sent_bytes == 4 + 2  # an element of float32 and its position
    assert run.synced(3).sent_bytes == 0
    run.close()
    assert list((tmp_path / "store").iterdir()) == []


def test_every_bit_arrives_through_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_transport, "FILE_BYTES", 400)
    one = Run("memory://weights-of-a-test")
    try:
        one.synced(1)
    finally:
        one.close()
    assert fsspec.filesystem("memory").find("/weights-of-a-test") == []


def test_few_buckets_lie_in_the_store_at_a_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    put = ByteStore.put

    def counted(store: ByteStore, name: str, data: bytes) -> None:
        put(store, name, data)
        seen.append({path.name.split("-")[0] for path in (tmp_path / "store").rglob("*/*")})

    monkeypatch.setattr(ByteStore, "put", counted)
    run.synced(1)
    assert len(set.union(*seen)) > 2 * store_transport.NUM_BUCKETS
    assert max(map(len, seen)) == store_transport.NUM_BUCKETS


def test_a_file_that_another_has_written_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ByteStore.get

    def forged(store: ByteStore, name: str, **limit: int) -> bytes | None:
        content = get(store, name, **limit)
        return content if name != "1-0-1" or content is None else bytes(len(content))

    monkeypatch.setattr(ByteStore, "get", forged)
    sent, *received = run.sync(1)
    assert "is not what the sender wrote" in str(sent)
    assert all(isinstance(result, SyncError) for result in received)
    assert any("file 1-0-1 in " in str(result) for result in received)
    assert [receiver.version for receiver in run.receivers] == [None, None]
    monkeypatch.undo()
    run.synced(2)


def test_a_file_that_a_shared_folder_shows_late_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, hidden = ByteStore.get, {"1-0-0": 3, "2-0-1": 2}

    def late(store: ByteStore, name: str, **limit: int) -> bytes | None:
        if hidden.get(name, 0):
            hidden[name] -= 1
            return None if name == "1-0-0" else b"part"
        return get(store, name, **limit)

    monkeypatch.setattr(ByteStore, "get", late)
    run.synced(1)
    assert hidden == {"1-0-0": 0, "2-0-1": 0}


def test_a_receiver_that_sees_another_store_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(str(tmp_path), timeout_s=1.0)
    monkeypatch.setattr(ByteStore, "get", lambda store, name, **limit: None)
    sent, *received = one.sync(1)
    one.close()
    assert isinstance(sent, SyncError)
    assert all(isinstance(result, SyncIncomplete) for result in received)
    assert "both sides must see the same store" in " ".join(map(str, (sent, *received)))


def test_a_receiver_that_waits_for_a_file_hears_that_another_has_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, first = ByteStore.get, threading.Lock()

    def forged_or_hidden(store: ByteStore, name: str, **limit: int) -> bytes | None:
        content = get(store, name, **limit)
        if name != "1-0-0" or content is None:
            return content
        return bytes(len(content)) if first.acquire(blocking=False) else None

    monkeypatch.setattr(ByteStore, "get", forged_or_hidden)
    started = time.monotonic()
    sent, *received = run.sync(1)
    assert time.monotonic() - started < 10, "far less than a wait for a file may take"
    assert "is not what the sender wrote" in str(sent)
    assert all(isinstance(result, SyncError) for result in received)
    monkeypatch.undo()
    run.synced(2)


def test_a_file_that_is_larger_than_announced_is_not_read_whole(tmp_path: Path) -> None:
    store = ByteStore(str(tmp_path / "store"), timeout_s=5)
    store.put("0", bytes(1000))
    assert store.get("0", max_bytes=11) == bytes(11)
    assert store.get("1", max_bytes=11) is None
    memory = ByteStore("memory://large", timeout_s=5)
    memory.put("0", bytes(1000))
    assert memory.get("0", max_bytes=11) == bytes(11)
    memory.remove_all()


def test_a_store_that_takes_nothing_ends_the_sync_and_a_later_one_succeeds(run: Run, tmp_path: Path) -> None:
    tmp_path.joinpath("store").write_text("a file in the way")
    sent, *received = run.sync(1)
    assert isinstance(sent, SyncError)
    assert all(f"the store {tmp_path}/store/strop-weights-" in str(result) for result in (sent, *received))
    tmp_path.joinpath("store").unlink()
    run.synced(1)


def test_a_kind_of_store_that_nobody_knows_is_named_at_once() -> None:
    one = Run("nosuch://bucket/weights")
    sent, *received = one.sync(1)
    one.close()
    for result in (sent, *received):
        assert "nosuch://bucket/weights" in str(result)
        assert "use a kind of URL that fsspec knows" in str(result)


def send_through_a_store(file: Path, store: str) -> None:
    """Two versions from another process."""
    torch.set_num_threads(1)
    model = net(1)
    sender = WeightSender(model, bucket_bytes=1024, store=store, timeout_s=60.0)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    write_endpoint(endpoint, file)
    for version in (1, 2):
        sender.send(version)
        with torch.no_grad():
            model.embed.weight.add_(1.0)
    sender.close()


@pytest.mark.slow
def test_every_bit_arrives_from_another_process(tmp_path: Path, start: Callable[..., Any]) -> None:
    store = tmp_path / "store"
    process = start(send_through_a_store, tmp_path / "endpoint", str(store))
    copy: Net = net(2)
    receiver = WeightReceiver(ModuleTarget(copy), timeout_s=60.0)
    receiver.join(read_endpoint(tmp_path / "endpoint"), index=0)
    expected = net(1)
    for version in (1, 2):
        assert receiver.receive(version).transport == "store"
        assert bits(copy) == bits(expected)
        with torch.no_grad():
            expected.embed.weight.add_(1.0)
    process.join(60)
    receiver.close()
    assert process.exitcode == 0
    assert list(store.iterdir()) == []
