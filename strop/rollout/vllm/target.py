"""Weights into vLLM without a disk: each bucket through a piece of memory that has no name in any file system.

Of an engine over several nodes, each has such a piece, which the bucket reaches over the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from strop.engines.weights import WeightsMetadata
from strop.rollout.vllm.node_part import NodePart, copied_to_all
from strop.rollout.vllm.process import ServerProcess
from strop.rollout.weight_sync.bucket import shared_bucket

TIMEOUT_S = 600.0
"""Limit of one step of an update, in seconds."""


class VllmTarget:
    """The weights of vLLM's engine, by Hugging Face name.

    vLLM keeps linear layers in forms of its own, so what generation reads cannot be read back. Its workers compare each
    tensor that arrives with its digest; that they use it is shown by log-probs of a probe.
    """

    def __init__(
        self, process: ServerProcess, weights: WeightsMetadata, parts: Sequence[NodePart] = ()
    ) -> None:
        """Args:
        process: owns the engine.
        weights: what the engine needs.
        parts: of the engine on further nodes.
        """
        self._process, self._parts = process, parts
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
            with (
                shared_bucket(tensors) as bucket,
                copied_to_all(self._parts, bucket, timeout_s=TIMEOUT_S) as paths,
            ):
                memory = {"paths": paths, "num_bytes": bucket["num_bytes"], "entries": bucket["entries"]}
                self._process.ask_now("load", timeout_s=TIMEOUT_S, bucket=memory)
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
