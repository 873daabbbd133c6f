"""Rollout correction of all rows of a step, from their columns."""

from __future__ import annotations

import torch

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.rollout_correction import correct
from strop.protocol import DataProto, columns
from strop.protocol.columns import padded


def correction_columns(data: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Columns loss_mask [B, R~], rollout_is_weights [B, R~] where weights are asked for, and num_trained [B] int64.

    Args:
        data: response_mask, rollout_log_probs and old_log_probs [B, R~] of all rows of a step.
        algorithm: its `correction` says what is weighted and rejected.

    Returns:
        The columns, and meta_info["numbers"]: metrics of the whole batch, by name.
    """
    tensors = data.tensors()
    mask = padded(tensors, "response_mask").bool()
    correction = correct(
        padded(tensors, "old_log_probs"),
        padded(tensors, "rollout_log_probs"),
        mask,
        algorithm.correction,
    )
    inside = torch.arange(mask.shape[1])[None] < columns.row_lengths(tensors["response_mask"])[:, None]
    corrected = {
        "loss_mask": columns.from_padded(correction.mask, inside),
        "num_trained": correction.mask.sum(dim=1, dtype=torch.int64),
    }
    if correction.weights is not None:
        corrected["rollout_is_weights"] = columns.from_padded(correction.weights, inside)
    return DataProto.from_dict(corrected, meta_info={"numbers": correction.metrics})
