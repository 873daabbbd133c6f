"""Activations and gradients on their way between the stages of a pipeline.

Sends never block; receives are posted in the order in which the sender sends, which every rank knows from the schedule.
Activations and gradients travel over groups of their own, and between two ranks each direction does, so that none waits
behind another.

Concurrency: one thread of each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from strop.engines.parallel.pipeline import Pipeline
from strop.engines.parallel.schedule import Message, Schedule


class StageLinks:
    """Sends and receives of one rank while a schedule runs."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, buffer: Callable[[int], Tensor]) -> None:
        """Prepare the links; nothing is sent yet.

        Args:
            pipeline: this rank's part of it.
            schedule: of all ranks.
            buffer: empty tensor of the shape that hidden states of a micro-batch have.
        """
        self._pipeline, self._buffer = pipeline, buffer
        self._expected = {
            (sender, is_forward): deque(schedule.messages(sender, pipeline.rank, is_forward=is_forward))
            for sender in range(pipeline.num_ranks)
            for is_forward in (True, False)
        }
        self._arrived: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._sent: deque[tuple[Tensor, dist.Work]] = deque()

    def send(self, receiver: int, message: Message, tensor: Tensor) -> None:
        """Hand on hidden states, or hand back their gradient."""
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        tensor = tensor.detach().contiguous()
        group = self._pipeline.link(self._pipeline.rank, is_forward=message.is_forward)
        work = dist.isend(tensor, self._pipeline.ranks[receiver], group=group)
        assert work is not None, "this rank is in the group"
        self._sent.append((tensor, work))

    def receive(self, message: Message) -> Tensor:
        """Receive the tensor that a pass waits for."""
        sender = (message.stage + (-1 if message.is_forward else 1)) % self._pipeline.num_ranks
        expected = self._expected[sender, message.is_forward]
        group = self._pipeline.link(sender, is_forward=message.is_forward)
        while message not in self._arrived:
            following = expected.popleft()
            tensor = self._buffer(following.micro_batch)
            work = dist.irecv(tensor, self._pipeline.ranks[sender], group=group)
            assert work is not None, "this rank is in the group"
            self._arrived[following] = tensor, work
        tensor, work = self._arrived.pop(message)
        work.wait()
        return tensor

    def close(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[1].wait()
