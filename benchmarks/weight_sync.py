"""Weights from one process to another beside a plain copy of the same bytes.

    make bench BENCH=weight_sync ARGS="--megabytes 256"

prints one JSON line. One sender and one receiver on this machine, float32 tensors of a transformer's shapes; per
transport the shortest of several syncs, from begin to verdict: with the digests of every tensor on both sides.

The peers take turns with the syncs: the link, which is the same bytes through the same slots of shared memory between
the same two processes, copied in and copied out, with no digest, no name and no verdict; and a copy of the same bytes
within one process, with as many threads as each side has. `share_of_link` and `share_of_copy` are the rates of a sync
over theirs. The digest is measured alone too, beside SHA-256.

`changes` is about the network: the same number of bytes as bfloat16 values, of which a step changes all, or one in a
hundred. Both kinds of step take turns between the same two processes; bytes are those that went to the receiver.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from machine import machine
from torch import nn

from strop.engines.checksum.host import digest_tensor
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.slots import SlotReceiver, SlotSender
from strop.rollout.weight_sync.types import SyncReport

WIDTH = 1024
TRANSPORTS = ("shared_memory", "collective")
SHARE = 0.01
"""Elements that a small step changes."""


class Layer(nn.Module):
    """The tensors of a decoder layer: 12 * WIDTH**2 weights in matrices, two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norms = nn.Parameter(torch.ones(2, WIDTH))


