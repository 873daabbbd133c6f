"""Parameters, gradients and optimizer state that leave the device for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from strop.engines.causal_lm import CausalLM
from strop.engines.gradients import local
from strop.engines.optimizer import Optimizer

BLOCK_BYTES = 1 << 28
"""Host memory is pinned in blocks of at most so much: torch rounds what it pins to a power of two, which of all weights
in one piece may be twice as much."""
ALIGNMENT = 512
"""Bytes at which tensors begin on a device, and here."""


class HostCopies:
    """Tensors whose memory is on the host for a while; the tensor objects stay the same and must not be used.

    Host memory is pinned once and kept for the next time. Copies to the host are made beside the device's next work, on
    a stream of their own, behind what it has been given so far; copies back are in front of what comes later. The host
    waits for none: memory on the device is used again when its copy is done.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._held: list[tuple[UntypedStorage, int]] = []
        self._stream: torch.Stream | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host."""
        return sum(size for _, size in self._held)

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors' memory to the host and free it where it was; beside what is there already."""
        storages = {storage._cdata: storage for storage in map(_storage, tensors)}
        # Those without values are of another stage.
        moved = [one for one in storages.values() if one.nbytes() > 0 and one.device.type != "meta"]
        if not moved:
            return
        device, first = moved[0].device, len(self._held)
        held = [*self._held, *((storage, storage.nbytes()) for storage in moved)]
        self._reserve(sum(size + -size % ALIGNMENT for _, size in held), device)
        self._held = held  # only now: where there is no host memory, they stay where they are
        with self._beside(device) as stream:
            for (storage, _), parts in list(zip(self._held, self._places(), strict=True))[first:]:
                data = _bytes_of(storage)
                for host, part in _pairs(parts, data):
                    host.copy_(part, non_blocking=True)
                if stream is not None:
                    data.record_stream(stream)
                storage.resize_(0)

    def restore(self) -> None:
        """Put everything back on its device, at addresses of its own choice.

        A block that waited for the tensors would keep the memory that others are to have, and torch's allocator gives
        none at an address that is asked for. So what reads by address (rollout/native/cuda_graph.py) is captured
        again: with resources.offload_idle, which alone moves parameters between steps, captures and their memory
        leave with them. What stays on the device while an optimizer's state is away keeps its address.
        """
        if self._stream is not None and self._held:
            torch.accelerator.current_stream(self._held[0][0].device).wait_stream(self._stream)
        for (storage, size), parts in zip(self._held, self._places(), strict=True):
            storage.resize_(size)
            for host, part in _pairs(parts, _bytes_of(storage)):
                part.copy_(host, non_blocking=True)
        self._held.clear()

    def _places(self) -> Iterator[list[Tensor]]:
        """Of each storage that is held, its parts on the host, in order; a storage may lie in several blocks."""
        block, at = 0, 0
        for _, size in self._held:
            parts = []
            while size:
                if at == len(self._blocks[block]):
                    block, at = block + 1, 0
                parts.append(self._blocks[block][at : at + size])
                size, at = size - len(parts[-1]), at + len(parts[-1])
            yield parts
            at += -at % ALIGNMENT

    def _reserve(self, needed: int, device: torch.device) -> None:
        """Pin what is missing of so many bytes."""
        while (missing := needed - sum(map(len, self._blocks))) > 0:
            size = min(BLOCK_BYTES, max(ALIGNMENT, 1 << (missing - 1).bit_length()))
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu"))

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[torch.Stream | None]:
        """The stream of copies to the host, behind the device's work so far; None on a CPU."""
        if device.type == "cpu":
            yield None
            return
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield self._stream


def _pairs(parts: Iterable[Tensor], data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of bytes [n] on the host, each with those on the device."""
    at = 0
    for part in parts:
        yield part, data[at : at + len(part)]
        at += len(part)


def _storage(tensor: Tensor) -> UntypedStorage:
    return local(tensor).untyped_storage()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offload(model: CausalLM, copies: HostCopies) -> None:
    """Move a model's parameters and gradients to host memory; `restore` brings them back.

    On a CPU nothing moves: it is host memory already.
    """
    parameters = [parameter for _, parameter in model.named_parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    copies.put(_on_device([*(parameter.detach() for parameter in parameters), *gradients]))
    if model.device.type != "cpu":
        torch.accelerator.empty_cache()  # another process may use the memory


def offload_optimizer(optimizer: Optimizer, copies: HostCopies) -> None:
    """Move the optimizer state alone to host memory; nothing on a CPU."""
    copies.put(_on_device(optimizer.memory()))


def _on_device(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors that are not in host memory."""
    return (tensor for tensor in tensors if tensor.device.type != "cpu")
