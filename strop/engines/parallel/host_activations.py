"""Activations that wait for the backward pass in host memory.

Each piece of device memory is copied once, however many operations keep a view of it. On an accelerator copies are made
on a stream of their own: to the host behind the operation that made the piece and beside those that follow, and back
one piece ahead of the backward pass, which asks for them in reverse order. The host waits for none.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from strop.engines.causal_lm import CausalLM

LEAST_SHARE = 0.5
"""Share of a storage that a view must have for all of it to be copied; of less, the view alone is."""
_Key: TypeAlias = tuple[object, ...]


@dataclass(kw_only=True, eq=False)
class _Piece:
    """A piece of device memory."""

    host: Tensor
    """[bytes]."""
    before: weakref.ref[_Piece] | None
    """The one that was copied before it."""
    num_views: int = 0
    """Saved tensors in it that the backward pass has not asked for yet."""
    here: Tensor | None = None
    """On the device again, while it is asked for."""
    event: torch.Event | None = field(default=None)
    """Its copy back; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """A saved tensor."""

    piece: _Piece
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Of its first number in the piece, in numbers."""


class HostActivations:
    """The saved tensors of one forward pass."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: of the model.
        """
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._pieces: dict[_Key, _Piece] = {}
        self._last: _Piece | None = None

    def pack(self, tensor: Tensor) -> _View | Tensor:
        """Copy a tensor to the host; parameters, and what lies elsewhere, stay where they are."""
        base = tensor if tensor._base is None else tensor._base
        # Sharding frees and gathers parameters itself; a copy would keep them.
        is_parameter = isinstance(base, torch.nn.Parameter)
        if is_parameter or tensor.device.type != self._device.type or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        key: _Key = StorageWeakRef(storage), tensor._version  # type: ignore[no-untyped-call]
        if tensor.nbytes >= LEAST_SHARE * storage.nbytes():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            stride, offset = tensor.stride(), int(tensor.storage_offset())
        else:
            key = *key, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
            source, offset = tensor, 0
            stride = torch.empty(tensor.shape, device="meta").stride()
        if key not in self._pieces:
            self._pieces[key] = self._last = self._copied(source)
        piece = self._pieces[key]
        piece.num_views += 1
        return _View(piece=piece, dtype=tensor.dtype, size=tensor.shape, stride=stride, offset=offset)

    def unpack(self, packed: _View | Tensor) -> Tensor:
        """A tensor on the device again."""
        if isinstance(packed, Tensor):
            return packed
        piece = packed.piece
        here = self._fetched(piece)
        before = None if piece.before is None else piece.before()
        if before is not None and before.num_views:
            self._fetched(before)
        if piece.event is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_event(piece.event)
            here.record_stream(current)
        piece.num_views -= 1
        if piece.num_views <= 0:  # a second backward pass brings it again
            piece.here = piece.event = None
        tensor = torch.empty(0, dtype=packed.dtype, device=self._device)
        return tensor.set_(here.untyped_storage(), packed.offset, packed.size, packed.stride)

    def close(self) -> None:
        """End the forward pass: memory of the device that is reused by now is another's."""
        self._pieces.clear()
        self._last = None

    def _copied(self, source: Tensor) -> _Piece:
        host = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        target = host.view(source.dtype).view(source.shape)
        if self._stream is None:
            target.copy_(source)
        else:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        return _Piece(host=host, before=None if self._last is None else weakref.ref(self._last))

    def _fetched(self, piece: _Piece) -> Tensor:
        """A piece on its way back, in memory of the stream that copies it."""
        if piece.here is None:
            with contextlib.nullcontext() if self._stream is None else self._stream:
                piece.here = piece.host.to(self._device, non_blocking=True, copy=True)
                if self._stream is not None:
                    piece.event = self._stream.record_event()
        return piece.here


@contextlib.contextmanager
def activations_on_host(model: CausalLM) -> Iterator[None]:
    """Keep the activations for the backward pass in host memory; parameters stay where they are."""
    activations = HostActivations(model.device)
    with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
        try:
            yield
        finally:
            activations.close()