def model(num_bytes: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """About so many bytes of layers."""
    layer_bytes = dtype.itemsize * 12 * WIDTH**2
    return nn.ModuleList(Layer().to(dtype) for _ in range(max(1, round(num_bytes / layer_bytes))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=192)
    parser.add_argument("--bucket-megabytes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    where = machine()
    torch.manual_seed(0)
    trained = model(arguments.megabytes << 20)
    bucket_bytes = arguments.bucket_megabytes << 20
    num_bytes = sum(p.numel() * p.element_size() for p in trained.parameters())
    digest_s = _best(arguments.repeats, lambda: [digest_tensor(p) for p in trained.parameters()])
    sha_s = _best(1, lambda: [_sha256(p) for p in trained.parameters()])
    found = [_sync(name, trained, bucket_bytes, arguments.repeats) for name in TRANSPORTS]
    seconds = {name: times["sync"] for name, times in zip(TRANSPORTS, found, strict=True)}
    copy_s, link_s = found[0]["copy"], found[0]["link"]
    print(
        json.dumps(
            {
                "name": "weight_sync",
                "bytes": num_bytes,
                "tensors": sum(1 for _ in trained.parameters()),
                "bucket_bytes": bucket_bytes,
                "seconds": {name: round(value, 3) for name, value in seconds.items()},
                "gb_per_s": {name: round(num_bytes / value / 1e9, 2) for name, value in seconds.items()},
                "gb_per_s_link": round(num_bytes / link_s / 1e9, 2),
                "gb_per_s_copy": round(num_bytes / copy_s / 1e9, 2),
                "gb_per_s_digest": round(num_bytes / digest_s / 1e9, 2),
                "gb_per_s_sha256": round(num_bytes / sha_s / 1e9, 2),
                "share_of_link": round(link_s / seconds["shared_memory"], 2),
                "share_of_copy": {name: round(copy_s / value, 2) for name, value in seconds.items()},
                "changes": _changes(arguments.megabytes << 20, bucket_bytes, arguments.repeats),
                "threads": torch.get_num_threads(),
                **where,
            }
        )
    )


def _best(repeats: int, work: Callable[[], object]) -> float:
    """Shortest time of several tries, after one that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _copier(trained: nn.Module) -> Callable[[], object]:
    sources = [p.detach() for p in trained.parameters()]
    targets = [torch.empty_like(p) for p in sources]
    return lambda: [target.copy_(source) for target, source in zip(targets, sources, strict=True)]


def _sha256(parameter: torch.Tensor) -> bytes:
    return hashlib.sha256(parameter.detach().view(-1).view(torch.uint8).numpy().data).digest()


def _sync(transport: str, trained: nn.Module, bucket_bytes: int, repeats: int) -> dict[str, float]:
    """Shortest seconds of a sync and, through shared memory, of the link and of a copy, which take turns."""
    if transport == "collective":
        shared_memory.FOLDER = Path("/no/such/folder")
    sender = WeightSender(trained, bucket_bytes=bucket_bytes)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    num_bytes = sum(p.numel() * p.element_size() for p in trained.parameters())
    process = context.Process(target=_receive, args=(theirs, num_bytes, repeats + 1, transport), daemon=True)
    process.start()
    ours.send(endpoint)
    copier = _copier(trained)
    times: dict[str, list[float]] = {"sync": [], "link": [], "copy": []}
    for version in range(repeats + 1):
        with torch.no_grad():
            for parameter in trained.parameters():  # a sync that follows has something to send
                parameter.add_(1)
        report = sender.send(version)
        assert report.transport == transport
        times["sync"].append(report.seconds)
        assert ours.recv() == report.digest
        if transport == "shared_memory":
            times["link"].append(_through_link(sender, trained, ours))
            times["copy"].append(_best(1, copier))
    process.join()
    sender.close()
    return {name: min(values[1:]) for name, values in times.items() if values}


def _changes(num_bytes: int, bucket_bytes: int, repeats: int) -> dict[str, dict[str, float]]:
    """Shortest seconds, and bytes, of syncs after steps that changed all elements, and after steps that changed few."""
    shared_memory.FOLDER = Path("/no/such/folder")
    trained = model(num_bytes, torch.bfloat16)
    sender = WeightSender(trained, bucket_bytes=bucket_bytes)
    endpoint = sender.open(num_receivers=1)
    assert endpoint is not None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, num_bytes, 2 * repeats + 1, "collective", torch.bfloat16)
    process = context.Process(target=_receive, args=arguments, daemon=True)
    process.start()
    ours.send(endpoint)
    generator = torch.Generator().manual_seed(0)
    sender.send(0)
    ours.recv()
    results: dict[str, list[SyncReport]] = {"all": [], "few": []}
    for version in range(1, 2 * repeats + 1):
        kind = "all" if version % 2 else "few"
        with torch.no_grad():
            for parameter in trained.parameters():
                bits = parameter.view(torch.int16)
                if kind == "all":
                    bits.bitwise_xor_(1)
                else:
                    bits ^= (torch.rand(bits.shape, generator=generator) < SHARE).to(torch.int16)
        results[kind].append(sender.send(version))
        assert ours.recv() == results[kind][-1].digest
    process.join()
    sender.close()
    return {
        kind: {
            "seconds": round(min(report.seconds for report in reports), 3),
            "bytes": reports[-1].sent_bytes,
        }
        for kind, reports in results.items()
    }


def _through_link(sender: WeightSender, trained: nn.Module, other: Connection) -> float:
    """Seconds of the same bytes through the slots of the last sync, with a plain copy on each side."""
    session = sender._session
    assert session is not None
    link = session._choice._transport
    assert isinstance(link, SlotSender)
    session._channel.begin(session._attempt)
    link.begin()
    other.send(None)
    started = time.perf_counter()
    for part in _parts(trained, link.plan.slot_bytes):
        room = link.room(len(part))
        room.copy_(part)
        session._channel.tell("piece")
        link.send(room)
    other.recv()
    return time.perf_counter() - started


def _parts(module: nn.Module, slot_bytes: int) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        yield from torch.split(parameter.detach().view(-1).view(torch.uint8), slot_bytes)


def _receive(
    connection: Connection, num_bytes: int, count: int, transport: str, dtype: torch.dtype = torch.float32
) -> None:
    copy = model(num_bytes, dtype)
    receiver = WeightReceiver(ModuleTarget(copy))
    receiver.join(connection.recv(), index=0)
    for version in range(count):
        connection.send(receiver.receive(version).digest)
        if transport == "shared_memory":
            assert receiver._connection is not None
            link = receiver._connection._transport
            assert isinstance(link, SlotReceiver)
            connection.recv()
            link.begin()
            for part in _parts(copy, link.plan.slot_bytes):
                receiver._connection.channel.next("a piece")
                part.copy_(link.receive(len(part)))
            link.finish()
            connection.send("done")
    receiver.close()


if __name__ == "__main__":
    main()
