"""A sync between a sender and two receivers, over both transports, and everything that can go wrong with it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rollout.sync_cases import (
    BUCKET_BYTES,
    NUM_TENSORS,
    Net,
    Pair,
    bits,
    connected,
    device_of,
    net,
    side_by_side,
)
from torch import Tensor, nn

from strop.engines.checksum.models import digest_weights
from strop.engines.weights import TensorMetadata, weights_metadata
from strop.rollout.weight_sync import collective, own_parts, sender, shared_memory, slots
from strop.rollout.weight_sync.channel import SenderChannel
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.stream import Announcement
from strop.rollout.weight_sync.types import (
    Endpoint,
    SyncCorrupted,
    SyncError,
    SyncIncomplete,
    SyncRefused,
    SyncReport,
    UnverifiedWeights,
)

TRANSPORTS = ("shared_memory", "collective", "cuda_ipc")
THIRD = "layers.0.weight"
"""First weight of the third bucket."""
REFUSAL = "; the rollout worker keeps refusing to generate until a complete sync arrives"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared files of a test lie in a folder of its own; any file system maps them."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(shared_memory, "FOLDER", path)
    return path


def use(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if transport == "collective":
        monkeypatch.setattr(shared_memory, "FOLDER", Path("/no/such/folder"))


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Pair]:
    use(request.param, monkeypatch)
    yield from connected(device_of=device_of(request.param))


@pytest.fixture
def impatient() -> Iterator[Pair]:
    """Waits of at most two seconds."""
    yield from connected(timeout_s=2.0)


def failures(results: Sequence[Any]) -> list[str]:
    assert all(isinstance(result, SyncError) for result in results), results
    return [str(result) for result in results]


def assert_repaired_by(pair: Pair, version: int) -> None:
    """A sync without faults succeeds now, and its weights are in force."""
    results = pair.sync(version)
    assert all(isinstance(result, SyncReport) for result in results), results
    for receiver, copy in zip(pair.receivers, pair.copies, strict=True):
        assert bits(copy) == bits(pair.model)
        assert receiver.require_verified("x") == version


def assert_unverified(pair: Pair, reason: str) -> None:
    for receiver in pair.receivers:
        assert receiver.version is None
        with pytest.raises(UnverifiedWeights, match=f"^request 7 is refused, .*{re.escape(reason)}"):
            receiver.require_verified("request 7")


class Faults:
    """What a test does to the buckets of the first sync on their way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._announce: Callable[[str, Announcement], list[Announcement]] = lambda name, bucket: [bucket]
        self._data: Callable[[str, Tensor], Tensor] = lambda name, data: data
        self._name = ""  # of the first weight in the bucket
        self._num_syncs = 0
        self._pending: list[Callable[[], None]] = []
        announce = sender._Session._announce
        faults = self

        def announced(session: sender._Session, bucket: Announcement) -> None:
            faults._name = bucket.entries[0][0].name
            faults._num_syncs += faults._name == "norm"
            changed = faults._announce(faults._name, bucket) if faults._num_syncs == 1 else [bucket]
            faults._pending = [partial(announce, session, one) for one in changed]

        monkeypatch.setattr(sender._Session, "_announce", announced)
        for kind in (slots.SlotSender, collective.CollectiveSender):
            monkeypatch.setattr(kind, "send", self._sending(kind.send))

    def _sending(self, send: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def sent(transport: Any, given: Tensor | list[Tensor]) -> None:
            data = torch.cat(given) if isinstance(given, list) else given
            for announce in self._pending:
                changed = self._data(self._name, data) if self._num_syncs == 1 else data
                if isinstance(given, list):
                    announce()
                    send(transport, list(changed.split([len(content) for content in given])))
                else:
                    changed = transport.room(len(data)).copy_(changed)
                    announce()
                    send(transport, changed)

        return sent

    def change_announcement(self, change: Callable[[str, Announcement], list[Announcement]]) -> None:
        self._announce = change

    def change_data(self, change: Callable[[str, Tensor], Tensor]) -> None:
        self._data = change


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_every_bit_arrives_in_two_syncs_in_a_row(pair: Pair, request: pytest.FixtureRequest) -> None:
    for version in (3, 4):
        results = pair.sync(version)
        assert [bits(copy) for copy in pair.copies] == [bits(pair.model)] * 2
        for report in results:
            assert isinstance(report, SyncReport), report
            assert (report.version, report.num_tensors) == (version, NUM_TENSORS)
            assert report.num_bytes == sum(t.numel() * t.element_size() for t in stored(pair.model))
            assert report.digest == digest_weights(pair.model)
            assert report.transport == request.node.callspec.params["pair"]
        with torch.no_grad():
            pair.model.embed.weight.add_(1.0)
    assert [receiver.version for receiver in pair.receivers] == [4, 4]


def stored(model: Net) -> list[Tensor]:
    """The tensors that are saved with a model, each once."""
    return [*model.parameters(), model.steps]


def test_parameters_stay_the_same_objects(pair: Pair) -> None:
    before = [id(p) for copy in pair.copies for p in copy.parameters()]
    pair.sync(1)
    assert [id(p) for copy in pair.copies for p in copy.parameters()] == before
    assert all(copy.head.weight is copy.embed.weight for copy in pair.copies)


def test_nothing_is_verified_before_the_first_sync(pair: Pair) -> None:
    assert_unverified(pair, "no weights have arrived yet")


def test_a_dropped_bucket_is_named_and_a_later_sync_repairs_it(pair: Pair, faults: Faults) -> None:
    # Buckets hold norm, scale and steps; the embedding (1472 bytes; in shared memory two of them); layers.0.weight
    # (1024); the rest.
    faults.change_announcement(lambda name, bucket: [] if name == THIRD else [bucket])
    whole = f"sync 12 incomplete: 1 of {NUM_TENSORS} tensors missing (layers.0.weight){REFUSAL}"
    first, *others = failures(pair.sync(12))
    assert others == [whole, whole]
    assert re.fullmatch(f"sync 12 failed at rollout worker [01]: {re.escape(whole)}", first)
    assert_unverified(pair, whole)
    assert_repaired_by(pair, 12)


def test_missing_tensors_are_counted_and_the_first_ones_named(pair: Pair, faults: Faults) -> None:
    def only_the_first(name: str, bucket: Announcement) -> list[Announcement]:
        return [replace(bucket, entries=bucket.entries[:1])]

    faults.change_announcement(only_the_first)
    _, *results = pair.sync(12)
    assert all(isinstance(result, SyncIncomplete) for result in results)
    # Four buckets keep norm, embed, layers.0.weight and layers.0.bias.
    whole = f"sync 12 incomplete: 6 of 10 tensors missing (scale, steps, layers.1.weight, …){REFUSAL}"
    assert failures(results) == [whole, whole]


def test_one_flipped_bit_is_found_and_named(pair: Pair, faults: Faults) -> None:
    def flipped(name: str, data: Tensor) -> Tensor:
        if name != THIRD:
            return data
        data = data.clone()
        data[77] ^= 16
        return data

    faults.change_data(flipped)
    _, *results = pair.sync(12)
    assert all(isinstance(result, SyncCorrupted) for result in results)
    whole = f"sync 12 corrupted: layers.0.weight differs from its digest{REFUSAL}"
    assert failures(results) == [whole, whole]
    assert_unverified(pair, whole)
    assert_repaired_by(pair, 13)


def renamed(bucket: Announcement, **changes: Any) -> Announcement:
    (weight, offset), *others = bucket.entries
    return replace(bucket, entries=((replace(weight, **changes), offset), *others))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, bucket: [bucket, bucket] if name == THIRD else [bucket],
            r"sync 5 corrupted: layers.0.weight arrived twice, in buckets (2 and 3|3 and 4)",
        ),
        (
            lambda name, bucket: [renamed(bucket, name="layers.9.weight")] if name == THIRD else [bucket],
            r"sync 5 corrupted: bucket [23] holds layers.9.weight, which the sync did not announce",
        ),
        (
            lambda name, bucket: [renamed(bucket, shape=(8, 32))] if name == THIRD else [bucket],
            r"sync 5 corrupted: layers.0.weight arrived as \[8, 32\] torch.float32, but \[16, 16\] torch.float32 was",
        ),
        (
            lambda name, bucket: (
                [replace(bucket, entries=((bucket.entries[0][0], 64),))] if name == THIRD else [bucket]
            ),
            r"sync 5 corrupted: layers.0.weight does not lie within bucket [23] of 1024 bytes",
        ),
    ],
)
def test_buckets_that_do_not_fit_the_announcement_are_refused(
    pair: Pair, faults: Faults, change: Callable[[str, Announcement], list[Announcement]], message: str
) -> None:
    faults.change_announcement(change)
    _, *results = pair.sync(5)
    for failure in failures(results):
        assert re.match(message, failure)
        assert failure.endswith(REFUSAL)
    assert_repaired_by(pair, 5)


