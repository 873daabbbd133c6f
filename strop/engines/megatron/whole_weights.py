"""Weights and optimizer state under their Hugging Face names: joined from all ranks, and in boxes for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from strop.engines.checkpoint import Form
from strop.engines.checkpoint_reader import Parts
from strop.engines.megatron.weight_map import Mapped, Piece
from strop.engines.weights import WeightsMetadata

Read = Callable[[Mapped], Tensor]
"""A tensor of a parameter's shape: its value, or one of its moments."""
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@torch.no_grad()
def whole_weights(
    metadata: WeightsMetadata, mapped: Sequence[Mapped], read: Read, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every weight, whole on every rank, one after the other in the order of the metadata; a collective.

    The bits of each box come from one rank and are added to the zeros of the others.
    """
    pieces = _by_name(mapped)
    last: tuple[Mapped | None, Tensor] = None, torch.empty(0)
    for weight in metadata:
        whole = torch.zeros(weight.shape, dtype=weight.dtype, device=device)
        for entry, piece in pieces.get(weight.name, ()):
            if last[0] is not entry:  # else another part of the same parameter
                last = entry, read(entry)
            if _is_writer(entry, piece):
                whole[piece.box] = piece.read(last[1]).to(weight.dtype)
        dist.all_reduce(whole.view(_BITS[weight.dtype]))
        yield weight.name, whole


@torch.no_grad()
def parts_to_save(mapped: Sequence[Mapped], read: Read, prefix: str) -> Parts:
    """The boxes that this rank writes, copied to host memory; all ranks call this."""
    boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for entry in mapped:
        whole = read(entry)
        for piece in entry.pieces:
            if _is_writer(entry, piece):
                box = piece.read(whole).to("cpu", copy=True)
                boxes.setdefault(prefix + piece.name, []).append((piece.start, box))
    return {name: _joined(found) for name, found in boxes.items()}


@torch.no_grad()
def filled(entry: Mapped, source: Callable[[Piece], Tensor], dtype: torch.dtype) -> Tensor:
    """A tensor of a parameter's shape in this precision, made of boxes; 0 where no weight has anything."""
    whole = torch.zeros(entry.parameter.shape, dtype=dtype, device=entry.parameter.device)
    for piece in entry.pieces:
        piece.write(whole, source(piece))
    return whole


def forms(metadata: WeightsMetadata, prefixes: Iterable[str]) -> dict[str, Form]:
    """Types and shapes of saved tensors: of each weight one for each beginning of their names."""
    return {prefix + weight.name: (weight.dtype, weight.shape) for prefix in prefixes for weight in metadata}


def _by_name(mapped: Sequence[Mapped]) -> dict[str, list[tuple[Mapped, Piece]]]:
    pieces: dict[str, list[tuple[Mapped, Piece]]] = {}
    for entry in mapped:
        for piece in entry.pieces:
            pieces.setdefault(piece.name, []).append((entry, piece))
    return pieces


def _is_writer(entry: Mapped, piece: Piece) -> bool:
    """This rank is the one, of all that have the box, that hands it on; they take turns."""
    if not entry.is_first or 0 in piece.shape:
        return False
    if getattr(entry.parameter, "allreduce", True):  # megatron-core's mark of what is not an expert
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    else:
        size = parallel_state.get_expert_data_parallel_world_size()
        rank = parallel_state.get_expert_data_parallel_rank()
    return bool(sum(piece.name.encode()) % size == rank)


def _joined(boxes: list[tuple[tuple[int, ...], Tensor]]) -> tuple[tuple[int, ...], Tensor]:
    """One box of neighbours along the first dim: the experts of a rank."""
    boxes.sort(key=lambda box: box[0])
    return boxes[0][0], torch.cat([box for _, box in boxes]) if len(boxes) > 1 else boxes[0][1]
