"""Helpers shared by all workers: jagged columns from flat values, and `Update`, the metrics of one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from strop.engines.optimizer import StepReport
from strop.engines.tokens import TokenFunction, Tokens
from strop.protocol import DataProto, columns
from strop.utils.metrics import Max, Mean, Metric, Reduction, merge_metrics

GRAD_NORM = Metric(
    "{actor,critic,prm,train}/grad_norm", "1", "norm before clipping, mean over the optimizer steps"
)
LEARNING_RATE = Metric("{actor,critic,prm,train}/lr", "1", "mean over the optimizer steps")
SKIPPED_UPDATES = Metric(
    "{actor,critic,prm,train}/skipped_updates",
    "0 or 1",
    "1: a gradient was not finite, and its optimizer step not taken",
)


def response_columns(data: DataProto, values: Mapping[str, Tensor]) -> DataProto:
    """Columns [B, R~] of flat values [N], one per response token."""
    responses = data.tensors()["responses"]
    return DataProto.from_dict(
        {name: columns.jagged_like(responses, column) for name, column in values.items()}
    )


def log_prob_column(name: str, data: DataProto) -> TokenFunction:
    """The log-probs of tokens under the temperature of these samples, as a column of this name."""
    temperature: float = data.meta_info["temperature"]

    def log_probs(tokens: Tokens) -> dict[str, Tensor]:
        return {name: tokens.log_probs(temperature=temperature)[0]}

    return log_probs


def flat_mask(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mask [N] of the tokens that are trained on, and the number of tokens [B] of each row: from column loss_mask
    where the rollout was corrected, else response_mask."""
    column = tensors["loss_mask" if "loss_mask" in tensors else "response_mask"]
    return columns.flat(column).bool(), columns.row_lengths(column)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Metrics of an optimizer step of a role, on one rank or on all of them."""

    role: str
    """First part of the names of its metrics."""
    metrics: Mapping[str, Reduction]
    """Empty where no token was left to take it with."""
    skipped: str = ""
    """Reason for a skipped step, the same on every rank; empty when it was taken."""
    trained: frozenset[str] = frozenset()
    """Ids of the samples of it, where it was taken: what the controller adds."""

    def losses(self) -> list[float]:
        """Loss and gradient norm, where there are any."""
        names = (f"{self.role}/loss", GRAD_NORM.of(self.role))
        return [self.metrics[name].value for name in names] if self.metrics else []

    @staticmethod
    def of(role: str, report: StepReport, metrics: Mapping[str, Reduction]) -> Update:
        """The step of one rank: its own metrics, and those of which every rank reports the same.

        Args:
            role: of the worker.
            report: of the optimizer.
            metrics: of the loss.
        """
        shared: dict[str, Reduction] = {
            GRAD_NORM.of(role): Mean(report.grad_norm, 1),
            LEARNING_RATE.of(role): Mean(report.lr, 1),
            SKIPPED_UPDATES.of(role): Max(1.0 if report.skipped else 0.0),
        }
        return Update(role=role, metrics={**metrics, **shared}, skipped=report.skipped)


def merged_update(updates: Sequence[Update]) -> Update:
    """The step of all ranks, from one entry per data-parallel group; a group without rows lacks some metrics."""
    return replace(updates[0], metrics=merge_metrics(update.metrics for update in updates))
