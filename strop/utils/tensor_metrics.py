"""Metrics of a loss: added up on the device, and read once per optimizer step.

Every number that is read in between makes the host wait for the device, which then has nothing to do until the host has
caught up; so nothing here is a Python number before `read`, and with `fetch` before the optimizer step not even that
waits: the norm of the gradient was waited for by then.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strop.utils.host_copy import HostCopy
from strop.utils.metrics import Max, Mean, Min, Reduction


class TensorMetrics:
    """Means, smallest and largest values by metric name, over the micro-batches of an optimizer batch."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor | float] = {}
        self._smallest: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._fetched: HostCopy | None = None

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

    def fetch(self) -> None:
        """Begin to bring everything to host memory; nothing is added before `read`."""
        recorded = [
            *self._totals.values(),
            *(torch.as_tensor(self._counts[name]).double() for name in self._measured()),
            *self._smallest.values(),
            *self._largest.values(),
        ]
        self._fetched = HostCopy({"numbers": torch.stack(recorded)} if recorded else {})

    def _measured(self) -> list[str]:
        """Names of the means whose weight is counted on the device."""
        return [name for name in self._totals if isinstance(self._counts[name], Tensor)]

    def read(self) -> dict[str, Reduction]:
        """Everything, as it merges over ranks; waits for the device, once, where nothing else has since `fetch`."""
        if self._fetched is None:
            self.fetch()
        assert self._fetched is not None, "just now"
        totals, smallest, largest, measured = self._totals, self._smallest, self._largest, self._measured()
        fetched, self._fetched = self._fetched.wait(), None
        numbers = iter(fetched["numbers"].tolist() if fetched else [])
        sums = {name: next(numbers) for name in totals}
        counts: dict[str, Tensor | float] = self._counts | {name: next(numbers) for name in measured}
        metrics: dict[str, Reduction] = {name: Mean(sums[name], float(counts[name])) for name in totals}
        metrics |= {name: Min(next(numbers)) for name in smallest}
        metrics |= {name: Max(next(numbers)) for name in largest}
        return metrics
