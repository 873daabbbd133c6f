"""Weights over the network from 1, 2 and 4 ranks of an actor, each with its shards, beside plain gloo.

    make bench BENCH=weight_sync_network ARGS="--megabytes 96"

prints one JSON line. All processes are on this machine and have one thread; one receives, and the link is loopback, or
with `--rates 10gbit 1gbit` one of each of these rates, between two network namespaces (namespaces.py; as root).
The sync is that of a run over several machines: every value changed, pieces of all ranks in buckets, digests of every
tensor on both sides. It takes turns with the link, which is the same bytes from the same processes over the same
groups, out of one buffer and into another. Of each the shortest wall time of several counts, and the least processor
time of all processes together; `share_of_link` and `share_of_link_cpu` are those of the link over those of a sync.
`sent_bytes` is what each rank has sent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import machine
from namespaces import Link, link
from torch import nn
from torch.distributed.fsdp import fully_shard
from weight_sync import model

from strop.controller.store_server import Rendezvous, RendezvousServer
from strop.engines.parallel.process_group import join_ranks
from strop.engines.weights import weights_metadata
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.broadcast_group import BroadcastGroup
from strop.rollout.weight_sync.collective import CollectiveReceiver, CollectiveSender
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender

NUM_SENDERS = (1, 2, 4)
TIMEOUT_S = 120.0
SENDING, RECEIVING = 0, 1
"""Ends of the link."""
WARM_UP = 2
"""Syncs that are not counted: the first makes the groups, and until the second the sender keeps what it sent."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--bucket-megabytes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--senders", type=int, nargs="+", default=NUM_SENDERS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of what travels")
    parser.add_argument("--rates", nargs="+", default=["loopback"], help="as `tc` writes them: 10gbit")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no link is left behind
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for rate in arguments.rates:
        with nullcontext(None) if rate == "loopback" else link(rate) as way:
            found[rate] = {
                num_senders: measured(
                    Case(
                        way=way,
                        num_senders=num_senders,
                        megabytes=arguments.megabytes,
                        bucket_bytes=arguments.bucket_megabytes << 20,
                        dtype=arguments.dtype,
                    ),
                    arguments.repeats,
                )
                for num_senders in arguments.senders
            }
    print(
        json.dumps(
            {
                "name": "weight_sync_network",
                "dtype": arguments.dtype,
                "bucket_bytes": arguments.bucket_megabytes << 20,
                "senders": found,
                **machine(),
            }
        )
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of sending one model."""

    way: Link | None
    num_senders: int
    megabytes: int
    bucket_bytes: int
    dtype: str

    @property
    def dtype_sent(self) -> torch.dtype:
        """In which the weights leave, and are received."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def host(self) -> str:
        """Address of the senders, as the receiver reaches it."""
        return "127.0.0.1" if self.way is None else self.way.host(SENDING)

    def model(self) -> nn.Module:
        """The actor's, in float32, with as many bytes once it is sent."""
        return model((self.megabytes << 20) * 4 // self.dtype_sent.itemsize)

    def piece_bytes(self, module: nn.Module) -> int:
        """Bytes of a sync that each rank sends."""
        return sum(p.numel() for p in module.parameters()) * self.dtype_sent.itemsize // self.num_senders

    def begin(self, end: int) -> None:
        """One thread, and no shared memory, which would be used in place of the network."""
        if self.way is not None:
            self.way.enter(end)
        torch.set_num_threads(1)
        shared_memory.FOLDER = Path("/no/such/folder")


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Seconds of a sync and of the link, and what came of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "strop.rollout.weight_sync.sender"]
    )  # once for all
    with nullcontext() if case.way is None else case.way.at(SENDING):
        place = RendezvousServer("127.0.0.1")
    processes, connections = [], []
    for rank in range(case.num_senders + 1):
        ours, theirs = context.Pipe()
        work = receive if rank == case.num_senders else send
        processes.append(
            context.Process(target=work, args=(theirs, case, rank, place.rendezvous), daemon=True)
        )
        processes[-1].start()
        theirs.close()  # so that the end of the process is seen here
        connections.append(ours)
    connections[-1].send(connections[0].recv())  # the endpoint
    for connection in connections:
        connection.recv()  # joined
    times: dict[str, list[tuple[float, float]]] = {"sync": [], "link": []}
    sent: list[int] = []
    for version in range(repeats + WARM_UP):
        for kind in ("sync", "link"):
            started = time.perf_counter()
            for connection in connections:
                connection.send((kind, version))
            said = [connection.recv() for connection in connections]
            times[kind].append((time.perf_counter() - started, sum(cpu for cpu, _ in said)))
            sent = [num for _, num in said[:-1]] if kind == "sync" else sent
    for connection in connections:
        connection.send(("end", 0))
    for process in processes:
        process.join()
    place.close()
    wall = {kind: min(seconds for seconds, _ in pairs[WARM_UP:]) for kind, pairs in times.items()}
    cpu = {kind: min(seconds for _, seconds in pairs[WARM_UP:]) for kind, pairs in times.items()}
    num_bytes = sum(sent)
    return {
        "seconds": {kind: round(value, 3) for kind, value in wall.items()},
        "gb_per_s": {kind: round(num_bytes / value / 1e9, 3) for kind, value in wall.items()},
        "cpu_seconds": {kind: round(value, 3) for kind, value in cpu.items()},
        "share_of_link": round(wall["link"] / wall["sync"], 2),
        "share_of_link_cpu": round(cpu["link"] / cpu["sync"], 2),
        "sent_bytes": sent,
    }


