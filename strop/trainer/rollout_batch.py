"""Rollout batches: the samples of a step on their way through the roles.

Rows (tokens, log-probs, values, advantages) stay with the workers: what passes here are references to them
and one report per sample. Counts that a loss divides by, and the load of each rank, follow from the reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from strop.algorithms.aggregation import BatchTotals
from strop.controller import Mesh, Partition
from strop.data.visit_ids import parse_visit_uid
from strop.engines.parallel.balance import balanced_rows
from strop.protocol import DataProto
from strop.protocol.schema import Consumer, columns_for, object_columns_for
from strop.protocol.trajectory import Prompt
from strop.trainer.config import even_bounds
from strop.utils.metrics import Mean, Metric, Reduction
from strop.workers.reports import EpisodeReport

BALANCE = Metric(
    "global_seqlen/{min,max,minmax_diff,balanced_min,balanced_max,mean}",
    "tokens",
    "of all rows of a data-parallel group in an optimizer step of the policy, where there are several groups: "
    "`balanced_`: as they were chosen; `min`, `max` and their difference: as they would be in order; mean over the "
    "optimizer steps",
)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Batch of references to samples: episodes (column `episode`) at first, then the rows that are trained on."""

    rows: DataProto
    """Reference to their columns, which stay with the workers while it is held."""
    reports: tuple[EpisodeReport, ...]
    """Reports of the rows, without their tokens, in the same order."""
    column_names: frozenset[str] = frozenset()
    """Tensor columns that `rows` has."""
    num_trained: tuple[int, ...] = ()
    """Tokens of each row that are trained on: the sampled ones, but for those that a correction rejected. Episodes have
    none of these."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the stages that made its columns."""

    def __len__(self) -> int:
        return len(self.reports)

    def __repr__(self) -> str:
        columns = f" with {', '.join(sorted(self.column_names))}" if self.column_names else ""
        return f"RolloutBatch({len(self)} rows{columns})"

    @property
    def episode_ids(self) -> frozenset[str]:
        """Ids of the samples whose rows these are."""
        return frozenset(report.episode_id for report in self.reports)

    @property
    def sample_starts(self) -> list[int]:
        """The first row of each sample; a sample has several rows where its history was rewritten on the way."""
        return [
            row
            for row, report in enumerate(self.reports)
            if row == 0
            or self.reports[row - 1].is_last_row
            or self.reports[row - 1].episode_id != report.episode_id  # its last row was left out
        ]

    def union(self, columns: DataProto, *names: str) -> RolloutBatch:
        """With these columns added, for the same rows in the same order; their tensors are named.

        Waits until they are computed, where a call that does not wait has given them; nothing is moved.
        """
        return replace(
            self, rows=self.rows.union(columns.wait()), column_names=self.column_names | set(names)
        )

    @property
    def last_rows(self) -> dict[str, int]:
        """Row of the last training sequence of each sample, by its id."""
        return {report.episode_id: row for row, report in enumerate(self.reports) if report.is_last_row}

    @property
    def token_numbers(self) -> list[str]:
        """The columns of its tokens that samples are stored with, of those that there are."""
        names = ("old_log_probs", "log_probs", "entropys", "advantages")
        return [name for name in names if name in self.column_names]

    @staticmethod
    def concat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """The rows of all parts, one after another; all have the same columns."""
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[0],
            rows=parts[0].rows.concat([part.rows for part in parts]),
            reports=tuple(report for part in parts for report in part.reports),
            num_trained=tuple(count for part in parts for count in part.num_trained),
            metrics={name: value for part in parts for name, value in part.metrics.items()},
        )

    def take(self, rows: Sequence[int]) -> RolloutBatch:
        """These rows, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        return replace(
            self,
            rows=self.rows.take(list(rows)),
            reports=tuple(self.reports[row] for row in rows),
            num_trained=tuple(self.num_trained[row] for row in rows) if self.num_trained else (),
        )

    def partition(self, mesh: Mesh) -> DataProto:
        """The rows as an argument for a group of this mesh, cut so that every data-parallel group has about the same
        work; samples of a prompt stay together where that costs no balance."""
        if mesh.dp == 1:
            return self.rows
        parts = balanced_rows(
            [report.num_tokens for report in self.reports],
            [self._num_shared_tokens(row) for row in range(len(self))],
            [report.uid for report in self.reports],
            mesh.dp,
        )
        return cast(DataProto, Partition(self.rows, parts))

    def balance(self, rows: DataProto | Partition) -> dict[str, Reduction]:
        """BALANCE of what `partition` gave; nothing for one group."""
        if not isinstance(rows, Partition):
            return {}
        counts = np.array([report.num_tokens for report in self.reports])
        in_order = [int(part.sum()) for part in np.array_split(counts, len(rows.parts))]
        balanced = [int(counts[part].sum()) for part in rows.parts]
        numbers = {
            "min": min(in_order),
            "max": max(in_order),
            "minmax_diff": max(in_order) - min(in_order),
            "balanced_min": min(balanced),
            "balanced_max": max(balanced),
            "mean": counts.sum() / len(balanced),
        }
        return {BALANCE.of(name): Mean(float(number), 1) for name, number in numbers.items()}

    def _num_shared_tokens(self, row: int) -> int:
        """First tokens of a row that the row before begins with as well; 0 where a filter has dropped that one."""
        report = self.reports[row]
        follows = row > 0 and self.reports[row - 1].id == report.row_before
        return report.num_shared_tokens if follows else 0

    def columns_for(self, consumer: Consumer) -> DataProto:
        """The rows with the columns that a consumer reads, of those that there are."""
        return self.rows.select(columns_for(consumer, self.column_names), object_columns_for(consumer))

    def for_sampler(self, prompt_of: Callable[[int, str], Prompt]) -> DataProto:
        """The batch of a step as samplers and growing data are shown it, under verl's names: tokens, scores, rewards
        and advantages, and per row uid, the number of the data's row (`index`), what the data has of it (raw_prompt,
        data_source, reward_model, extra_info, its own columns) and what the reward function gave beside the score.

        Args:
            prompt_of: the prompt of a row's number and uid.
        """
        columns = self.columns_for("sampler").get()
        prompts = {
            report.uid: prompt_of(parse_visit_uid(report.uid)[1], report.uid) for report in self.reports
        }
        rows: list[dict[str, Any]] = []
        for report in self.reports:
            prompt = prompts[report.uid]
            reward_parts = {} if report.outcome is None else dict(report.outcome.parts)
            rows.append(
                {
                    **prompt.columns,
                    **reward_parts,
                    "index": prompt.row,
                    "raw_prompt": [dict(message) for message in prompt.messages],
                    "data_source": prompt.data_source,
                    "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
                    "extra_info": dict(prompt.extra_info),
                }
            )
        present = {*columns.tensors(), *columns.non_tensor_batch}
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in present]
        objects = {name: np.empty(len(rows), dtype=object) for name in names}
        for number, row in enumerate(rows):
            for name in names:
                objects[name][number] = row.get(name)
        return columns.union(DataProto.from_dict({}, non_tensors=objects))

    def totals(self) -> BatchTotals:
        """Denominators of the loss of these rows."""
        counts = self.num_trained
        return BatchTotals(num_tokens=sum(counts), num_samples=sum(count > 0 for count in counts))


def optimizer_batches(batch: RolloutBatch, *, samples_per_update: int, epochs: int) -> Iterator[RolloutBatch]:
    """The rows of each optimizer step, in order, `epochs` times over; all rows of a sample are in the same one.

    As few optimizer steps as have at most samples_per_update samples each, of equal sizes up to one sample: an
    optimizer moves the weights as far for a remainder of one sample as for a whole batch.
    """
    starts = [*batch.sample_starts, len(batch)]
    bounds = even_bounds(len(starts) - 1, samples_per_update)
    for _ in range(epochs):
        for first, after in itertools.pairwise(bounds):
            yield batch.take(range(starts[first], starts[after]))
