"""What the roles do alike with the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, token_weights
from strop.algorithms.reduce import Max, Mean, Reduction
from strop.engines.optimizer import StepReport
from strop.engines.packing import Row
from strop.engines.training import make_rows
from strop.protocol import DataProto, columns


def data_rows(data: DataProto) -> list[Row]:
    """The rows of a batch for the engine: columns prompts [B, P~] and responses [B, R~], and media if there are any."""
    media = data.non_tensor_batch.get("media")
    return make_rows(
        columns.rows(data.tensors()["prompts"]),
        columns.rows(data.tensors()["responses"]),
        None if media is None else list(media),
    )


def flat(data: DataProto, name: str) -> Tensor:
    """All values [N] of a column, in row order."""
    return columns.flat(data.tensors()[name])


def response_columns(data: DataProto, values: Mapping[str, Tensor]) -> DataProto:
    """Columns [B, R~] of flat values [N], one per response token."""
    responses = data.tensors()["responses"]
    return DataProto.from_dict(
        {name: columns.jagged_like(responses, column) for name, column in values.items()}
    )


def loss_weights(
    data: DataProto,
    totals: BatchTotals,
    *,
    mask: str,
    mode: str,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight [N] of each response token of these rows in the loss of the optimizer batch; 0 outside the mask.

    Args:
        data: any rows of the optimizer batch.
        totals: counts of the whole optimizer batch, over all ranks.
        mask: column [B, R~], true on tokens that are trained on.
        mode, scale: of the aggregation (algorithms.aggregation).
        dtype: of the weights.
    """
    column = data.tensors()[mask]
    return token_weights(
        mode,
        columns.flat(column).bool(),
        num_tokens=totals.num_tokens,
        num_samples=totals.num_samples,
        scale=scale,
        row_lengths=columns.row_lengths(column),
        dtype=dtype,
    )


def step_metrics(prefix: str, report: StepReport) -> dict[str, Reduction]:
    """grad_norm, lr and skipped_updates of one optimizer step; every rank reports the same."""
    return {
        f"{prefix}/grad_norm": Mean(report.grad_norm, 1),
        f"{prefix}/lr": Mean(report.lr, 1),
        f"{prefix}/skipped_updates": Max(1.0 if report.skipped else 0.0),
    }
