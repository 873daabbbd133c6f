"""Policy losses in verl's calling convention.

    (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=None, rollout_is_weights=None)
        -> (loss, metrics), or the four tensors (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)

An older form takes rollout_log_probs. A function is given by keyword what it has parameters for, as padded tensors
[B, R], and a config that is read as an object or as a mapping. What it returns is checked here, so that an error names
the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses.spec import LossSpec
from strop.algorithms.losses.terms import get_policy_loss_fn
from strop.algorithms.results import describe
from strop.algorithms.specs import PG_CLIPFRAC, PG_CLIPFRAC_LOWER, PPO_KL
from strop.algorithms.verl_config import VerlConfig, algorithm_fields, call_with_known, parameters_of, takes
from strop.utils.device import sent
from strop.utils.registry import dotted

LOSS_COLUMNS = ("log_probs", "old_log_probs", "advantages", "rollout_is_weights", "rollout_log_probs")
"""Columns that a loss of verl's convention can get."""

METRICS_OF_FOUR = (PG_CLIPFRAC, PPO_KL, PG_CLIPFRAC_LOWER)
"""Meaning of the last three of the four tensors of an older loss."""


@dataclass(frozen=True, kw_only=True)
class UserLoss:
    """Result of a user's loss for some rows of an optimizer batch."""

    loss: Tensor
    """One number with gradient; the sum over all parts and ranks is the loss of the optimizer batch."""
    metrics: Mapping[str, Tensor]
    """By full name (`actor/pg_clipfrac`): the mean over the tokens of the part, a float64 scalar where the loss is."""


def loss_config(
    algorithm: AlgorithmConfig,
    *,
    name: str,
    totals: BatchTotals,
    loss_agg_mode: str,
    settings: Mapping[str, object] | None = None,
) -> VerlConfig:
    """The config that a loss of verl's convention gets.

    It holds the keys of AlgorithmConfig, with both clip ranges in force; `policy_loss`, with `loss_mode` (the
    name) and the user's own settings, which also stand at the top where no key has their name; and
    `global_batch_info`, the keyword arguments of `agg_loss`. There dp_size is 1: the loss of a part is its share
    of the sum over all parts and ranks.

    Args:
        totals: counts of the whole optimizer batch, over all ranks.
        loss_agg_mode: the mode in force.
        settings: algorithm.loss_settings.
    """
    own_settings = dict(settings or {})
    values: dict[str, object] = {**own_settings, **algorithm_fields(algorithm)}
    values.update(
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        loss_agg_mode=loss_agg_mode,
        policy_loss={**own_settings, "loss_mode": name},
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": totals.num_tokens,
            "global_batch_size": totals.num_samples,
            "loss_scale_factor": algorithm.loss_scale_factor,
        },
    )
    return VerlConfig(values)


