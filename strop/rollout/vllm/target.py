"""Weights into vLLM without a disk: each bucket through a piece of memory that has no name in any file system.

Tensors on a device stay there where vLLM's workers open its memory (strop.rollout.weight_sync.cuda_ipc), which is tried
before the first bucket; that path has never run on CUDA. Of an engine over several nodes, each node has such a piece of
memory, which the bucket reaches over the network.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from strop.engines.weights import WeightsMetadata
from strop.rollout.vllm.node_part import NodePart, copied_to_all
from strop.rollout.vllm.process import ServerProcess
from strop.rollout.weight_sync.bucket import device_bucket, shared_bucket
from strop.rollout.weight_sync.cuda_ipc import DeviceOf, SharingDevice, sharing_device

TIMEOUT_S = 600.0
"""Limit of one step of an update, in seconds."""
_TRIAL_BYTES = 64

logger = logging.getLogger(__name__)


class VllmTarget:
    """The weights of vLLM's engine, by Hugging Face name.

    vLLM keeps linear layers in forms of its own, so what generation reads cannot be read back. Its workers compare each
    tensor that arrives with its digest; that they use it is shown by log-probs of a probe.
    """

    def __init__(
        self,
        process: ServerProcess,
        weights: WeightsMetadata,
        parts: Sequence[NodePart] = (),
        *,
        device_of: DeviceOf = sharing_device,
    ) -> None:
        """Args:
        process: owns the engine.
        weights: what the engine needs.
        parts: of the engine on further nodes.
        device_of: gives the calls that share memory of the device that tensors are on.
        """
        self._process, self._parts = process, parts
        self._device_of = device_of
        self._opens_device: bool | None = None
        """vLLM's workers open memory of the device; None while it was not tried."""
        self._weights = weights
        self._arrived: dict[str, int] = {}
        self.is_open = False
        """Weights have arrived, and no version was set since."""

    def weights_metadata(self) -> WeightsMetadata:
        """The weights of the architecture, tied ones once."""
        return self._weights

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hand tensors on; they have arrived, compared with their digests, when this returns.

        Raises:
            RuntimeError: one did not arrive as it was sent, or vLLM cannot load it.
        """
        if not self.is_open:
            self._process.ask_now("begin_update", timeout_s=TIMEOUT_S)
            self.is_open, self._arrived = True, {}
        try:
            with self._shared(tensors) as bucket:
                self._process.ask_now("load", timeout_s=TIMEOUT_S, bucket=bucket)
        except BaseException:
            self.is_open = False  # what follows begins anew; until then vLLM holds every request
            raise
        self._arrived |= {entry[0]: entry[4] for entry in bucket["entries"]}

    def digests(self, names: Sequence[str]) -> Mapping[str, int]:
        """Digests of what has arrived; tied names have that of the one under which it did."""
        by_name = self._weights.by_name
        return {
            name: next(self._arrived[alias] for alias in by_name[name].names if alias in self._arrived)
            for name in names
        }

    @contextlib.contextmanager
    def _shared(self, tensors: Sequence[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """The tensors where vLLM's workers read them."""
        device = self._device_of(tensors[0][1].device) if tensors and not self._parts else None
        with contextlib.ExitStack() as memory:
            if device is not None and self._opens(device):
                try:
                    bucket = memory.enter_context(device_bucket(tensors, device))
                except OSError as error:
                    self._refuse_device(str(error))
                else:
                    yield bucket
                    return
            bucket = memory.enter_context(shared_bucket(tensors))
            paths = memory.enter_context(copied_to_all(self._parts, bucket, timeout_s=TIMEOUT_S))
            yield {"paths": paths, "num_bytes": bucket["num_bytes"], "entries": bucket["entries"]}

    def _opens(self, device: SharingDevice) -> bool:
        if self._opens_device is None:
            try:
                trial = device.allocate(_TRIAL_BYTES)
                exported = device.export(trial)
            except OSError as error:
                self._refuse_device(str(error))
                return False
            try:
                reason = self._process.ask_now("try_memory", timeout_s=TIMEOUT_S, memory=exported)
            finally:
                device.take_back(exported)
            self._opens_device = True
            if reason:
                self._refuse_device(f"vLLM's worker: {reason}")
        return self._opens_device

    def _refuse_device(self, reason: str) -> None:
        self._opens_device = False
        logger.warning("weights go to vLLM through host memory, not through memory of the device: %s", reason)
