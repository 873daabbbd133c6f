"""Metrics of a loss: added up on the device, and read once per optimizer step.

Every number that is read in between makes the host wait for the device, which then has nothing to do until the host has
caught up; so nothing here is a Python number before `read`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strop.utils.metrics import Max, Mean, Min, Reduction


class TensorMetrics:
    """Means, smallest and largest values by metric name, over the micro-batches of an optimizer batch."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._smallest: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def add_mean(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add to a mean.

        Args:
            total: scalar, the sum of the new items; added in float64.
            count: weight of all items so far and these: a number stands for the whole batch and is not added up, a
                scalar tensor is that of the new items.
        """
        total = total.detach().double()
        self._totals[name] = self._totals[name] + total if name in self._totals else total
        if isinstance(count, Tensor) and name in self._counts:
            count = self._counts[name] + count
        self._counts[name] = count

    @torch.no_grad()
    def add_tokens(self, name: str, values: Tensor, mask: Tensor, *, count: float) -> None:
        """Add values [M] under a mask [M] to a mean over the `count` tokens of the whole batch."""
        total = torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64)
        self.add_mean(name, total, count)

    @torch.no_grad()
    def add_extremes(self, smallest: str, largest: str, values: Tensor, mask: Tensor) -> None:
        """Compare values [M] under a mask [M] with the smallest and the largest so far; NaN stays NaN."""
        wide = values.detach().double()
        if not len(wide):
            wide, mask = wide.new_zeros(1), mask.new_zeros(1)
        low = torch.where(mask, wide, math.inf).amin()
        high = torch.where(mask, wide, -math.inf).amax()
        self._smallest[smallest] = torch.minimum(self._smallest.get(smallest, low), low)
        self._largest[largest] = torch.maximum(self._largest.get(largest, high), high)

    def read(self) -> dict[str, Reduction]:
        """Everything, as it merges over ranks; waits for the device, once."""
        totals, smallest, largest = list(self._totals), list(self._smallest), list(self._largest)
        measured = [name for name in totals if isinstance(self._counts[name], Tensor)]
        recorded = [
            *(self._totals[name] for name in totals),
            *(torch.as_tensor(self._counts[name]).double() for name in measured),
            *(self._smallest[name] for name in smallest),
            *(self._largest[name] for name in largest),
        ]
        numbers = iter(torch.stack(recorded).tolist() if recorded else [])
        sums = {name: next(numbers) for name in totals}
        counts: dict[str, Tensor | float] = self._counts | {name: next(numbers) for name in measured}
        metrics: dict[str, Reduction] = {name: Mean(sums[name], float(counts[name])) for name in totals}
        metrics |= {name: Min(next(numbers)) for name in smallest}
        metrics |= {name: Max(next(numbers)) for name in largest}
        return metrics
