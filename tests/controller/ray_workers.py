"""Workers for the tests of the Ray runtime, in a module that worker processes can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strop.controller import BatchAndMetrics, Dispatch, Execute, Worker, register, register_dispatch_mode
from strop.controller.errors import FollowerLost
from strop.controller.worker import Follower, FollowerAddress
from strop.protocol import DataProto, jagged

CPUS = 0.1
"""Cores per process: the tests start more processes than a small machine has cores."""


def round_robin(group: Any, numbers: list[int]) -> Any:
    return ([numbers[rank :: group.world_size] for rank in range(group.world_size)],), {}


def total(group: Any, outputs: list[int]) -> int:
    return sum(outputs)


register_dispatch_mode("ray_test_round_robin", round_robin, total)


def batch(num_rows: int, *, tokens: int = 3) -> DataProto:
    """Rows of number % tokens + 1 ids, all equal to the row's number."""
    lengths = [number % tokens + 1 for number in range(max(num_rows, 1))]
    data = DataProto.from_dict(
        {
            "ids": jagged([torch.full((length,), number) for number, length in enumerate(lengths)]),
            "scores": torch.arange(len(lengths), dtype=torch.float32),
        },
        {"uid": [f"u{number}" for number in range(len(lengths))]},
        {"temperature": 0.7},
    )
    return data[:num_rows]


class Doubler(Worker):
    """Computes columns from ids and remembers what it saw."""

    def __init__(self, factor: int = 2, note: Path | None = None) -> None:
        self.factor = factor
        self.note = note
        self.seen: list[int] = []
        self.made_after = [name for name in self.colocated if name != self.placement.role]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, plus: int = 0) -> DataProto:
        self.seen.append(len(data))
        columns = {"doubled": data.tensors()["ids"] * self.factor + plus}
        return DataProto.from_dict(columns, {"rank": [self.rank] * len(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_double(self, data: DataProto) -> DataProto:
        return data.select().union(self.double(data))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_columns(self, data: DataProto) -> DataProto:
        """A heavy column of 1024 numbers per row, and a light one."""
        heavy = torch.arange(len(data) * 1024, dtype=torch.float32).reshape(len(data), 1024)
        return DataProto.from_dict({"heavy": heavy + self.rank, "light": torch.ones(len(data))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sum_heavy(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"sums": data.tensors()["heavy"].sum(1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def sum_on_first(self, data: DataProto) -> float:
        return float(data.tensors()["heavy"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return function(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_AND_METRIC)
    def add_columns_and_count(self, data: DataProto) -> BatchAndMetrics[int]:
        return BatchAndMetrics(batch=self.add_columns(data), metrics=(len(data),))

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO)
    def gather(self, rows_each: int) -> DataProto:
        return DataProto.from_dict({"from": torch.full((rows_each,), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "pid": os.getpid(),
            "roles": list(self.colocated),
            "made_after": self.made_after,
            "port": self.master_port,
            "environment": dict(os.environ),
            "seen": self.seen,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def size_of(self, numbers: torch.Tensor) -> tuple[float, bool]:
        return float(numbers.sum()), "actor" in self.colocated

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode="ray_test_round_robin")
    def add(self, numbers: list[int]) -> int:
        return sum(numbers) * 10**self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kind(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(non_tensors={"kind": [type(data).__name__] * len(data)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def neighbour_factor(self, role: str) -> int:
        neighbour = self.colocated[role]
        assert isinstance(neighbour, Doubler)
        return neighbour.factor

    def close(self) -> None:
        if self.note is not None:
            self.note.with_name(f"{self.note.name}-{self.placement.role}-{self.rank}").write_text("closed")


class Faulty(Worker):
    """Fails in the way it is asked to."""

    def __init__(self, in_init: str = "", collective: bool = False) -> None:
        if collective:
            dist.init_process_group(
                "gloo", store=self.rendezvous(), rank=self.rank, world_size=self.world_size
            )
        if in_init and self.rank == 1:
            self._go_wrong(in_init)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, how: str = "", rank: int = 1, after_s: float = 0.0) -> float:
        """All ranks sum a one, unless one of them goes wrong before."""
        print("half an emoji: \ud83d", file=sys.stderr, flush=True)  # Ray's own streams refuse it
        print(f"rank {self.rank} comes to the meeting", flush=True)
        if how and self.rank == rank:
            time.sleep(after_s)
            self._go_wrong(how)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return float(ones)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def go_wrong(self, how: str, rank: int = 1) -> int:
        if self.rank == rank:
            self._go_wrong(how)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def start_to_go_wrong(self, how: str, rank: int = 1) -> int:
        return self.go_wrong(how, rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def write_ids(self, data: DataProto) -> DataProto:
        data.tensors()["scores"].add_(1)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_one(self, numbers: torch.Tensor) -> None:
        numbers += 1

    def _go_wrong(self, how: str) -> None:
        if how == "raise":
            raise ValueError("the moon is in the wrong place")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(3)
        if how == "leave":
            sys.exit("I have had enough")
        if how == "sleep":
            sleep_forever()


class Mortal(Doubler):
    """Dies where it is asked to; knows nothing of its peers."""

    def __init__(self, refuses: Path | None = None) -> None:
        """While the file `refuses` exists, none can be made; where it has any content, the attempt never ends."""
        super().__init__()
        if refuses is not None and refuses.exists():
            if refuses.read_text():
                sleep_forever()
            raise ValueError("not now")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, allows_losses=True)
    def part(self, data: DataProto, dies: Sequence[int] = ()) -> DataProto:
        """As add_columns; a group gives the rows of those that live."""
        self._die(dies)
        return self.add_columns(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def whole(self, data: DataProto, dies: Sequence[int] = ()) -> DataProto:
        return self.part(data, dies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rank_of(self, dies: Sequence[int] = ()) -> int:
        self._die(dies)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("the moon is in the wrong place")

    def _die(self, ranks: Sequence[int]) -> None:
        if self.rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def sleep_forever() -> None:
    while True:
        time.sleep(1)


class Companion(Follower):
    """Follower whose port is its process id."""

    def address(self) -> FollowerAddress:
        return FollowerAddress(host=self.placement.node, port=os.getpid(), secret="")


class Spanning(Worker):
    """Leader of a rank over several nodes."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> list[tuple[str, int]]:
        """Address and process id on each node of the rank."""
        followers = [(follower.host, follower.port) for follower in self.placement.followers]
        return [(self.placement.node, os.getpid()), *followers]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lose(self, rank: int) -> int:
        """As an engine whose follower on another node is gone."""
        if self.rank == rank:
            raise FollowerLost("the process on the other node is gone")
        return self.rank
