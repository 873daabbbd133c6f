"""Parts that a rank gives of the weights of a model: its shards, and its share of what all ranks hold."""

from __future__ import annotations

from torch import Tensor, nn

from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weight_parts import Part, part_of
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync.sender_ranks import SenderRanks


class OwnParts:
    """Parts that this rank gives of the weights of a model; of each byte one rank gives it."""

    def __init__(self, module: nn.Module, ranks: SenderRanks) -> None:
        self._pipeline = pipeline_of(module)
        num_stages = 1 if self._pipeline is None else self._pipeline.num_ranks
        self._num_ranks = ranks.size // num_stages  # of a stage, which are neighbours
        self._rank = ranks.rank % self._num_ranks

    def of(self, weight: TensorMetadata, tensor: Tensor) -> Part | None:
        """This rank's part of a weight as it holds it; None where it gives nothing."""
        if self._pipeline is not None and not self._pipeline.is_mine(weight.name):
            return None
        return part_of(tensor, weight.dtype, rank=self._rank, num_ranks=self._num_ranks)
