"""Summary of a trained batch for the controller: metrics, one advantage per sample, and a digest per stage.

It is computed where the rows are, so that the rows themselves never reach the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algorithms.advantages import group_ids_of
from strop.algorithms.batch_metrics import critic_metrics, group_metrics, mismatch_metrics
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.masked_ops import masked_mean
from strop.algorithms.sequence_credit import episode_representatives
from strop.algorithms.specs import adv_estimator_declaration
from strop.protocol import DataProto, columns
from strop.protocol.columns import padded
from strop.protocol.schema import STAGES, stage_columns
from strop.run import digest
from strop.workers.off_policy_metrics import batch_off_policy_metrics
from strop.workers.role_metrics import role_metrics


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """Summary of a trained batch."""

    advantages: dict[str, float]
    """Sample id -> mean advantage over its trained tokens; 0 where there is none."""
    metrics: dict[str, float]
    """Rewards, advantages, groups, values, the mismatch of rollout and trainer, and what went into the rewards."""
    digests: dict[str, str]
    """Stage -> digest of its columns; stages that the step did not have are left out."""


def summarize(rows: DataProto, algorithm: AlgorithmConfig, sample_starts: Sequence[int]) -> BatchSummary:
    """The summary of rows with all their columns.

    Args:
        rows: columns prompts, responses, response_mask, rollout_log_probs, token_level_scores,
            token_level_rewards, advantages, returns; the trainer's at the start of the step, as `log_probs` or
            else `old_log_probs`; values and ref_log_prob where there are any.
        algorithm: that the batch was trained with.
        sample_starts: the first row of each sample.
    """
    tensors = rows.tensors()
    if "log_probs" not in tensors:
        tensors["log_probs"] = tensors["old_log_probs"]
    ids = list(rows.non_tensor_batch["id"])
    values, masks = columns.rows(tensors["advantages"]), columns.rows(_trained(tensors))
    means = [float(masked_mean(v, m)) for v, m in zip(values, masks, strict=True)]
    return BatchSummary(
        advantages=dict(zip(ids, means, strict=True)),
        metrics={
            **_metrics(rows, tensors, sample_starts),
            **_own_metrics(rows, algorithm),
            **batch_off_policy_metrics(rows, algorithm),
            **role_metrics(rows, algorithm),
        },
        digests={
            stage: digest(*(part for name in names if name in tensors for part in _bits(tensors[name])))
            for stage, names in ((stage, stage_columns(stage)) for stage in STAGES)
            if any(name in tensors for name in names)
        },
    )


def _metrics(
    rows: DataProto, tensors: Mapping[str, Tensor], sample_starts: Sequence[int]
) -> dict[str, float]:
    counted = _counted_rows(rows, tensors)
    scores, answers = _row_sums(tensors["token_level_scores"]), answer_scores(tensors)
    added = _row_sums(tensors["token_level_rewards"]) - scores
    starts = torch.tensor(sample_starts)
    sample_of = torch.bucketize(torch.arange(len(scores)), starts, right=True) - 1
    of_samples = scores[starts]  # the first row has what the whole episode is worth
    uids = list(rows.non_tensor_batch["uid"])
    return {
        **critic_metrics(
            scores=of_samples,
            rewards=of_samples.index_add(0, sample_of[counted], added[counted]),
            advantages=columns.flat(tensors["advantages"]),
            returns=columns.flat(tensors["returns"]),
            response_mask=columns.flat(_trained(tensors)),
            values=columns.flat(tensors["values"]) if "values" in tensors else None,
        ),
        **group_metrics(answers[counted], group_ids_of([uids[row] for row in counted])),
        **mismatch_metrics(
            columns.flat(tensors["log_probs"]),
            columns.flat(tensors["rollout_log_probs"]),
            columns.flat(tensors["response_mask"]),
        ),
    }


def _trained(tensors: Mapping[str, Tensor]) -> Tensor:
    """Mask [B, R~] of the tokens that are trained on: the sampled ones, without those that a correction rejected."""
    return tensors["loss_mask" if "loss_mask" in tensors else "response_mask"]


def _counted_rows(rows: DataProto, tensors: Mapping[str, Tensor]) -> list[int]:
    """Rows that count in the statistics of groups: one of an episode, or every answer that stands alone."""
    mask = columns.to_padded(_trained(tensors), 0.0).bool()
    representatives = episode_representatives(list(rows.non_tensor_batch["episode_id"]), mask)
    return list(range(len(mask))) if representatives is None else representatives[0]


def _own_metrics(data: DataProto, algorithm: AlgorithmConfig) -> Mapping[str, float]:
    """Metrics of the estimator, over all rows: of an episode of several sequences each one counts."""
    declaration = adv_estimator_declaration(algorithm.adv_estimator)
    if declaration.measure is None:
        return {}
    tensors = data.tensors()
    names = declaration.needs | {"advantages", "rollout_is_weights"}
    inputs = {name: padded(tensors, name) for name in names if name in tensors}
    inputs["response_mask"] = columns.to_padded(_trained(tensors), 0.0).bool()
    inputs["rewards"] = padded(tensors, "token_level_rewards").sum(dim=-1)
    inputs["group_ids"] = group_ids_of(list(data.non_tensor_batch["uid"]))
    return declaration.measure(
        inputs, {**declaration.options, "gamma": algorithm.gamma, **algorithm.adv_settings}
    )


def answer_scores(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Score of the answer of each row [B]: shaped scores and a reward model's, without penalties that come after
    (a KL term makes every group look mixed).

    Args:
        tensors: columns token_level_scores [B, R~], and rm_scores [B] where there is a reward model.
        dtype: to add up in; not given: that of the scores.
    """
    scores = _row_sums(tensors["token_level_scores"], dtype=dtype)
    return scores + tensors["rm_scores"].to(scores) if "rm_scores" in tensors else scores


def _row_sums(column: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.stack([row.sum(dtype=dtype) for row in columns.rows(column)])


def _bits(column: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    return columns.row_lengths(column).numpy(), columns.flat(column).numpy()
