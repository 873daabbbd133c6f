"""The ranks of the actor while they send weights together: the few numbers that they tell each other.

Concurrency: every method is a collective over the actor's processes, called by all in the same order; waits end with
the timeout of their group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SenderRanks:
    """This process among those that hold the model; it may be alone."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def of(cls, rank: int) -> SenderRanks:
        """All processes of the group that this one has joined, as rank `rank`."""
        return cls(rank=rank, size=dist.get_world_size() if dist.is_initialized() else 1)

    def hear(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The message that rank 0 gives, on every rank; plain JSON."""
        if self.size == 1:
            return dict(message or {})
        content = b"" if message is None else json.dumps(message).encode()
        length = torch.tensor(len(content))
        dist.broadcast(length, 0)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(data, 0)
        heard: dict[str, Any] = json.loads(bytes(data.tolist()))
        return heard

    def go_on(self, value: bool) -> bool:
        """Word of rank 0: there is another bucket, or there is none."""
        flag = torch.tensor(int(value))
        if self.size > 1:
            dist.broadcast(flag, 0)
        return bool(flag)

    def failed(self, value: bool, lacks: Sequence[bool] = ()) -> tuple[list[int], list[bool]]:
        """Ranks that say so; and for each of some other questions, as many on every rank, whether any says so."""
        if self.size == 1:
            return [0] if value else [], list(lacks)
        flags = torch.zeros(self.size + len(lacks), dtype=torch.int64)
        flags[self.rank] = value
        flags[self.size :] = torch.tensor(lacks, dtype=torch.int64)
        found = self.summed(flags).bool()
        return found[: self.size].nonzero()[:, 0].tolist(), found[self.size :].tolist()

    def added(self, numbers: Sequence[int]) -> list[int]:
        """Sums over the ranks, modulo 2^64."""
        wrapped = [(number + (1 << 63)) % (1 << 64) - (1 << 63) for number in numbers]
        return [int(total) for total in self.summed(torch.tensor(wrapped, dtype=torch.int64)).tolist()]

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """As many numbers of every rank, in the order of the ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        if self.size == 1:
            return [own.tolist()]
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers
