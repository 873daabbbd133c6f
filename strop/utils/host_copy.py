"""Tensors of a device on their way to host memory: begun while the device computes, waited for when they are read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors in host memory, behind the work of the device that makes them.

    Whatever waits for the device meanwhile, such as the norm of a gradient, waits for these too.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; tensors in host memory are themselves."""
        self._copies = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
        device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)
        self._event = None if device is None else torch.Event(device)
        if self._event is not None:
            self._event.record()

    def wait(self) -> dict[str, Tensor]:
        """The copies, when they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copies
