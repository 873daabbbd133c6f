"""What the roles do alike with the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from strop.base.metrics import Max, Mean, Metric, Reduction
from strop.engines.optimizer import StepReport
from strop.engines.packing import Row, make_rows
from strop.engines.tokens import TokenFunction, Tokens
from strop.protocol import DataProto, columns

GRAD_NORM = Metric(
    "{actor,critic,train}/grad_norm", "1", "norm before clipping, mean over the optimizer steps"
)
LEARNING_RATE = Metric("{actor,critic,train}/lr", "1", "mean over the optimizer steps")
SKIPPED_UPDATES = Metric(
    "{actor,critic,train}/skipped_updates",
    "0 or 1",
    "1: a gradient was not finite, and its optimizer step not taken",
)


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


def log_prob_column(name: str, data: DataProto) -> TokenFunction:
    """The log-probs of tokens under the temperature of these samples, as a column of this name."""
    temperature: float = data.meta_info["temperature"]

    def log_probs(tokens: Tokens) -> dict[str, Tensor]:
        return {name: tokens.log_probs(temperature=temperature)[0]}

    return log_probs


def flat_mask(data: DataProto) -> tuple[Tensor, Tensor]:
    """Which tokens [N] of a batch are trained on, and the tokens [B] of each row: column loss_mask where the rollout
    was corrected, else response_mask."""
    tensors = data.tensors()
    column = tensors["loss_mask" if "loss_mask" in tensors else "response_mask"]
    return columns.flat(column).bool(), columns.row_lengths(column)


def step_metrics(prefix: str, report: StepReport) -> dict[str, Reduction]:
    """Of one optimizer step; every rank reports the same."""
    return {
        GRAD_NORM.of(prefix): Mean(report.grad_norm, 1),
        LEARNING_RATE.of(prefix): Mean(report.lr, 1),
        SKIPPED_UPDATES.of(prefix): Max(1.0 if report.skipped else 0.0),
    }
