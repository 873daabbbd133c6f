"""Advantage estimators in verl's calling convention.

    (token_level_rewards, response_mask, config=None, index=None, **kwargs) -> (advantages, returns)

A function is given by keyword what it has parameters for, as padded tensors [B, R], and a config that is read
as an object or as a mapping. What it returns is checked here, so that an error names the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.registry import Declaration
from strop.algorithms.results import describe
from strop.algorithms.specs import ADV_SHARED_SETTINGS
from strop.algorithms.verl_config import VerlConfig, algorithm_fields, call_with_known, parameters_of
from strop.utils.registry import dotted


def adv_config(
    algorithm: AlgorithmConfig,
    *,
    settings: Mapping[str, object] | None = None,
) -> VerlConfig:
    """The config that an estimator of verl's convention gets: the keys of AlgorithmConfig, verl's name
    for the division by the standard deviation, and the user's own settings (algorithm.adv_settings)."""
    values: dict[str, object] = {**(settings or {}), **algorithm_fields(algorithm)}
    values["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std
    return VerlConfig(values)


def estimate(
    function: Callable[..., tuple[Tensor, Tensor]],
    declaration: Declaration,
    columns: Mapping[str, Tensor],
    settings: Mapping[str, object],
    algorithm: AlgorithmConfig | None,
    uids: Sequence[str] | None,
    objects: type[RowObjects] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] by an estimator of verl's convention; arguments as of
    `strop.algorithms.advantages.call_estimator`, and the class of its `non_tensor_batch`."""
    if algorithm is None:
        algorithm = AlgorithmConfig(
            norm_adv_by_std=bool(settings.get("norm_by_std", True)),
            gamma=cast(float, settings.get("gamma", 1.0)),
            lam=cast(float, settings.get("lam", 1.0)),
        )
    own_settings = {key: value for key, value in settings.items() if key not in ADV_SHARED_SETTINGS}
    given_by_name = {"token_level_rewards", "rewards", "response_mask", "group_ids"} - declaration.needs
    index = np.array(columns["group_ids"].tolist() if uids is None else list(uids), dtype=object)
    return call_advantage_estimator(
        function,
        token_level_rewards=columns["token_level_rewards"],
        response_mask=columns["response_mask"],
        index=index,
        config=adv_config(algorithm, settings=own_settings),
        extra={
            **{key: column for key, column in columns.items() if key not in given_by_name},
            "batch": {**columns, "response_mask": columns["response_mask"].to(torch.int64)},
            "non_tensor_batch": (objects or RowObjects).of(
                index, columns.get("reward_parts"), algorithm.reward_keys
            ),
        },
    )


class RowObjects(dict[str, NDArray[np.object_]]):
    """`non_tensor_batch` of an estimator: uid, and the parts of the reward that it asks for, by name."""

    @classmethod
    def of(cls, uids: NDArray[np.object_], parts: Tensor | None, keys: Sequence[str]) -> RowObjects:
        """Args:
        uids: [B].
        parts: [B, K] of an estimator that declares reward_parts.
        keys: the K names, algorithm.reward_keys.
        """
        objects = cls(uid=uids)
        if parts is not None:
            for key, column in zip(keys, parts.T.tolist(), strict=False):
                objects[key] = np.array(column, dtype=object)
        return objects

    def __missing__(self, name: str) -> NDArray[np.object_]:
        raise KeyError(
            f"non_tensor_batch of an estimator has {', '.join(self)} and no {name!r}: for a part of the reward "
            f"register it with needs=['reward_parts'], and name the part in algorithm.reward_keys"
        )


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
        result = call_with_known(function, parameters_of(function), offered)
    expected_shape = tuple(token_level_rewards.shape)
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) and tuple(part.shape) == expected_shape for part in result)
    ):
        raise ValueError(
            f"{dotted(function)} returned {describe(result)}, but an advantage estimator returns (advantages, "
            f"returns), two tensors of the shape of the rewards, {expected_shape}"
        )
    valid = response_mask.bool()
    advantages, returns = (torch.where(valid, part, torch.zeros_like(part)) for part in result)
    bad = int((~torch.isfinite(advantages)).sum())
    if bad:
        raise ValueError(f"{dotted(function)} returned {bad} advantages that are NaN or infinite")
    return advantages, returns