def loss_of_tokens(
    spec: LossSpec, columns: Mapping[str, Tensor], trained: Tensor, row_ids: Tensor, totals: BatchTotals
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The policy's term of the loss of some tokens by a loss of verl's convention, called on padded rows.

    Args:
        spec: of the run.
        columns: [M] by the loss's own names; log_probs with gradient.
        trained: [M] bool.
        row_ids: [M], in host memory: the row of each token; the tokens are those of whole rows, each end to end.
        totals: counts of the whole optimizer batch, over all ranks.

    Returns:
        The loss, and metrics by full name: means over these tokens.
    """
    _, row, lengths = torch.unique_consecutive(row_ids, return_inverse=True, return_counts=True)
    position = torch.arange(len(row_ids)) - (lengths.cumsum(0) - lengths)[row]
    shape = (len(lengths), int(lengths.max()))
    at = tuple(sent(part, trained.device) for part in (row, position))
    padded = {
        name: column.new_zeros(shape).index_put(at, column)
        for name, column in columns.items()
        if name != "row_ids" and column.dim() == 1
    }
    mode = spec.aggregation.mode
    result = call_policy_loss(
        get_policy_loss_fn(spec.name),
        columns=padded,
        mask=trained.new_zeros(shape).index_put(at, trained),
        loss_agg_mode=mode,
        config=loss_config(
            spec.algorithm,
            name=spec.name,
            totals=totals,
            loss_agg_mode=mode,
            settings=spec.algorithm.loss_settings,
        ),
    )
    return result.loss, result.metrics


def call_policy_loss(
    function: Callable[..., object],
    *,
    columns: Mapping[str, Tensor],
    mask: Tensor,
    loss_agg_mode: str,
    config: VerlConfig,
) -> UserLoss:
    """Call a loss of verl's convention on whole rows, padded.

    Args:
        columns: [B, R] each: log_probs (with gradient), old_log_probs, advantages; and, where there are any,
            rollout_is_weights and rollout_log_probs. Values outside the mask are set to 0 first.
        mask: [B, R], true on tokens trained on.
        loss_agg_mode: the aggregation mode in force.
        config: see `loss_config`.

    Raises:
        ValueError: columns that are not padded; importance weights that the function has no parameter for; a
            result of another form, which the message describes.
    """
    valid = mask.bool()
    clean = {
        key: torch.where(valid, columns[key], torch.zeros_like(columns[key]))
        for key in LOSS_COLUMNS
        if key in columns
    }
    return call_loss_as_given(function, columns=clean, mask=valid, loss_agg_mode=loss_agg_mode, config=config)


def call_loss_as_given(
    function: Callable[..., object],
    *,
    columns: Mapping[str, Tensor],
    mask: Tensor,
    loss_agg_mode: str,
    config: VerlConfig,
) -> UserLoss:
    """`call_policy_loss` on columns as they are, also outside the mask."""
    if mask.dim() != 2:
        raise ValueError(
            f"{dotted(function)} follows verl's convention and takes padded columns [B, R], but the mask has "
            f"shape {tuple(mask.shape)}"
        )
    parameters = parameters_of(function)
    if "rollout_is_weights" in columns and not takes(parameters, "rollout_is_weights"):
        raise ValueError(
            f"{dotted(function)} has no parameter rollout_is_weights, so the importance weights of the rollout "
            f"correction would be lost: add it and multiply the per-token loss by it, or switch the correction off"
        )
    offered: dict[str, object] = {
        "old_log_prob": columns["old_log_probs"],
        "log_prob": columns["log_probs"],
        "advantages": columns["advantages"],
        "response_mask": mask.to(torch.int64),
        "loss_agg_mode": loss_agg_mode,
        "config": config,
        "rollout_is_weights": columns.get("rollout_is_weights"),
        "rollout_log_probs": columns.get("rollout_log_probs"),
    }
    result = call_with_known(function, parameters, offered)
    loss, metrics = _loss_and_metrics(function, result)
    if loss.dim() != 0:
        raise ValueError(
            f"{dotted(function)} returned a loss of shape {tuple(loss.shape)}, but a loss is one number: reduce it "
            f"with agg_loss(loss_mat, response_mask, loss_agg_mode, **config.global_batch_info)"
        )
    if columns["log_probs"].requires_grad and not loss.requires_grad:
        raise ValueError(
            f"{dotted(function)} returned a loss without a gradient: it does not depend on log_prob, or was "
            f"detached from it"
        )
    return UserLoss(loss=loss, metrics={key: _number(function, key, value) for key, value in metrics.items()})


def _loss_and_metrics(function: Callable[..., object], result: object) -> tuple[Tensor, Mapping[str, object]]:
    match result:
        case (Tensor() as loss, Mapping() as metrics):
            return loss, metrics
        case (Tensor() as loss, first, second, third):
            return loss, dict(zip(METRICS_OF_FOUR, (first, second, third), strict=True))
    raise ValueError(
        f"{dotted(function)} returned {describe(result)}, but a policy loss returns (loss, metrics), or the four "
        f"tensors (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)"
    )


def _number(function: Callable[..., object], key: str, value: object) -> Tensor:
    """A metric as a scalar, without waiting for the device that computes it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    raise ValueError(
        f"{dotted(function)} returned the metric {key!r} as {describe(value)}; a metric is one number"
    )
