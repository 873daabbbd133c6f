"""Host memory with the calls by which processes share memory of a device (cuda_ipc.SharingDevice)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class HostDevice:
    """Shared memory of the node, under a number of its owner's file table; nothing lies in a file system."""

    name = "host"

    def __init__(self) -> None:
        self.allocated: list[int] = []
        """Sizes of what was ever allocated."""
        self.opened = 0
        self.num_exported = 0
        """Exports that were not taken back."""

    @classmethod
    def of(cls, device: torch.device) -> HostDevice:
        """One of its own for each side."""
        return cls()

    def allocate(self, num_bytes: int) -> Tensor:
        self.allocated.append(num_bytes)
        storage = torch.UntypedStorage(num_bytes)
        storage._share_fd_cpu_()
        return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]

    def export(self, memory: Tensor) -> dict[str, Any]:
        self.num_exported += 1
        storage: Any = memory.untyped_storage()
        return {
            "device": self.name, "pid": os.getpid(), "file": storage._get_shared_fd(), "num_bytes": storage.nbytes(),
        }  # fmt: skip

    def open(self, exported: Mapping[str, Any]) -> Tensor:
        self.opened += 1
        file = os.open(f"/proc/{exported['pid']}/fd/{exported['file']}", os.O_RDWR)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(file, exported["num_bytes"])
        finally:
            os.close(file)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def take_back(self, exported: Mapping[str, Any]) -> None:
        self.num_exported -= 1

    def synchronize(self) -> None:
        """Copies in host memory are done when they return."""
