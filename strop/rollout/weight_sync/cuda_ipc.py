"""Memory of a CUDA device that other processes of the node open: the few calls of torch that do it, and nothing else.

Never run on CUDA: written against torch 2.13 and the CUDA runtime's manual. Tests run everything around it with the
same calls for host memory.

An export is plain JSON: the handle of the allocation in hexadecimal digits, sizes, and the UUID of the device. A
process opens it on its own device, also where its CUDA_VISIBLE_DEVICES leaves the other one out: the driver then maps
memory of a peer, or refuses. torch counts who has the memory open in a file of its own; here the protocol of the
transfer says until when it is read, so the owner takes its count back when it drops the memory (`take_back`), and a
process that was killed holds nothing.

Of strop nothing is imported: vLLM's workers, which have no strop, load this file.

Source: CUDA runtime API, cudaIpcOpenMemHandle; torch/csrc/StorageSharing.cpp, torch/csrc/CudaIPCTypes.cpp.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class SharingDevice(Protocol):
    """A device whose memory other processes of the node can open."""

    @property
    def name(self) -> str:
        """Name by which all processes of the node know it."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory [num_bytes] uint8; OSError where there is no room."""
        ...

    def export(self, memory: Tensor) -> dict[str, Any]:
        """Plain JSON by which another process opens memory that `allocate` gave; OSError where it cannot be shared."""
        ...

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        """The memory [n] uint8 of another process, mapped until the tensor is dropped; OSError with the reason where
        it cannot be."""
        ...

    def take_back(self, exported: Mapping[str, Any]) -> None:
        """The owner is about to drop exported memory: nobody reads it any more."""
        ...

    def synchronize(self) -> None:
        """Wait until all copies that this thread has started are done."""
        ...


DeviceOf = Callable[[torch.device], SharingDevice | None]
"""Gives the calls for a device; None where its memory cannot be opened by other processes."""


class CudaDevice:
    """A CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        """`device`: with its number; without one, the current one."""
        self._device = torch.empty(0, device=device).device  # with its number

    @property
    def name(self) -> str:
        """UUID of the device, or of the part of it that this process has."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        """As of `SharingDevice`."""
        try:
            with without_growing_segments():
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise OSError(f"no room for {num_bytes} bytes on the device ({_first_line(error)})") from error

    def export(self, memory: Tensor) -> dict[str, Any]:
        """As of `SharingDevice`. What was written before is there for who opens it."""
        self.synchronize()
        try:
            # The last two are an event, which nobody waits for: the stream was waited for.
            storage: Any = memory.untyped_storage()
            _, handle, num_bytes, offset, counter, counter_at, _, _ = storage._share_cuda_()
        except RuntimeError as error:
            raise OSError(f"memory of {self.name} cannot be shared ({_first_line(error)})") from error
        return {
            "device": self.name,
            "handle": handle.hex(),
            "num_bytes": num_bytes,
            "offset": offset,
            "counter": counter.hex(),
            "counter_at": counter_at,
        }

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        """As of `SharingDevice`."""
        self._require_reach(exported["device"])
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index, bytes.fromhex(exported["handle"]), exported["num_bytes"], exported["offset"],
                bytes.fromhex(exported["counter"]), exported["counter_at"], b"", False,
            )  # fmt: skip
        except RuntimeError as error:
            raise OSError(
                f"{self.name} cannot open memory of {exported['device']} ({_first_line(error)})"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def take_back(self, exported: Mapping[str, Any]) -> None:
        """As of `SharingDevice`. torch never gives the place of a count to another one, so a late count is harmless."""
        torch.UntypedStorage._release_ipc_counter_cuda(
            bytes.fromhex(exported["counter"]), exported["counter_at"]
        )

    def synchronize(self) -> None:
        """As of `SharingDevice`."""
        torch.cuda.current_stream(self._device).synchronize()

    def _require_reach(self, name: str) -> None:
        """Raise OSError where this process sees the other device, and the two have no access to each other."""
        for index in range(torch.cuda.device_count()):
            is_it = str(torch.cuda.get_device_properties(index).uuid) == name
            if (
                is_it
                and index != self._device.index
                and not torch.cuda.can_device_access_peer(self._device, index)
            ):
                raise OSError(f"{self.name} has no access to {name} (no peer access)")


def sharing_device(device: torch.device) -> SharingDevice | None:
    """The calls for a CUDA device; None for others."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None and torch.cuda.is_available()
    return CudaDevice(device) if is_cuda else None


@contextlib.contextmanager
def without_growing_segments() -> Iterator[None]:
    """Allocate in segments of fixed sizes: torch shares those that grow by file descriptors of another process, which
    containers forbid (github.com/pytorch/pytorch/issues/165685). The words are those of utils/allocator.py, which
    vLLM's workers do not have; a test holds the two together."""
    settings = _allocator_settings()
    if "expandable_segments:True" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """The settings of torch's allocator; torch 2.11 does not say them, and has read them from a variable."""
    told: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if told is not None:
        return told()
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # it prefers the first one
    return next((os.environ[name] for name in names if name in os.environ), "")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