def test_versions_never_go_backwards_and_the_newer_one_stays_in_force(pair: Pair) -> None:
    assert_repaired_by(pair, 7)
    held = bits(pair.copies[0])
    with torch.no_grad():
        pair.model.embed.weight.add_(1.0)
    messages = failures(pair.sync(6))
    expected = "sync 6 refused: it goes backwards, the rollout worker has begun sync 7; versions only grow"
    assert re.fullmatch(f"sync 6 failed at rollout worker [01]: {re.escape(expected)}", messages[0])
    told = "sync 6 did not begin: the sender gave up: it failed at rollout worker"  # for the slower one
    assert all(message == expected or message.startswith(told) for message in messages[1:])
    assert [receiver.version for receiver in pair.receivers] == [7, 7]
    assert bits(pair.copies[0]) == held
    assert_repaired_by(pair, 7)  # the same version again is no step backwards


def test_a_receiver_that_expects_another_version_refuses(pair: Pair) -> None:
    results = pair.sync(3, expected=[3, 4])
    assert "rollout worker 1: sync 3 refused: the rollout worker expects version 4" in str(results[0])
    assert "the sender gave up: it failed at rollout worker 1: sync 3 refused" in str(results[1])
    assert isinstance(results[2], SyncRefused)
    assert_repaired_by(pair, 4)


