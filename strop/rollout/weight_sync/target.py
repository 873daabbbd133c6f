"""Targets of weights: the live parameters of an engine, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from strop.engines.weights import WeightsMetadata
from strop.rollout.weight_sync.delta import Changes


class WeightTarget(Protocol):
    """The parameters an engine generates with."""

    def weights_metadata(self) -> WeightsMetadata:
        """Tensors that the engine needs: each once, with the names tied to it."""
        ...

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Write values in place. The tensors are in host or device memory and valid during the call only.

        Names are first names of the metadata; shapes and dtypes are theirs.
        """
        ...

    def digests(self, names: Sequence[str]) -> Mapping[str, int]:
        """Digests (engines.digests.tensors) of what generation will really read under each name, aliases included."""
        ...


@runtime_checkable
class PartTarget(WeightTarget, Protocol):
    """Parameters that take a tensor in parts, so that it is never held whole beside them."""

    def load_part(self, name: str, start: int, data: Tensor) -> None:
        """Write bytes [n] uint8 of a tensor, from byte `start` on; parts of a tensor come in their order."""
        ...


@runtime_checkable
class ChangesTarget(WeightTarget, Protocol):
    """Parameters in which single elements can be written."""

    def load_changes(self, changes: Sequence[tuple[str, Changes]]) -> None:
        """Write the new values of some elements of tensors, whose other elements stay. They are valid during the call
        only."""
        ...
