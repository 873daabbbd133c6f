"""Rollout correction of a step: all rows at once, on light columns, in one worker."""

from __future__ import annotations

import torch

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.correction import correct
from strop.protocol import DataProto, columns


def correction_columns(data: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """Columns loss_mask [B, R~], rollout_is_weights [B, R~] where weights are asked for, and num_trained [B] int64.

    Args:
        data: response_mask, rollout_log_probs and old_log_probs [B, R~] of all rows of a step.
        algorithm: its `correction` says what is weighted and rejected.

    Returns:
        The columns, and meta_info["numbers"]: metrics of the whole batch, by name.
    """
    tensors = data.tensors()
    mask = columns.to_padded(tensors["response_mask"], 0.0).bool()
    found = correct(
        columns.to_padded(tensors["old_log_probs"], 0.0),
        columns.to_padded(tensors["rollout_log_probs"], 0.0),
        mask,
        algorithm.correction,
    )
    lengths = columns.row_lengths(tensors["response_mask"])
    inside = torch.arange(mask.shape[1])[None] < lengths[:, None]
    made = {
        "loss_mask": columns.from_padded(found.mask, inside),
        "num_trained": found.mask.sum(dim=1, dtype=torch.int64),
    }
    if found.weights is not None:
        made["rollout_is_weights"] = columns.from_padded(found.weights, inside)
    return DataProto.from_dict(made, meta_info={"numbers": found.metrics})