class Untied(Net):
    """The same names, but the head is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(23, 16))


def wider() -> Net:
    model = net(5)
    model.layers[1] = nn.Linear(16, 8)
    return model


def doubled() -> Net:
    model = net(5)
    model.layers[1].double()
    return model


def shorter() -> Net:
    model = net(5)
    del model.layers[2]
    return model


def longer() -> Net:
    model = net(5)
    model.layers.append(nn.Linear(16, 2))
    return model


@pytest.mark.parametrize(
    ("trained", "held", "message"),
    [
        (
            net,
            wider,
            "sync 1 refused: layers.1.weight has shape [7, 16] in the trainer and [8, 16] in the rollout",
        ),
        (
            net,
            doubled,
            "sync 1 refused: layers.1.weight has dtype torch.float32 in the trainer and torch.float64 in",
        ),
        (net, shorter, "sync 1 refused: the rollout worker's model has no layers.2.weight"),
        (
            net,
            longer,
            "sync 1 incomplete: 2 of 12 tensors missing (layers.3.weight, layers.3.bias) in the trainer's model; the",
        ),
        (
            lambda seed: Untied(),
            lambda: net(5),
            "sync 1 refused: embed.weight and head.weight are two tensors in the trainer and one (tied) in the rollout",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_overwritten(
    trained: Callable[[int], Net], held: Callable[[], Net], message: str
) -> None:
    copy = held()
    before = bits(copy)
    with_sender = WeightSender(trained(1), timeout_s=20.0)
    endpoint = with_sender.open(num_receivers=1)
    assert endpoint is not None
    receiver = WeightReceiver(ModuleTarget(copy), timeout_s=20.0)
    receiver.join(endpoint, index=0)
    sent, received = side_by_side([lambda: with_sender.send(1), lambda: receiver.receive(1)])
    with_sender.close()
    assert message in str(received)
    assert message in str(sent)
    assert bits(copy) == before
    assert receiver.version is None


def one_sync(model: nn.Module, receiver: WeightReceiver, **options: Any) -> list[Any]:
    """The report or error of each side of one sync to version 1."""
    sending = WeightSender(model, timeout_s=20.0, **options)
    endpoint = sending.open(num_receivers=1)
    assert endpoint is not None
    receiver.join(endpoint, index=0)
    try:
        return side_by_side([lambda: sending.send(1), lambda: receiver.receive(1)])
    finally:
        sending.close()


def test_a_copy_that_is_not_tied_gets_the_tied_tensor_under_both_names() -> None:
    copy = Untied()
    results = one_sync(net(1), WeightReceiver(ModuleTarget(copy)))
    assert all(isinstance(result, SyncReport) for result in results), results
    assert bits(copy) == bits(net(1))
    assert copy.head.weight is not copy.embed.weight


class KeepsOldHead(ModuleTarget):
    """An engine that ties the head by a copy made when it started, as one that was seen in use."""

    def __init__(self, module: Net) -> None:
        super().__init__(module)
        self._old = module.head.weight.detach().clone()
        self._module = module

    def digests(self, names: Sequence[str]) -> dict[str, int]:
        tied, self._module.head.weight = self._module.head.weight, nn.Parameter(self._old)
        try:
            return super().digests(names)
        finally:
            self._module.head.weight = tied


def test_an_engine_that_keeps_an_old_copy_of_a_tied_head_is_found_out() -> None:
    receiver = WeightReceiver(KeepsOldHead(net(2)))
    _, error = one_sync(net(1), receiver)
    assert isinstance(error, SyncCorrupted)
    assert str(error) == (
        f"sync 1 corrupted: head.weight (tied to embed.weight, of which the engine keeps another copy) differs from "
        f"its digest{REFUSAL}"
    )
    assert receiver.version is None


def test_weights_are_cast_for_a_copy_in_another_precision() -> None:
    class Half(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3).to(dtype)
            self.register_buffer("steps", torch.ones(2, dtype=torch.int64))

    model, copy = Half(torch.float32), Half(torch.bfloat16)
    dtypes = weights_metadata(copy).dtypes
    results = one_sync(model, WeightReceiver(ModuleTarget(copy)), dtypes=dtypes)
    assert all(isinstance(result, SyncReport) for result in results), results
    assert torch.equal(copy.linear.weight, model.linear.weight.bfloat16())


def test_merged_weights_are_sent_in_place_of_the_models_own() -> None:
    model, copy = net(1), net(2)
    receiver = WeightReceiver(ModuleTarget(copy))
    sending = WeightSender(model, timeout_s=20.0)
    endpoint = sending.open(num_receivers=1)
    assert endpoint is not None
    receiver.join(endpoint, index=0)
    names = [name for name in model.state_dict() if name != "head.weight"]
    merged = ((name, model.state_dict()[name] + 1) for name in names)
    results = side_by_side([lambda: sending.send(1, merged), lambda: receiver.receive(1)])
    sending.close()
    assert all(isinstance(result, SyncReport) for result in results), results
    assert all(torch.equal(copy.state_dict()[name], model.state_dict()[name] + 1) for name in names)


def test_an_error_of_the_sender_reaches_every_receiver_and_is_no_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    fetch = own_parts.next_weight

    def breaking(source: Iterator[tuple[str, Tensor]], weight: TensorMetadata) -> Tensor:
        if weight.name == THIRD:
            monkeypatch.setattr(own_parts, "next_weight", fetch)
            raise RuntimeError("out of memory in the gather")
        return fetch(source, weight)

    monkeypatch.setattr(own_parts, "next_weight", breaking)
    first, *others = pair.sync(2)
    assert str(first) == "out of memory in the gather"
    is_network = request.node.callspec.params["pair"] == "collective"
    for message in failures(others):
        # Over the network the embedding waits until later buckets are announced.
        names = "7 of 10 tensors missing (embed.weight, " if is_network else "6 of 10 tensors missing ("
        assert message.startswith(f"sync 2 incomplete: {names}layers.0.weight, layers.0.bias")
        assert "when it ended (the sender gave up: out of memory in the gather)" in message
    assert_repaired_by(pair, 2)


def test_an_error_of_a_receiver_is_named_by_the_sender_and_is_no_end(pair: Pair) -> None:
    target = pair.receivers[1]._target
    load = target.load

    def failing(tensors: Sequence[tuple[str, Tensor]]) -> None:
        target.load = load  # type: ignore[method-assign]
        raise RuntimeError("no device")

    target.load = failing  # type: ignore[method-assign]
    started = time.monotonic()
    results = pair.sync(2)
    assert time.monotonic() - started < 15.0, "nobody waits for a deadline"
    assert "rollout worker 1: no device" in str(results[0])
    assert isinstance(results[1], SyncIncomplete)
    assert "the sender gave up: " in str(results[1])
    assert "rollout worker 1: no device" in str(results[1])
    assert str(results[2]) == "no device"
    assert pair.receivers[1].version is None
    assert_repaired_by(pair, 2)


def test_a_slow_receiver_is_not_overtaken(pair: Pair) -> None:
    target = pair.receivers[0]._target
    load = target.load

    def slow(tensors: Sequence[tuple[str, Tensor]]) -> None:
        target.load = load  # type: ignore[method-assign]
        time.sleep(0.3)  # time for everything else, if nobody waited
        load(tensors)

    target.load = slow  # type: ignore[method-assign]
    assert_repaired_by(pair, 1)


def test_a_worker_that_never_joins_is_named_after_the_deadline() -> None:
    sending = WeightSender(net(1), timeout_s=0.5)
    endpoint = sending.open(num_receivers=2)
    assert endpoint is not None
    receiver = WeightReceiver(ModuleTarget(net(2)), timeout_s=1.0)
    receiver.join(endpoint, index=0)
    with pytest.raises(
        SyncError, match=r"^sync 1 stopped: waited 0.5 s for rollout worker 1 to join the weight sync$"
    ):
        sending.send(1)
    sending.close()


def test_a_worker_that_does_not_take_part_is_named_after_the_deadline(impatient: Pair) -> None:
    first = impatient.receivers[0]
    results = side_by_side([lambda: impatient.sender.send(1), lambda: first.receive(1)])
    assert str(results[0]) == "sync 1 stopped: waited 2 s for rollout worker 1 to be ready for sync 1"
    assert isinstance(results[1], SyncIncomplete)
    assert_repaired_by(impatient, 2)  # the second one passes over the version that it missed


def test_a_version_that_was_given_up_is_not_waited_for(impatient: Pair) -> None:
    first, second = impatient.receivers
    side_by_side([lambda: impatient.sender.send(1), lambda: first.receive(1)])
    with pytest.raises(
        SyncIncomplete, match="^sync 1 did not begin: the sender gave up: waited 2 s for rollout"
    ):
        second.receive(1)
    assert_repaired_by(impatient, 1)


def test_a_receiver_that_refuses_keeps_its_version_and_nobody_waits_for_it(pair: Pair) -> None:
    assert_repaired_by(pair, 1)
    first, second = pair.receivers
    results = side_by_side(
        [lambda: pair.sender.send(2), lambda: first.receive(2), lambda: second.refuse(2, "it is busy")]
    )
    assert str(results[0]) == "sync 2 failed at rollout worker 1: sync 2 refused: it is busy"
    assert "the sender gave up" in str(results[1])
    assert str(results[2]) == "sync 2 refused: it is busy"
    assert second.version == 1
    assert_repaired_by(pair, 2)


def test_a_sync_that_never_begins_is_named_after_the_deadline(impatient: Pair) -> None:
    receiver = impatient.receivers[0]
    with pytest.raises(SyncIncomplete, match=r"^sync 4 did not begin: waited 2 s for sync 4 to begin$"):
        receiver.receive(4)
    assert_repaired_by(impatient, 4)


def test_a_sender_that_has_closed_is_named(pair: Pair) -> None:
    pair.sync(1)
    pair.sender.close()
    with pytest.raises(
        SyncIncomplete, match="sync 2 did not begin: the weight sender at 127.0.0.1 port .* is gone"
    ):
        pair.receivers[0].receive(2)


def test_a_worker_that_starts_again_takes_its_place(pair: Pair) -> None:
    pair.sync(1)
    assert pair.sender._session is not None
    endpoint = pair.sender._session.endpoint
    pair.receivers[1].close()
    pair.copies[1] = net(55)
    pair.receivers[1] = WeightReceiver(ModuleTarget(pair.copies[1]), timeout_s=20.0)
    pair.receivers[1].join(endpoint, index=1)
    assert pair.receivers[1].version is None
    assert_repaired_by(pair, 2)


def test_whoever_does_not_know_the_secret_is_cut_off(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    assert pair.sender._session is not None
    endpoint = pair.sender._session.endpoint
    stranger = WeightReceiver(ModuleTarget(net(3)), timeout_s=0.5)
    with pytest.raises(ConnectionError, match="the weight sender .* does not answer"):
        stranger.join(replace(endpoint, session="5e" * 32), index=0)
    assert_repaired_by(pair, 1)
    assert "turned away at the weight sync (it does not know the secret)" in caplog.text


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


NOISE = {
    "brackets": frame(b"[" * 4096),
    "a length without end": b"\xff" * 100,
    "a receiver's own words": frame(b'{"index": 0, "session": ""}'),
    "one byte": b"\0",
    "nothing": b"",
}
"""What strangers say; the first one ended a run."""


def test_strangers_in_the_middle_of_a_transfer_change_nothing(pair: Pair, faults: Faults) -> None:
    assert pair.sender._session is not None
    endpoint = pair.sender._session.endpoint
    strangers: list[socket.socket] = []

    def come(name: str, bucket: Announcement) -> list[Announcement]:
        transport = pair.sender._session._choice._transport  # type: ignore[union-attr]
        for port in {endpoint.port, transport.plan.port} - {0}:  # type: ignore[union-attr]
            for said in NOISE.values():
                strangers.append(socket.create_connection((endpoint.host, port)))
                strangers[-1].sendall(said)
        return [bucket]

    faults.change_announcement(come)
    assert_repaired_by(pair, 1)
    assert len(strangers) > len(NOISE)
    for one in strangers:
        one.close()
    assert_repaired_by(pair, 2)


def test_calls_in_the_wrong_order_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"not open; call open\(num_receivers=\.\.\.\) first"):
        WeightSender(net(1)).send(1)
    with pytest.raises(ValueError, match=r"has not joined a weight sync; call join\(endpoint\) first"):
        WeightReceiver(ModuleTarget(net(1))).receive(1)
    with pytest.raises(ValueError, match="a weight sync to 0 rollout workers"):
        WeightSender(net(1)).open(num_receivers=0)
    with pytest.raises(
        ValueError, match="cannot listen on 203.0.113.7 .*give an address of the actor's node"
    ):
        WeightSender(net(1)).open(num_receivers=1, host="203.0.113.7")
    endpoint = Endpoint(host="127.0.0.1", port=1, session="x", memory="", num_receivers=2)
    with pytest.raises(ValueError, match="rollout worker 2 joins a weight sync of 2, counted from 0"):
        WeightReceiver(ModuleTarget(net(1))).join(endpoint, index=2)
    with pytest.raises(ConnectionError, match="the weight sender at 127.0.0.1 port 1 does not answer"):
        WeightReceiver(ModuleTarget(net(1)), timeout_s=1.0).join(endpoint, index=1)


def listening() -> list[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.fixture
def others_listening() -> list[tuple[str, int]]:
    """What this process listened on before the sender did: a Ray cluster's ports, for one."""
    return listening()


