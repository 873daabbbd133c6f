"""The vocabulary over the ranks of a tensor-parallel group: each has the logits of its tokens alone.

Log-probs, entropies and most likely tokens come from a few numbers of each rank: no rank ever holds the logits of the
whole vocabulary. All ranks call the same collectives in the same order and get the same results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of embedding and head of one rank: neighbouring tokens of the vocabulary."""

    first: int
    """Id of the first one."""
    size: int
    """Number of them; 0 for the last ranks of a small vocabulary."""
    group: dist.ProcessGroup

    def places(self, token_ids: Tensor) -> Tensor:
        """Rows of these tokens among those of this rank; -1 for those of other ranks."""
        places = token_ids - self.first
        return torch.where((places >= 0) & (places < self.size), places, -1)

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        return dist.get_rank(self.group)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [N, V] of the whole vocabulary, from those [N, v] of each rank: for the few rows that need them."""
        sizes = self.gather(torch.tensor(self.size, device=logits.device)).tolist()
        padded = torch.nn.functional.pad(logits, (0, max(sizes) - self.size))
        parts = self.gather(padded).unbind()
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def gather(self, tensor: Tensor) -> Tensor:
        """[T, ...]: the tensors of all ranks, which have one shape; without gradient."""
        gathered = tensor.new_empty((dist.get_world_size(self.group), *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=self.group)
        return gathered

    def statistics(self, normalizers: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """logsumexp_v z_v [N] and sum_v p_v z_v [N] of the whole vocabulary, from those of each rank's tokens."""
        all_normalizers, all_means = self.gather(torch.stack([normalizers, means])).unbind(1)  # [T, N] each
        normalizer = torch.logsumexp(all_normalizers, dim=0)
        return normalizer, (torch.exp(all_normalizers - normalizer) * all_means).sum(0)

    def at(self, logits: Tensor, places: Tensor) -> Tensor:
        """Logits [N, C] of tokens, at these places (-1: on another rank) of this rank's logits [N, v]."""
        here = logits.gather(-1, places.clamp(min=0)).masked_fill_(places < 0, 0)
        dist.all_reduce(here, group=self.group)
        return here

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits [N, k] of the vocabulary and the ids [N, k] of their tokens, the largest first."""
        values, places = torch.topk(logits, min(k, logits.shape[1]), dim=-1)
        missing = k - values.shape[1]  # the same shape on every rank
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(places + self.first, (0, missing))
        all_values, all_ids = (self.gather(part).transpose(0, 1).flatten(1) for part in (values, ids))
        largest, at = torch.topk(all_values, k, dim=-1)
        return largest, all_ids.gather(-1, at)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """logsumexp [N] over the vocabulary of this rank's logits [N, v]."""
        return torch.logsumexp(self.gather(torch.logsumexp(logits, dim=-1)), dim=0)