def send(connection: Connection, case: Case, rank: int, rendezvous: Rendezvous) -> None:
    """A rank of the actor."""
    case.begin(SENDING)
    parallel = join_ranks(
        rank=rank, world_size=case.num_senders, rendezvous=rendezvous, device="cpu", timeout_s=TIMEOUT_S
    )
    trained = case.model()
    piece_bytes = case.piece_bytes(trained)
    if case.num_senders > 1:
        for layer in trained.children():
            fully_shard(layer, mesh=parallel.mesh)
    dtypes = dict.fromkeys(weights_metadata(trained).dtypes, case.dtype_sent)
    sender = WeightSender(trained, rank=rank, bucket_bytes=case.bucket_bytes, dtypes=dtypes)
    endpoint = sender.open(num_receivers=1, host=case.host)
    if endpoint is not None:
        connection.send(endpoint)
    connection.send("joined")
    piece = torch.zeros(case.bucket_bytes // case.num_senders, dtype=torch.uint8)

    def sync(version: int) -> int:
        return sender.send(version).sent_bytes

    def through_link(version: int) -> int:
        transport = sender._helper if sender._session is None else sender._session._choice._transport
        assert isinstance(transport, CollectiveSender)
        assert transport._group is not None
        pass_on([transport._group], [piece], piece_bytes)
        return 0

    def step() -> None:
        with torch.no_grad():
            for parameter in trained.parameters():  # what follows has something to send
                parameter.add_(1)

    serve(connection, {"sync": sync, "link": through_link}, step)
    sender.close()


def receive(connection: Connection, case: Case, rank: int, rendezvous: Rendezvous) -> None:
    """The rollout worker."""
    case.begin(RECEIVING)
    module = case.model()
    piece_bytes = case.piece_bytes(module)
    receiver = WeightReceiver(ModuleTarget(module.to(case.dtype_sent)))
    receiver.join(connection.recv(), index=0)
    connection.send("joined")
    size = case.bucket_bytes // case.num_senders
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(case.num_senders)]

    def sync(version: int) -> int:
        return receiver.receive(version).sent_bytes

    def through_link(version: int) -> int:
        assert receiver._connection is not None
        transport = receiver._connection._transport
        assert isinstance(transport, CollectiveReceiver)
        pass_on([transport._groups[rank] for rank in range(case.num_senders)], buffers, piece_bytes)
        return 0

    serve(connection, {"sync": sync, "link": through_link}, lambda: None)
    receiver.close()


def pass_on(groups: list[BroadcastGroup], buffers: list[torch.Tensor], num_bytes: int) -> None:
    """So many bytes through each group, as much as a buffer holds at a time; while one is on its way, the next one
    waits behind it."""
    starts = range(0, num_bytes, len(buffers[0]))
    for start in starts:
        for group, buffer in zip(groups, buffers, strict=True):
            group.start(buffer[: num_bytes - start])
            if start:
                group.wait("a piece")
    for group in groups if starts else ():
        group.wait("the last piece")


def serve(connection: Connection, calls: dict[str, Callable[[int], int]], step: Callable[[], None]) -> None:
    """Make the calls that the measuring process asks for, and say what processor time each took."""
    while (asked := connection.recv())[0] != "end":
        started = time.process_time()
        num_bytes = calls[asked[0]](asked[1])
        spent = time.process_time() - started
        connection.send((spent, num_bytes))
        if asked[0] == "link":
            step()


if __name__ == "__main__":
    main()
