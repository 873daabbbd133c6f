"""Weights that rank 0 alone needs: every part travels once, and to nobody else.

An all-gather of W ranks sends each part W - 1 times. Here the ranks tell each other which bytes they hold, and of each
part the first rank that has it sends it to rank 0, where it arrives in its place, or beside it if it is no single run.

Concurrency: all ranks of the default group make a `GatherToFirst` and call it in the same order. Exercised on gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines.gradients import full, meeting_device
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weight_parts import Part, part_of

FIRST = 0
_Header = tuple[int, int, int, int]
"""First byte, stride, count and length of the runs of a part; all 0 for none."""
_NOTHING: _Header = (0, 0, 0, 0)


class GatherToFirst:
    """Gathers weights of a module one by one; the headers of weights that are cut alike are exchanged once."""

    def __init__(self) -> None:
        self._headers: dict[object, list[_Header]] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """A weight of a module as a full tensor in this dtype on rank 0; None on the others.

        Beside the result there are the parts whose runs do not follow each other, on their way.

        Args:
            module: held by all ranks of the default group.
            name: of the weight.
            tensor: as this rank has it: its shard, or the whole; without values on ranks of other stages.
            dtype: of the result, in which parts travel.
        """
        pipeline = pipeline_of(module)
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if is_alone or (pipeline is None and not isinstance(tensor, DTensor)):
            is_first = is_alone or dist.get_rank() == FIRST
            return full(tensor.detach().to(dtype)) if is_first else None
        device = torch.device(meeting_device(tensor) if pipeline is None else pipeline.device)
        part = _own_part(tensor, dtype) if pipeline is None or pipeline.is_mine(name) else None
        # With stages, a rank does not know how others cut a weight.
        cut = _cut(tensor, dtype) if pipeline is None and isinstance(tensor, DTensor) else name
        if cut not in self._headers:
            self._headers[cut] = _exchanged(_NOTHING if part is None else _header(part), device)
        headers = self._headers[cut]
        senders = _first_holders(headers)
        if dist.get_rank() == FIRST:
            own = part if FIRST in senders else None
            others = {rank: headers[rank] for rank in senders if rank != FIRST}
            return _received(own, others, tensor, dtype, device).view(dtype).view(tensor.shape)
        if part is not None and dist.get_rank() in senders:
            _finish([dist.P2POp(dist.isend, part.runs.to(device).contiguous().view(-1), FIRST)])
        return None


def _cut(tensor: DTensor, dtype: torch.dtype) -> object:
    return tensor.device_mesh, tensor.placements, tuple(tensor.shape), dtype


def _own_part(tensor: Tensor, dtype: torch.dtype) -> Part | None:
    """The part that this rank holds; of a tensor that is whole, all of it."""
    if isinstance(tensor, DTensor):
        return part_of(tensor, dtype, rank=0, num_ranks=1)
    if tensor.numel() == 0:
        return None
    runs = tensor.detach().to(dtype).contiguous().view(1, -1).view(torch.uint8)
    return Part(first=0, stride=0, runs=runs)


def _header(part: Part) -> _Header:
    count, length = part.runs.shape
    return part.first, part.stride, count, length


def _exchanged(header: _Header, device: torch.device) -> list[_Header]:
    """The headers of all ranks. With NCCL this also makes the connections of the group, which all ranks must do."""
    own = torch.tensor(header, device=device)
    headers = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(headers, own)
    return [(first, stride, count, length) for first, stride, count, length in torch.stack(headers).tolist()]


def _first_holders(headers: list[_Header]) -> list[int]:
    """Ranks that give a part; of those that hold the same one, the first."""
    holders: dict[_Header, int] = {}
    for rank, header in enumerate(headers):
        if header != _NOTHING:
            holders.setdefault(header, rank)
    return sorted(holders.values())


def _received(
    own: Part | None, others: dict[int, _Header], like: Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """All bytes [n] uint8 of a weight, from this rank's part and those of others."""
    data = torch.empty(like.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
    beside: list[Part] = [] if own is None else [own]
    receives = []
    for rank, (first, stride, count, length) in others.items():
        if count == 1:
            place = data[first : first + length]
        else:
            beside.append(Part(first=first, stride=stride, runs=data.new_empty((count, length))))
            place = beside[-1].runs.view(-1)
        receives.append(dist.P2POp(dist.irecv, place, rank))
    _finish(receives)
    for part in beside:
        part.fill(data, 0)
    return data


def _finish(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
