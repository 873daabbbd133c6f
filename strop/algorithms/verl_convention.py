"""Advantage estimators and policy losses of a user's own, called in verl's calling convention.

    loss:       (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=..., config=None,
                rollout_is_weights=None) -> (loss, metrics), or the four tensors (pg_loss, pg_clipfrac, ppo_kl,
                pg_clipfrac_lower); an older form takes rollout_log_probs
    estimator:  (token_level_rewards, response_mask, config=None, index=None, **kwargs) -> (advantages, returns)

A function is given by keyword what it has parameters for, as padded tensors [B, R], and a config that is read
as an object or as a mapping. What it returns is checked here, so that an error names the function.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages.registration import AdvantageFn, describe
from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import LossSpec, get_policy_loss_fn
from strop.algorithms.registry import Declaration
from strop.algorithms.specs import ADV_SHARED_SETTINGS, PG_CLIPFRAC, PG_CLIPFRAC_LOWER, PPO_KL
from strop.utils.registry import dotted, required_parameters

LOSS_COLUMNS = ("log_probs", "old_log_probs", "advantages", "rollout_is_weights", "rollout_log_probs")
"""Columns that a loss of verl's convention can get."""

METRICS_OF_FOUR = (PG_CLIPFRAC, PPO_KL, PG_CLIPFRAC_LOWER)
"""What the last three of the four tensors of an older loss are."""


class VerlConfig(Mapping[str, Any]):
    """Settings as verl's functions read them: `config.clip_ratio`, `config["clip_ratio"]`, `config.get(...)`.

    Nested mappings are of this class too. It cannot be written to.
    """

    _values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, object]) -> None:
        self.__dict__["_values"] = {
            key: VerlConfig(value) if isinstance(value, Mapping) else value for key, value in values.items()
        }

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        values: Mapping[str, Any] = self.__dict__.get("_values", {})  # none while a copy is being made
        if name in values:
            return values[name]
        near = difflib.get_close_matches(name, values, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise AttributeError(f"this config has no {name}{hint} It has {', '.join(sorted(values))}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"this config cannot be changed: {name} was set to {value!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"VerlConfig({dict(self)})"


@dataclass(frozen=True, kw_only=True)
class UserLoss:
    """What a user's loss returned for some rows of an optimizer batch."""

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
    own = dict(settings or {})
    values: dict[str, object] = {**own, **_fields(algorithm)}
    values.update(
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        loss_agg_mode=loss_agg_mode,
        policy_loss={**own, "loss_mode": name},
        global_batch_info={
            "dp_size": 1,
            "batch_num_tokens": totals.num_tokens,
            "global_batch_size": totals.num_samples,
            "loss_scale_factor": algorithm.loss_scale_factor,
        },
    )
    return VerlConfig(values)


def adv_config(
    algorithm: AlgorithmConfig,
    *,
    settings: Mapping[str, object] | None = None,
) -> VerlConfig:
    """The config that an estimator of verl's convention gets: the keys of AlgorithmConfig, verl's name
    for the division by the standard deviation, and the user's own settings (algorithm.adv_settings)."""
    values: dict[str, object] = {**(settings or {}), **_fields(algorithm)}
    values["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std
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
    _, own, lengths = torch.unique_consecutive(row_ids, return_inverse=True, return_counts=True)
    place = torch.arange(len(row_ids)) - (lengths.cumsum(0) - lengths)[own]
    shape = (len(lengths), int(lengths.max()))
    at = tuple(part.to(trained.device, non_blocking=True) for part in (own, place))
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


def estimate(
    function: AdvantageFn,
    declaration: Declaration,
    columns: Mapping[str, Tensor],
    settings: Mapping[str, object],
    algorithm: AlgorithmConfig | None,
    uids: Sequence[str] | None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] by an estimator of verl's convention; arguments as of
    `strop.algorithms.advantages.call_estimator`."""
    if algorithm is None:
        algorithm = AlgorithmConfig(
            norm_adv_by_std=bool(settings.get("norm_by_std", True)),
            gamma=cast(float, settings.get("gamma", 1.0)),
            lam=cast(float, settings.get("lam", 1.0)),
        )
    own = {key: value for key, value in settings.items() if key not in ADV_SHARED_SETTINGS}
    given_by_name = {"token_level_rewards", "rewards", "response_mask", "group_ids"} - declaration.needs
    index = np.array(columns["group_ids"].tolist() if uids is None else list(uids), dtype=object)
    return call_advantage_estimator(
        function,
        token_level_rewards=columns["token_level_rewards"],
        response_mask=columns["response_mask"],
        index=index,
        config=adv_config(algorithm, settings=own),
        extra={key: column for key, column in columns.items() if key not in given_by_name},
    )


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
    parameters = _parameters(function)
    if "rollout_is_weights" in columns and not _takes(parameters, "rollout_is_weights"):
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
    result = _call(function, parameters, offered)
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


def call_advantage_estimator(
    function: Callable[..., object],
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: object,
    config: VerlConfig,
    extra: Mapping[str, object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of an estimator of verl's convention; 0 outside the mask.

    Args:
        token_level_rewards: [B, R].
        response_mask: [B, R], true on tokens the policy sampled; the function gets it as 0 and 1.
        index: [B], equal for the samples of a prompt (an object array of uids, as verl has it).
        config: see `adv_config`.
        extra: further arguments by name: reward_baselines, old_log_probs, sum_pi_squared, rollout_is_weights,
            batch, non_tensor_batch.

    Raises:
        ValueError: a result that is not two tensors of the shape [B, R], or an advantage that is not finite.
    """
    offered: dict[str, object] = {
        **(extra or {}),
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask.to(torch.int64),
        "config": config,
        "index": index,
    }
    with torch.no_grad():
        result = _call(function, _parameters(function), offered)
    wanted = tuple(token_level_rewards.shape)
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) and tuple(part.shape) == wanted for part in result)
    ):
        raise ValueError(
            f"{dotted(function)} returned {describe(result)}, but an advantage estimator returns (advantages, "
            f"returns), two tensors of the shape of the rewards, {wanted}"
        )
    valid = response_mask.bool()
    advantages, returns = (torch.where(valid, part, torch.zeros_like(part)) for part in result)
    bad = int((~torch.isfinite(advantages)).sum())
    if bad:
        raise ValueError(f"{dotted(function)} returned {bad} advantages that are NaN or infinite")
    return advantages, returns


def _fields(algorithm: AlgorithmConfig) -> dict[str, object]:
    return {
        field.name: dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
        for field in dataclasses.fields(algorithm)
        for value in [getattr(algorithm, field.name)]
    }


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _call(
    function: Callable[..., object],
    parameters: Mapping[str, inspect.Parameter],
    offered: Mapping[str, object],
) -> object:
    """The function's result, given by keyword what it takes of what there is; None is given only where there is a
    parameter of that name."""
    missing = [name for name in required_parameters(function) if name not in offered]
    if missing:
        raise ValueError(
            f"{dotted(function)} requires {', '.join(missing)}, which nobody gives it: verl's convention has "
            f"{', '.join(offered)}. Give the parameter a default, or declare columns with needs=[...]"
        )
    arguments = {
        name: value
        for name, value in offered.items()
        if name in parameters or (value is not None and _takes(parameters, name))
    }
    return function(**arguments)


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
