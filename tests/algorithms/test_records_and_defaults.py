"""Records cannot be changed, and numbers that nobody sets are those of the papers."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest
from algorithms.contract import estimators, policy_losses

import strop.algorithms
import strop.cli.check_functions
from strop.algorithms import kl_controller, masked_ops, resampling, specs
from strop.algorithms.advantages import (
    gae,
    group_baselines,
    group_relative,
    optimal_token_baseline,
    prime,
    reinforce_pp,
    reward_to_go,
)
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.group_functions import shaping
from strop.algorithms.losses import covariance, distillation, dppo, gspo, smooth, terms
from strop.algorithms.verl_aggregation import agg_loss
from strop.workers import off_policy_metrics

MODULES = [
    importlib.import_module(found.name)
    for package in (strop.algorithms, strop.cli.check_functions)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
RECORDS = [
    record
    for module in MODULES
    for record in vars(module).values()
    if dataclasses.is_dataclass(record) and isinstance(record, type) and record.__module__ == module.__name__
]
BY_POSITION = {"AnswerEnd", "RuleBreach", "LossBatch", "Max", "Mean", "Min", "Seen", "Turn", "_Split"}
"""Records of a few parts, which are made by position."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_cannot_be_changed(record: type) -> None:
    some = object.__new__(record)
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(some, field.name, None)
        assert field.kw_only == (record.__name__ not in BY_POSITION), field.name


DEFAULTS: list[tuple[Callable[..., object], dict[str, object]]] = [
    # Cui et al. 2025: 2e-4 of the tokens, covariances between 1 and 5; kl_cov: 2e-4 for a model of 32B, weight 1.
    (
        covariance.select_clip_cov,
        {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "seed": 0},
    ),
    (covariance.select_kl_cov, {"kl_cov_ratio": 0.0002}),
    (covariance.kl_cov_loss, {"ppo_kl_coef": 1.0}),
    # Gao et al. 2025: 1.0 and 1.05.
    (smooth.sapo_loss, {"tau_pos": 1.0, "tau_neg": 1.05}),
    (smooth.dro_loss, {"dro_beta": 1.0}),
    (dppo.dppo_tv_loss, {"truncation": 20.0}),
    (dppo.dppo_kl_loss, {"truncation": 20.0}),
    (distillation.topk_forward_kl, {"with_tail": False}),
    (distillation.reverse_kl_terms, {"kind": "k1+"}),
    # Shao et al. 2024, with the eps of the implementations.
    (group_relative.grpo_advantages, {"norm_by_std": True}),
    (group_baselines.grpo_passk_advantages, {"norm_by_std": True}),
    (group_baselines.gpg_advantages, {"f_norm": 1.0, "count_mixed_groups": False}),
    (reinforce_pp.gdpo_advantages, {"reward_weights": ()}),
    # Without a discount and without a bias: the return of the whole answer.
    (gae.gae, {"gamma": 1.0, "lam": 1.0}),
    (reward_to_go.reinforce_plus_plus, {"gamma": 1.0}),
    (
        prime.prime_advantages,
        {"gamma": 1.0, "process_weight": 1.0, "outcome_weight": 1.0, "process_norm": True, "whiten": True},
    ),
    (optimal_token_baseline.token_baseline_advantages, {"handle_zero_tail": False}),
    (optimal_token_baseline.optimal_token_baseline, {"rollout_is_weights": None, "handle_zero_tail": False}),
    (
        optimal_token_baseline.tir_optimal_token_baseline,
        {"rollout_is_weights": None, "handle_zero_tail": False},
    ),
    (specs.check_estimator, {"norm_by_std": True, "gamma": 1.0, "lam": 1.0, "settings": None}),
    (shaping.overlong_penalty, {"factor": 1.0}),
    (resampling.pf_ppo_weights, {"power": 2.0}),
    (
        agg_loss,
        {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None},
    ),
    (policy_losses.check_policy_loss, {"settings": None, "loss_agg_mode": None, "seed": 0}),
    (
        estimators.check_adv_estimator,
        {"traits": None, "declaration": None, "settings": None, "seed": 0, "num_batches": 8},
    ),
]


@pytest.mark.parametrize(("function", "defaults"), DEFAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_numbers_that_nobody_sets(function: Callable[..., object], defaults: dict[str, object]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults


def test_bounds_of_exponents_and_small_numbers_beside_divisors() -> None:
    assert terms.LOG_RATIO_BOUND == off_policy_metrics.LOG_RATIO_BOUND == 20.0
    assert gspo.SEQUENCE_LOG_RATIO_MAX == 10.0
    assert masked_ops.WHITEN_EPS == dppo.BINARY_KL_EPS == distillation.TAIL_EPS == 1e-8
    assert kl_controller.MAX_RELATIVE_ERROR == 0.2


def test_an_algorithm_without_settings_is_grpo_with_ppos_clip() -> None:
    config = AlgorithmConfig()
    assert (config.clip_low, config.clip_high, config.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (config.gamma, config.lam, config.norm_adv_by_std) == (1.0, 1.0, True)
