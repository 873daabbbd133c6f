"""Tensors for another process on this machine: one piece of memory that has no name in any file system."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.engines.checksum.host import digest_tensor
from strop.rollout.weight_sync.cuda_ipc import SharingDevice
from strop.rollout.weight_sync.stream import ALIGNMENT


@contextlib.contextmanager
def shared_bucket(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
    """Reference by which another process of the same user reads the tensors, while the context lasts; plain JSON.

    Gives:
        path, num_bytes: of the memory; entries: of each tensor its name, shape, dtype, first byte and `digest_tensor`.
    """
    entries, size = _entries(tensors)
    descriptor = os.memfd_create("strop-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
        with mmap.mmap(descriptor, size) as mapped:
            data = torch.frombuffer(mapped, dtype=torch.uint8)
            _pack(tensors, entries, data)
            del data  # the mapping cannot be closed under it
        yield {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "num_bytes": size, "entries": entries}
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def device_bucket(tensors: Sequence[tuple[str, Tensor]], device: SharingDevice) -> Iterator[dict[str, Any]]:
    """The same in memory of the device that the tensors are on.

    Gives:
        memory: by which `SharingDevice.open` opens it; num_bytes and entries as of `shared_bucket`.

    Raises:
        OSError: no room, or memory of this device cannot be shared.
    """
    entries, size = _entries(tensors)
    data = device.allocate(size)
    _pack(tensors, entries, data)
    memory = device.export(data)
    try:
        yield {"memory": memory, "num_bytes": size, "entries": entries}
    finally:
        device.take_back(memory)


def _entries(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[list[Any]], int]:
    """Each tensor as JSON, one behind the other, and the size of all."""
    entries: list[list[Any]] = []
    size = 0
    for name, tensor in tensors:
        offset = -(-size // ALIGNMENT) * ALIGNMENT
        size = offset + tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append([name, list(tensor.shape), dtype, offset, digest_tensor(tensor)])
    return entries, size


def _pack(tensors: Sequence[tuple[str, Tensor]], entries: list[list[Any]], data: Tensor) -> None:
    for (_, tensor), (_, _, _, offset, _) in zip(tensors, entries, strict=True):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        data[offset : offset + len(flat)].copy_(flat)
