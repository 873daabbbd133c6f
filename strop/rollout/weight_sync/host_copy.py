"""Weights in host memory for engines that take whole tensors, so that changes can travel to them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.engines.weights import WeightsMetadata
from strop.rollout.weight_sync.delta import Changes
from strop.rollout.weight_sync.stream import BUCKET_BYTES
from strop.rollout.weight_sync.target import WeightTarget


class HostCopy:
    """A target that takes whole tensors, every time all of them; changes are applied to a copy of what it has."""

    def __init__(self, target: WeightTarget) -> None:
        """Nothing is copied before something is loaded."""
        self._target = target
        self._values: dict[str, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        """Every weight is here."""
        return all(weight.name in self._values for weight in self._target.weights_metadata())

    def clear(self) -> None:
        """Give the memory back."""
        self._values.clear()

    def weights_metadata(self) -> WeightsMetadata:
        """As of the target."""
        return self._target.weights_metadata()

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hand whole tensors on, and remember them."""
        for name, value in tensors:
            if name in self._values:
                self._values[name].copy_(value)
            else:
                self._values[name] = value.cpu().clone(memory_format=torch.contiguous_format)
        self._target.load(tensors)

    def load_changes(self, changes: Sequence[tuple[str, Changes]]) -> None:
        """Hand the tensors on with some elements changed."""
        for name, changed in changes:
            changed.apply(self._values[name])
        self._hand_on([name for name, _ in changes])

    def load_unchanged(self, names: Sequence[str]) -> None:
        """Hand the tensors on as they were, because an engine of its own form may want all or none."""
        self._hand_on(names)

    def digests(self, names: Sequence[str]) -> Mapping[str, int]:
        """As of the target."""
        return self._target.digests(names)

    def _hand_on(self, names: Sequence[str]) -> None:
        group: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name in names:
            value = self._values[name]
            if group and num_bytes + value.nbytes > BUCKET_BYTES:
                self._target.load(group)
                group, num_bytes = [], 0
            group.append((name, value))
            num_bytes += value.nbytes
        if group:
            self._target.load(group)
