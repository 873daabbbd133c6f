"""Tensors that leave the device for a while: parameters, optimizer state, and what a backward pass needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage

from strop.engines.causal_lm import CausalLM
from strop.engines.gradients import local
from strop.engines.optimizer import Optimizer


class HostCopies:
    """Tensors whose memory is on the host for a while; the tensor objects stay the same and must not be used.

    Copies both ways are behind the work of the device and in front of what comes later, so the host waits for none:
    memory is pinned, and torch keeps it until the copy is done, and then for the next time.
    """

    def __init__(self) -> None:
        self._held: list[tuple[UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host."""
        return sum(host.numel() for _, host in self._held)

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors' memory to the host and free it where it was."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            is_here = storage.device.type != "meta"  # not of another stage
            if is_here and storage.nbytes() > 0:  # else empty, or another tensor's memory too
                pinned = storage.device.type != "cpu"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                host.copy_(_bytes_of(storage), non_blocking=True)
                self._held.append((storage, host))
                storage.resize_(0)

    def restore(self) -> None:
        """Put everything back where it was."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._held.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offload(model: CausalLM) -> HostCopies:
    """Move a model's parameters and gradients to host memory; `restore` brings them back.

    On a CPU nothing moves: it is host memory already.
    """
    parameters = [parameter for _, parameter in model.named_parameters()]
    copies = HostCopies()
    copies.put(_on_device(p.detach() for p in parameters))
    copies.put(_on_device(p.grad for p in parameters if p.grad is not None))
    if model.device.type != "cpu":
        torch.accelerator.empty_cache()  # another process may use the memory
    return copies


def offload_optimizer(optimizer: Optimizer) -> HostCopies:
    """Move the optimizer state alone to host memory; nothing on a CPU."""
    copies = HostCopies()
    copies.put(_on_device(optimizer.memory()))
    return copies


def _on_device(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors that are not in host memory."""
    return (tensor for tensor in tensors if tensor.device.type != "cpu")


@contextlib.contextmanager
def activations_on_host(model: CausalLM) -> Iterator[None]:
    """Keep the activations for the backward pass in host memory; parameters stay where they are."""
    pinned = model.device.type != "cpu"

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        base = tensor if tensor._base is None else tensor._base
        # Sharding frees and gathers parameters itself; a copy would keep them.
        if isinstance(base, torch.nn.Parameter) or tensor.device.type != model.device.type:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host

    def unpack(packed: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pinned)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
