"""The registry of advantage estimators, and the one way to call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor

from strop.algorithms.advantages import verl_convention
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.registry import Declaration, FunctionRegistry, settings_for
from strop.algorithms.results import describe
from strop.algorithms.specs import ADV_DECLARATIONS, adv_estimator_declaration
from strop.utils.registry import name_of

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
Outcome = TypeVar("Outcome", bound=Callable[..., Tensor])

OPTIONAL_COLUMNS = frozenset({"rollout_is_weights"})
"""Columns that an estimator gets if it has a parameter of that name and the batch has the column."""

ADV_ESTIMATOR_REGISTRY: FunctionRegistry[AdvantageFn] = FunctionRegistry(
    ADV_DECLARATIONS.kind,
    verl_parameters=frozenset({"config", "index"}),
    optional_columns=OPTIONAL_COLUMNS,
    declarations=ADV_DECLARATIONS,
)
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
"""Decorator: `@register_adv_est(name, needs=[...], settings=[...], group_relative=True)`.

A function with a parameter `config` or `index` follows verl's convention; `needs` then names what it takes beside
the rewards and the mask: values (which brings a critic), reward_baselines (a greedy answer per prompt), ref_log_prob,
old_log_probs, sum_pi_squared, reward_parts, process_rewards (which brings a process reward model)."""

implements = ADV_ESTIMATOR_REGISTRY.implements
"""Decorator of the built-in estimators, whose declarations stand in `strop.algorithms.specs`."""


def implements_outcome(*names: str) -> Callable[[Outcome], Outcome]:
    """Decorator of a built-in estimator that gives advantages [B, R] alone, because its returns are the same."""

    def add(function: Outcome) -> Outcome:
        @functools.wraps(function)
        def estimator(**arguments: Tensor) -> tuple[Tensor, Tensor]:
            advantages = function(**arguments)
            return advantages, advantages

        implements(*names)(estimator)
        return function

    return add


def get_adv_estimator_fn(name: str | Enum) -> AdvantageFn:
    """The function registered under `name`; ValueError with the known names if there is none."""
    return ADV_ESTIMATOR_REGISTRY[name_of(name)]


def adv_estimator_columns(name: str | Enum) -> frozenset[str]:
    """Every column that the estimator under `name` takes: those it needs, and those it uses if there."""
    function, declaration = get_adv_estimator_fn(name), adv_estimator_declaration(name)
    return declaration.needs | _optional_columns(function, declaration)


def estimate_advantages(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    settings: Mapping[str, object],
    columns: Mapping[str, Tensor] | None = None,
    algorithm: AlgorithmConfig | None = None,
    uids: Sequence[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of the estimator `name`, given what it declared.

    Args:
        token_level_rewards: [B, R], 0 where there is no reward; `rewards` [B] is its sum over R.
        response_mask: [B, R], true on tokens the policy sampled.
        group_ids: [B] int64, equal for samples of one prompt (see `group_ids_of`).
        settings: numbers and switches by name, shared ones and those of algorithm.adv_settings; those the
            estimator does not have are not passed.
        columns: further columns by name (values, ref_log_prob, reward_baselines, ...).
        algorithm: the config that a function of verl's convention reads; not given: the shared settings in
            an otherwise default config.
        uids: what such a function gets as `index`; not given: the group ids.

    Raises:
        ValueError: unknown name, a missing column, rewards that are not finite, or a result of another shape.
    """
    return call_estimator(
        name,
        get_adv_estimator_fn(name),
        adv_estimator_declaration(name),
        columns={
            **(columns or {}),
            "token_level_rewards": token_level_rewards,
            "rewards": token_level_rewards.sum(dim=-1),
            "response_mask": response_mask,
            "group_ids": group_ids,
        },
        settings=settings,
        algorithm=algorithm,
        uids=uids,
    )


def call_estimator(
    name: str,
    function: AdvantageFn,
    declaration: Declaration,
    *,
    columns: Mapping[str, Tensor],
    settings: Mapping[str, object],
    algorithm: AlgorithmConfig | None = None,
    uids: Sequence[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `estimate_advantages`, for a function that need not be registered; `columns` holds all of them.

    Raises:
        ValueError: a missing column, or a result that is not two tensors [B, R].
    """
    missing = sorted(declaration.needs - columns.keys())
    if missing:
        raise ValueError(
            f"advantage estimator {name!r} needs the columns {', '.join(missing)}, but the batch has "
            f"{', '.join(sorted(columns))}"
        )
    if declaration.is_user_convention:
        return verl_convention.estimate(function, declaration, columns, settings, algorithm, uids)
    passed = declaration.needs | (_optional_columns(function, declaration) & columns.keys())
    arguments: dict[str, object] = {
        **settings_for(function, declaration, settings),
        **{key: columns[key] for key in passed},
    }
    with torch.no_grad():
        result = function(**arguments)
    _check_result(name, result, columns["response_mask"])
    return result


def group_ids_of(uids: Sequence[str]) -> Tensor:
    """[B] int64: equal numbers for equal uids, counted up in the order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def _optional_columns(function: AdvantageFn, declaration: Declaration) -> frozenset[str]:
    if declaration.is_user_convention:
        return OPTIONAL_COLUMNS
    return OPTIONAL_COLUMNS & inspect.signature(function).parameters.keys()


def _check_result(name: str, result: object, response_mask: Tensor) -> None:
    """Check the result of an estimator where it is called, so that the message can name the function."""
    advice = f"return (advantages, returns), two tensors of shape {list(response_mask.shape)}"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"advantage estimator {name!r} returned {describe(result)}: {advice}")
    for label, tensor in zip(("advantages", "returns"), result, strict=True):
        if not isinstance(tensor, Tensor) or tensor.shape != response_mask.shape:
            raise ValueError(f"advantage estimator {name!r} returned {describe(tensor)} as {label}: {advice}")