def test_the_sender_listens_on_its_address_only(others_listening: list[tuple[str, int]], pair: Pair) -> None:
    assert pair.sender._session is not None
    assert ("127.0.0.1", pair.sender._session.endpoint.port) in listening()
    assert_repaired_by(pair, 1)
    opened = set(listening()) - set(others_listening)
    assert {address for address, _ in opened} == {"127.0.0.1"}, "the group listens there too"


def test_the_shared_file_has_no_name_once_everybody_has_mapped_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = connected()
    pair = next(pairs)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600, "nobody else reads the weights"
    assert file.stat().st_mode & 0o777 == 0o600
    pair.sync(1)
    assert list(folder.iterdir()) == []
    assert_repaired_by(pair, 2)
    pairs.close()


def test_shared_memory_is_no_larger_than_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    reserve = shared_memory.os.posix_fallocate

    def recorded(file: int, start: int, size: int) -> None:
        reserved.append(size)
        reserve(file, start, size)

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", recorded)
    results = one_sync(net(1), WeightReceiver(ModuleTarget(net(2))))  # buckets of 256 MiB
    assert all(isinstance(result, SyncReport) for result in results), results
    assert len(reserved) == 1
    assert reserved[0] < 20_000


def test_files_of_dead_senders_are_removed_and_those_of_living_ones_kept(folder: Path) -> None:
    stale, living = folder / f"{shared_memory.PREFIX}stale", folder / f"{shared_memory.PREFIX}living"
    other = folder / "other"
    for path in (stale, living, other):
        path.write_bytes(b"x")
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        sending = WeightSender(net(1))
        sending.open(num_receivers=1)
        assert {living, other} < set(folder.iterdir())
        assert stale not in set(folder.iterdir())
        sending.close()
        assert set(folder.iterdir()) == {living, other}


