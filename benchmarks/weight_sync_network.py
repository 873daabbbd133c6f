"""Weights over the network from 1, 2 and 4 ranks of an actor, each with its shards, beside plain gloo.

    make bench BENCH=weight_sync_network ARGS="--megabytes 96"

prints one JSON line. All processes are on this machine and have one thread; one receives, and the link is loopback.
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
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch.distributed.fsdp import fully_shard
from weight_sync import model

from strop.controller.store_server import Rendezvous, RendezvousServer
from strop.engines.parallel.process_group import join_ranks
from strop.rollout.weight_sync import shared_memory
from strop.rollout.weight_sync.collective import CollectiveReceiver, CollectiveSender, _Group
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender

NUM_SENDERS = (1, 2, 4)
TIMEOUT_S = 120.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--bucket-megabytes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    num_bytes = sum(p.nbytes for p in model(arguments.megabytes << 20).parameters())
    print(
        json.dumps(
            {
                "name": "weight_sync_network",
                "bytes": num_bytes,
                "bucket_bytes": arguments.bucket_megabytes << 20,
                "senders": {
                    num_senders: measured(
                        num_senders, arguments.megabytes, arguments.bucket_megabytes, arguments.repeats
                    )
                    for num_senders in NUM_SENDERS
                },
                **machine(),
            }
        )
    )


def measured(num_senders: int, megabytes: int, bucket_megabytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of a sync and of the link, and what came of them."""
    context = multiprocessing.get_context("spawn")
    place = RendezvousServer("127.0.0.1")
    processes, connections = [], []
    for rank in range(num_senders + 1):
        ours, theirs = context.Pipe()
        work = receive if rank == num_senders else send
        arguments = (theirs, rank, num_senders, place.rendezvous, megabytes << 20, bucket_megabytes << 20)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        connections.append(ours)
    connections[-1].send(connections[0].recv())  # the endpoint
    for connection in connections:
        connection.recv()  # joined
    times: dict[str, list[tuple[float, float]]] = {"sync": [], "link": []}
    sent: list[int] = []
    for version in range(repeats + 1):
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
    wall = {kind: min(seconds for seconds, _ in pairs[1:]) for kind, pairs in times.items()}
    cpu = {kind: min(seconds for _, seconds in pairs[1:]) for kind, pairs in times.items()}
    return {
        "seconds": {kind: round(value, 3) for kind, value in wall.items()},
        "cpu_seconds": {kind: round(value, 3) for kind, value in cpu.items()},
        "share_of_link": round(wall["link"] / wall["sync"], 2),
        "share_of_link_cpu": round(cpu["link"] / cpu["sync"], 2),
        "sent_bytes": sent,
    }


def send(
    connection: Connection,
    rank: int,
    num_senders: int,
    rendezvous: Rendezvous,
    num_bytes: int,
    bucket_bytes: int,
) -> None:
    """A rank of the actor."""
    begin()
    parallel = join_ranks(
        rank=rank, world_size=num_senders, rendezvous=rendezvous, device="cpu", timeout_s=TIMEOUT_S
    )
    trained = model(num_bytes)
    if num_senders > 1:
        for layer in trained:
            fully_shard(layer, mesh=parallel.mesh)
    sender = WeightSender(trained, rank=rank, bucket_bytes=bucket_bytes)
    endpoint = sender.open(num_receivers=1)
    if endpoint is not None:
        connection.send(endpoint)
    connection.send("joined")
    piece = torch.zeros(bucket_bytes // num_senders, dtype=torch.uint8)

    def sync(version: int) -> int:
        return sender.send(version).sent_bytes

    def link(version: int) -> int:
        transport = sender._helper if sender._session is None else sender._session._choice._transport
        assert isinstance(transport, CollectiveSender)
        assert transport._group is not None
        pass_on([transport._group], [piece], num_bytes // num_senders)
        return 0

    def step() -> None:
        with torch.no_grad():
            for parameter in trained.parameters():  # what follows has something to send
                parameter.add_(1)

    serve(connection, {"sync": sync, "link": link}, step)
    sender.close()


def receive(
    connection: Connection,
    rank: int,
    num_senders: int,
    rendezvous: Rendezvous,
    num_bytes: int,
    bucket_bytes: int,
) -> None:
    """The rollout worker."""
    begin()
    receiver = WeightReceiver(ModuleTarget(model(num_bytes)))
    receiver.join(connection.recv(), index=0)
    connection.send("joined")
    buffers = [torch.zeros(bucket_bytes // num_senders, dtype=torch.uint8) for _ in range(num_senders)]

    def sync(version: int) -> int:
        return receiver.receive(version).sent_bytes

    def link(version: int) -> int:
        assert receiver._connection is not None
        transport = receiver._connection._transport
        assert isinstance(transport, CollectiveReceiver)
        pass_on([transport._groups[rank] for rank in range(num_senders)], buffers, num_bytes // num_senders)
        return 0

    serve(connection, {"sync": sync, "link": link}, lambda: None)
    receiver.close()


def begin() -> None:
    """One thread, and no shared memory, which would be used in place of the network."""
    torch.set_num_threads(1)
    shared_memory.FOLDER = Path("/no/such/folder")


def pass_on(groups: list[_Group], buffers: list[torch.Tensor], num_bytes: int) -> None:
    """So many bytes through each group, as much as a buffer holds at a time."""
    for start in range(0, num_bytes, len(buffers[0])):
        for group, buffer in zip(groups, buffers, strict=True):
            group.start(buffer[: num_bytes - start])
        for group in groups:
            group.wait("a piece")


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
