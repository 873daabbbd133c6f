"""Weights into SGLang without a disk: each bucket through a piece of shared memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from strop.engines.weights import WeightsMetadata
from strop.rollout.sglang.process import SglangProcess
from strop.rollout.weight_sync.bucket import shared_bucket

LOADER = "strop_loader.load"
"""Loader that reads the memory over there (inside/strop_loader.py)."""


class SglangTarget:
    """The weights of SGLang's engine, by Hugging Face name.

    SGLang joins matrices, so what generation reads cannot be read back. Its workers compare each tensor that arrives
    with its digest; that they use it is shown by log-probs of a probe.
    """

    def __init__(self, process: SglangProcess, weights: WeightsMetadata, *, num_workers: int) -> None:
        """Args:
        process: the server.
        weights: what the engine needs.
        num_workers: processes that hold a part of the model; each reads all that is sent.
        """
        self._process = process
        self._weights = weights
        self._num_workers = num_workers
        self._arrived: dict[str, int] = {}
        self.is_open = False
        """Weights have arrived, and no version was set since."""

    def weights_metadata(self) -> WeightsMetadata:
        """The weights of the architecture, tied ones once."""
        return self._weights

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hand tensors on; they have arrived, compared with their digests, when this returns.

        Requests are held from the first on, to go on when the version is set.

        Raises:
            RuntimeError: one did not arrive as it was sent, or SGLang cannot load it.
        """
        if not self.is_open:
            self.is_open, self._arrived = True, {}
            self._process.post_now("pause_generation", {"mode": "retract"})
            self._process.post_now("begin_weight_update", {})
        with shared_bucket(tensors) as bucket:
            # Pickled as SGLang unpickles it, with a short list of what may be in it: an empty tensor is in that list.
            named = ForkingPickler.dumps([(json.dumps(bucket), torch.empty(0))])
            body = {
                "serialized_named_tensors": [base64.b64encode(named).decode()] * self._num_workers,
                "load_format": LOADER,
                "flush_cache": False,
            }
            self._process.post_now("update_weights_from_tensor", body)
        self._arrived |= {entry[0]: entry[4] for entry in bucket["entries"]}

    def digests(self, names: Sequence[str]) -> Mapping[str, int]:
        """Digests of what has arrived; tied names have that of the one under which it did."""
        by_name = self._weights.by_name
        return {
            name: next(self._arrived[alias] for alias in by_name[name].names if alias in self._arrived)
            for name in names
        }
