"""The samples of a step on their way through the roles.

Rows (tokens, log-probs, values, advantages) stay with the workers: what passes here are references to them
and one report per sample. Counts that a loss divides by, and the load of each rank, follow from the reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.balance import balance_parts, sequence_workload
from strop.controller import Cut, Mesh
from strop.protocol import DataProto, DataProtoFuture, future_of
from strop.workers.reports import EpisodeReport

ADVANTAGE_COLUMNS = (
    "response_mask",
    "token_level_scores",
    "rollout_log_probs",
    "rm_scores",
    "old_log_probs",
    "ref_log_prob",
    "values",
)
"""Columns that advantages, KL in the reward and the batch's metrics are made of, where they exist."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Samples that are trained on."""

    rows: DataProtoFuture
    """Their columns, wherever they are."""
    reports: tuple[EpisodeReport, ...]
    """What is known of each row, in the same order."""
    column_names: frozenset[str]
    """Tensor columns that `rows` has."""

    def __len__(self) -> int:
        return len(self.reports)

    def union(self, columns: DataProtoFuture | DataProto, *names: str) -> Experience:
        """With these columns added, for the same rows in the same order."""
        added = future_of(columns) if isinstance(columns, DataProto) else columns
        return Experience(
            rows=self.rows.union(added),
            reports=self.reports,
            column_names=self.column_names | set(names),
        )

    def slice(self, start: int, stop: int) -> Experience:
        """Rows `start` to `stop`."""
        return Experience(
            rows=self.rows.slice(start, stop),
            reports=self.reports[start:stop],
            column_names=self.column_names,
        )

    def cut(self, mesh: Mesh) -> Cut | DataProtoFuture:
        """The rows, cut so that every data-parallel group has about the same work; samples of a prompt stay
        together where that costs no balance."""
        if mesh.dp == 1:
            return self.rows
        loads = [sequence_workload(report.num_tokens) for report in self.reports]
        return Cut(self.rows, balance_parts(loads, [report.uid for report in self.reports], mesh.dp))

    def light(self) -> DataProtoFuture:
        """The rows with the columns that advantages are made of, without token ids."""
        return self.rows.select([name for name in ADVANTAGE_COLUMNS if name in self.column_names])

    def totals(self) -> BatchTotals:
        """What the loss of these rows divides by."""
        sampled = [report.num_sampled_tokens for report in self.reports]
        return BatchTotals(num_tokens=sum(sampled), num_samples=sum(count > 0 for count in sampled))


ROLLOUT_COLUMNS = frozenset(
    {"prompts", "responses", "response_mask", "rollout_log_probs", "token_level_scores"}
)
"""Columns that the rollout role makes."""


def experience_of(rows: DataProtoFuture, reports: Sequence[EpisodeReport], *, on_error: str) -> Experience:
    """The samples of a step that can be trained on.

    Args:
        rows: the rollout role's rows.
        reports: of all episodes of the step.
        on_error: see `EpisodeReport.reward`; the same rule decided which rows there are.
    """
    kept = tuple(report for report in reports if report.reward(on_error=on_error) is not None)
    return Experience(rows=rows, reports=kept, column_names=ROLLOUT_COLUMNS)


def optimizer_batches(
    experience: Experience, *, samples_per_update: int, epochs: int
) -> Iterator[Experience]:
    """The rows of each optimizer step, in order, `epochs` times over."""
    for _ in range(epochs):
        for start in range(0, len(experience), samples_per_update):
            yield experience.slice(start, min(start + samples_per_update, len(experience)))
