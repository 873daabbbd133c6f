"""Slots in the memory of the sender's device, which receivers on that device or its peers read where they lie.

The sender offers them before a sync begins: each receiver opens them once and compares the first bytes with a random
number. Where one cannot, it says why, and the weights go through host memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.rollout.weight_sync.cuda_ipc import SharingDevice
from strop.rollout.weight_sync.slots import NUM_SLOTS
from strop.rollout.weight_sync.transport import Plan

PLAN_NAME = "cuda_ipc"
_PROOF_BYTES = 16


class _DeviceSlots:
    """Slots in memory of a device, on either side."""

    def __init__(self, device: SharingDevice, memory: Tensor, slot_bytes: int) -> None:
        self._device = device
        self._slots = [memory[slot * slot_bytes :][:slot_bytes] for slot in range(NUM_SLOTS)]

    @property
    def slots(self) -> Sequence[Tensor]:
        """As of `SlotMemory`."""
        return self._slots

    def settle(self) -> None:
        """As of `SlotMemory`."""
        self._device.synchronize()

    def all_have_it(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Close it; harmless the second time."""
        self._slots = []


class OwnedSlots(_DeviceSlots):
    """Memory of the sender's own device."""

    def __init__(self, device: SharingDevice, slot_bytes: int) -> None:
        """Allocate and export it.

        Raises:
            OSError: no room, or memory of this device cannot be shared.
        """
        proof = secrets.token_bytes(_PROOF_BYTES)
        memory = device.allocate(NUM_SLOTS * max(slot_bytes, _PROOF_BYTES))
        memory[:_PROOF_BYTES] = torch.frombuffer(bytearray(proof), dtype=torch.uint8)
        self.exported: dict[str, Any] = {**device.export(memory), "proof": proof.hex()}
        """Plain JSON by which other processes open it."""
        super().__init__(device, memory, slot_bytes)

    def close(self) -> None:
        """Free the memory, whoever has it open."""
        if self._slots:
            self._device.take_back(self.exported)
        super().close()


class OpenedSlots(_DeviceSlots):
    """The same memory in another process: of a receiver, or of another rank of the actor."""

    def __init__(self, device: SharingDevice | None, plan: Plan) -> None:
        """Open it.

        Args:
            device: of this process; None where it has none whose memory can be shared.
            plan: of the sender.

        Raises:
            OSError: it cannot be opened, or another memory is seen.
        """
        if device is None:
            raise OSError("its weights are not on such a device")
        memory = device.open(plan.memory)
        if bytes(memory[:_PROOF_BYTES].tolist()).hex() != plan.memory["proof"]:
            raise OSError(f"{device.name} reads other bytes in memory of {plan.memory['device']}")
        super().__init__(device, memory, plan.slot_bytes)