def test_a_receiver_that_sees_another_memory_gets_its_weights_by_broadcast(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = shared_memory.shares_memory
    answers = iter([True, False])
    monkeypatch.setattr(
        "strop.rollout.weight_sync.receiver.shares_memory",
        lambda path, session: seen(path, session) and next(answers),
    )
    pairs = connected()
    pair = next(pairs)
    results = pair.sync(1)
    assert [result.transport for result in results if isinstance(result, SyncReport)] == ["collective"] * 3
    assert list(folder.iterdir()) == []
    pairs.close()


def test_memory_without_room_is_reported_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    pairs = connected()
    pair = next(pairs)
    with caplog.at_level(logging.WARNING, logger="strop.rollout.weight_sync.sender"):
        results = pair.sync(1)
    assert [result.transport for result in results if isinstance(result, SyncReport)] == ["collective"] * 3
    assert "has no room for two buckets of 1024 bytes ([Errno 28] No space left on device)" in caplog.text
    pairs.close()


def test_what_others_put_into_the_folder_for_shared_memory_stops_nobody(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / f"{shared_memory.PREFIX}pipe", 0o666)
    (tmp_path / "theirs").write_text("x")
    (folder / f"{shared_memory.PREFIX}link").symlink_to(tmp_path / "theirs")
    (folder / f"{shared_memory.PREFIX}folder").mkdir()
    pairs = connected()
    assert_repaired_by(next(pairs), 1)
    assert (tmp_path / "theirs").exists()
    assert not shared_memory.shares_memory(folder / f"{shared_memory.PREFIX}link", "x")
    pairs.close()


def test_a_file_of_another_session_is_not_mapped(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"another".ljust(4096, b"\0"))
    assert not shared_memory.shares_memory(path, "this one")
    assert shared_memory.shares_memory(path, "another")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert not shared_memory.shares_memory(path, "another")


def test_a_sharded_model_cannot_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(Tensor):
        pass

    monkeypatch.setattr("strop.rollout.weight_sync.model_target.DTensor", Sharded)
    module = nn.Linear(2, 2)
    module.register_buffer("shard", torch.zeros(2).as_subclass(Sharded))
    with pytest.raises(
        ValueError, match="shard is sharded over ranks; weights are received by a model that is whole"
    ):
        ModuleTarget(module)


def test_live_weights_are_read_again_after_loading() -> None:
    """A target whose load does nothing is found out, whatever arrived."""

    class Deaf(ModuleTarget):
        def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
            pass

    _, error = one_sync(net(1), WeightReceiver(Deaf(net(2))))
    assert isinstance(error, SyncCorrupted)
    assert re.match(
        r"sync 1 corrupted: norm, scale, steps, … differ from their digests;",
        str(error),
    )


def change_commit(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    tell = SenderChannel.tell

    def told(channel: SenderChannel, kind: str, **content: Any) -> None:
        if kind == "commit":
            change(content)
        tell(channel, kind, **content)

    monkeypatch.setattr(SenderChannel, "tell", told)


def test_a_tensor_whose_digest_is_not_told_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    change_commit(monkeypatch, lambda content: content["digests"].pop("norm"))
    _, error = one_sync(net(1), WeightReceiver(ModuleTarget(net(2))))
    assert "sync 1 corrupted: norm differs from its digest" in str(error)


def test_the_digest_of_all_weights_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    change_commit(monkeypatch, lambda content: content.update(digest="5e" * 32))
    _, error = one_sync(net(1), WeightReceiver(ModuleTarget(net(2))))
    assert "sync 1 corrupted: the digest of all weights is" in str(error)


def test_a_weight_knows_its_bytes() -> None:
    assert TensorMetadata(name="w", shape=(3, 5), dtype=torch.bfloat16).num_bytes == 30


class WholeTensors:
    """A target that takes tensors whole, as vLLM and SGLang do."""

    def __init__(self, module: nn.Module) -> None:
        inner = ModuleTarget(module)
        self.weights_metadata, self.digests = inner.weights_metadata, inner.digests
        self._load = inner.load
        self.shapes: dict[str, tuple[int, ...]] = {}

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.shapes |= {name: tuple(tensor.shape) for name, tensor in tensors}
        self._load(tensors)


def test_a_target_that_takes_whole_tensors_gets_those_that_came_in_parts() -> None:
    model, copy = net(1), net(2)
    target = WholeTensors(copy)
    sending = WeightSender(model, bucket_bytes=BUCKET_BYTES, timeout_s=20.0)
    endpoint = sending.open(num_receivers=1)
    assert endpoint is not None
    receiver = WeightReceiver(target, timeout_s=20.0)
    receiver.join(endpoint, index=0)
    results = side_by_side([lambda: sending.send(1), lambda: receiver.receive(1)])
    sending.close()
    assert [result.transport for result in results] == ["shared_memory"] * 2
    assert bits(copy) == bits(model)
    assert target.shapes["embed.weight"] == (23, 16)
    assert len(target.shapes) == NUM_TENSORS


def test_parts_that_come_in_the_wrong_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = SenderChannel.tell

    def told(channel: SenderChannel, kind: str, **content: Any) -> None:
        if content.get("start"):
            content["start"] -= 8
        tell(channel, kind, **content)

    monkeypatch.setattr(SenderChannel, "tell", told)
    pairs = connected()
    _, *others = next(pairs).sync(1)
    pairs.close()
    for failure in failures(others):
        assert (
            "bucket 2 holds bytes 1016 to 1464 of embed.weight, which has 1472, and 1024 have arrived"
            in failure
        )


# Only what changed, over the network.


def sent_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that travel from now on, each once."""
    names: list[str] = []
    announce = sender._Session._announce

    def announced(session: sender._Session, bucket: Announcement) -> None:
        names.extend(weight.name for weight, _ in bucket.entries if not bucket.start)
        announce(session, bucket)

    monkeypatch.setattr(sender._Session, "_announce", announced)
    return names


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    use("collective", monkeypatch)
    yield from connected()


def test_only_what_changed_travels_over_the_network(far: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sent_names(monkeypatch)
    assert_repaired_by(far, 1)
    assert len(names) == NUM_TENSORS
    del names[:]
    with torch.no_grad():
        far.model.layers[1].weight[3, 2] += 1
        far.model.norm[4] = -0.0
    assert_repaired_by(far, 2)
    assert names == ["norm", "layers.1.weight"]
    del names[:]
    assert_repaired_by(far, 3)
    assert names == []


@pytest.mark.parametrize("fails", [False, True])
def test_between_two_syncs_the_sender_holds_no_memory_of_buckets(
    far: Pair, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    held: list[tuple[collective.CollectiveSender, int]] = []
    send = collective.CollectiveSender.send

    def noted(transport: collective.CollectiveSender, contents: Sequence[Tensor]) -> None:
        send(transport, contents)
        held.append((transport, staged(transport)))
        if fails:
            raise ConnectionError("the network is gone")

    def staged(transport: collective.CollectiveSender) -> int:
        return sum(len(memory._data) for memory in transport._staging)

    monkeypatch.setattr(collective.CollectiveSender, "send", noted)
    results = far.sync(1)
    assert isinstance(results[0], SyncError if fails else SyncReport)
    transport, while_sending = held[-1]
    assert while_sending > 0
    assert staged(transport) == 0


def test_a_worker_without_the_last_version_gets_everything(
    far: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sent_names(monkeypatch)
    assert_repaired_by(far, 1)
    far.receivers[1]._digest = "of other weights"
    del names[:]
    assert_repaired_by(far, 2)
    assert len(names) == NUM_TENSORS
    assert far.sender._session is not None
    far.receivers[0].join(far.sender._session.endpoint, index=0)  # as a process that has started again
    far.receivers[0]._version = None
    for parameter in far.copies[0].parameters():
        parameter.data.zero_()
    del names[:]
    assert_repaired_by(far, 3)
    assert len(names) == NUM_TENSORS


def test_weights_that_were_changed_in_the_worker_are_found_though_they_do_not_travel(far: Pair) -> None:
    assert_repaired_by(far, 1)
    with torch.no_grad():
        far.copies[0].layers[0].bias[1] += 1
    results = far.sync(2)
    assert "layers.0.bias differs from its digest" in str(results[1])
    assert far.receivers[0].version is None
    assert_repaired_by(far, 3)  # everything travels again


def test_a_weight_that_was_neither_sent_nor_known_is_missed(
    far: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leaves weights out for a worker that has said it lacks them."""
    change_commit(monkeypatch, lambda content: content.update(unchanged=["norm"]))
    monkeypatch.setattr(sender._Session, "_announce", lambda session, bucket: None)
    monkeypatch.setattr(collective.CollectiveSender, "send", lambda transport, data: None)
    _, *others = far.sync(1)
    for failure in failures(others):
        assert "10 of 10 tensors missing" in failure
