"""Parts that a rank gives of the weights of a model: its shards, and its share of what all ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from strop.engines.checksum.tensors import finish
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weight_parts import Part, part_of
from strop.engines.weights import TensorMetadata, WeightsMetadata
from strop.rollout.weight_sync.sender_ranks import SenderRanks
from strop.rollout.weight_sync.stream import ALIGNMENT, groups, next_weight, own_weights


class OwnParts:
    """Parts that this rank gives of the weights of a model, one after the other, and what it has added up of each for
    the digests; of each byte one rank gives it."""

    def __init__(
        self,
        module: nn.Module,
        metadata: WeightsMetadata,
        *,
        ranks: SenderRanks,
        bucket_bytes: int,
        weights: Iterable[tuple[str, Tensor]] | None,
    ) -> None:
        """Args:
        module: plain, or sharded over these ranks.
        metadata: of its weights, in the dtypes in which they leave.
        ranks: all that hold the model.
        bucket_bytes: limit of a bucket; a larger tensor is a number of buckets.
        weights: as of `stream.parameter_stream`; shards, or tensors that are whole on every rank.
        """
        self.ranks = ranks
        self.bucket_bytes = max(ALIGNMENT, bucket_bytes // ALIGNMENT * ALIGNMENT)
        self.groups = list(groups(metadata, self.bucket_bytes))
        """Weights that travel together."""
        self.word_sums: dict[str, int] = dict.fromkeys((weight.name for weight in metadata), 0)
        """Of each weight, that of the bytes which this rank has taken."""
        self._metadata, self._source = metadata, _tensors(module, metadata, weights)
        self._pipeline = pipeline_of(module)
        num_stages = 1 if self._pipeline is None else self._pipeline.num_ranks
        self._num_ranks = ranks.size // num_stages  # of a stage, which are neighbours
        self._rank = ranks.rank % self._num_ranks

    def next(self, weight: TensorMetadata) -> Part | None:
        """This rank's part of the weight that comes next, which is this one; None where it gives nothing.

        Raises:
            ValueError: another one comes, or the model's own weights are not there.
        """
        tensor = next_weight(self._source, weight)
        if self._pipeline is not None and not self._pipeline.is_mine(weight.name):
            return None
        return part_of(tensor, weight.dtype, rank=self._rank, num_ranks=self._num_ranks)

    def check_end(self) -> None:
        """Raise ValueError where another weight comes."""
        if extra := next(self._source, None):
            raise ValueError(f"the weights go on with {extra[0]} after the last one of the model's own")

    def digests(self) -> dict[str, int]:
        """Digest of every weight by name, from the word sums of all ranks, which call this together."""
        totals = self.ranks.added([self.word_sums[weight.name] for weight in self._metadata])
        return {
            weight.name: finish(total, weight.num_bytes)
            for weight, total in zip(self._metadata, totals, strict=True)
        }


def _tensors(
    module: nn.Module, metadata: WeightsMetadata, weights: Iterable[tuple[str, Tensor]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights that are sent; an error in them is raised with the first one, where the ranks tell each other of it."""
    yield from own_weights(module, metadata) if weights is None else weights
