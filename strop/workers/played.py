"""Samples that were played, as the controller has them: their reports, and a reference to the rest.

Tokens stay with the workers that played them, for as long as somebody holds the reference; calls that need them take
it as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.protocol import DataProto, DataProtoFuture
from strop.trajectory import Prompt
from strop.workers.episodes import Episode
from strop.workers.reports import EpisodeReport, report_of

REPORT, EPISODE = "report", "episode"


@dataclass(frozen=True, kw_only=True)
class Played:
    """Samples in the order of their prompts and numbers."""

    reports: tuple[EpisodeReport, ...]
    """What is known of each without its tokens."""
    episodes: DataProtoFuture
    """Column `episode`, in the same order; wherever it is."""

    @staticmethod
    def of(rows: DataProtoFuture) -> Played:
        """What a call of `RolloutWorker.play` has given; waits for it, and fetches the reports alone."""
        reports = rows.select([], [REPORT]).get().non_tensor_batch[REPORT]
        return Played(reports=tuple(reports), episodes=rows.select([], [EPISODE]))

    @staticmethod
    def concat(parts: Sequence[Played]) -> Played:
        """The samples of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        return Played(
            reports=tuple(report for part in parts for report in part.reports),
            episodes=DataProtoFuture.concat([part.episodes for part in parts]),
        )

    def take(self, samples: Sequence[int]) -> Played:
        """These samples, in this order."""
        if list(samples) == list(range(len(self.reports))):
            return self
        return Played(
            reports=tuple(self.reports[sample] for sample in samples),
            episodes=self.episodes.take(list(samples)),
        )


def prompts_as_rows(prompts: Sequence[Prompt]) -> DataProto:
    """Column `prompt`: what `RolloutWorker.play` takes."""
    return DataProto.from_dict({}, non_tensors={"prompt": as_column(prompts)})


def episodes_as_rows(episodes: Sequence[Episode]) -> DataProto:
    """Columns `report` and `episode`: what `RolloutWorker.play` gives."""
    columns = {REPORT: as_column([report_of(episode) for episode in episodes]), EPISODE: as_column(episodes)}
    return DataProto.from_dict({}, non_tensors=columns)


def episodes_of(rows: DataProto) -> list[Episode]:
    """The column `episode` of a batch."""
    return list(rows.non_tensor_batch[EPISODE])


def as_column(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Objects, one per row."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # one by one: numpy would look into lists of equal length
        column[index] = value
    return column
