from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig


def test_clip_ratio_alone_sets_both_sides() -> None:
    # If low and high had defaults of their own, clip_ratio alone would do nothing.
    config = AlgorithmConfig(clip_ratio=0.1)
    assert (config.clip_low, config.clip_high) == (0.1, 0.1)


def test_low_and_high_override_their_side() -> None:
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.28).clip_high == 0.28
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.28).clip_low == 0.1
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_low=0.0).clip_low == 0.0


def test_the_constant_divisor_belongs_to_its_mode() -> None:
    config = AlgorithmConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512)
    assert config.loss_scale_factor == 512


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_scale_factor": 512.0}, "and that is not set: remove it, or change the mode"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 0.0}, "finite number above 0"),
        ({"loss_agg_mode": "mean"}, "algorithm.loss_agg_mode is 'mean', but it needs one of token-mean"),
        ({"kl_loss_type": "full"}, "algorithm.kl_loss_type is 'full', but it needs one of k1"),
        (
            {"clip_ratio": -0.1},
            "algorithm.clip_ratio is -0.1, but it needs a finite number of at least 0: usual values",
        ),
        ({"clip_ratio_high": float("nan")}, "algorithm.clip_ratio_high is nan"),
        (
            {"clip_ratio_c": 1.0},
            "algorithm.clip_ratio_c is 1.0, but it needs a number above 1: at 1 or below",
        ),
        ({"kl_penalty": "full"}, "algorithm.kl_penalty is 'full', but it needs one of k1"),
        ({"gamma": 1.5}, "algorithm.gamma is 1.5, but it needs a number of at least 0 and at most 1"),
        ({"lam": float("nan")}, "algorithm.lam is nan, but it needs a number of at least 0"),
        ({"cliprange_value": 0.0}, "algorithm.cliprange_value is 0.0, but it needs a number above 0"),
        ({"entropy_coeff": float("inf")}, "algorithm.entropy_coeff is inf"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**values)


def test_the_defaults_are_those_of_verl() -> None:
    config = AlgorithmConfig()
    assert (config.gamma, config.lam, config.cliprange_value) == (1.0, 1.0, 0.5)
    assert (config.use_kl_in_reward, config.kl_penalty) == (False, "kl")
    control = config.kl_ctrl
    assert (control.type, control.kl_coef, control.horizon, control.target_kl) == ("fixed", 1e-3, 10_000, 0.1)


def test_kl_may_be_in_the_reward_and_in_the_loss() -> None:
    config = AlgorithmConfig(use_kl_in_reward=True, use_kl_loss=True)
    assert config.use_kl_in_reward
    assert config.use_kl_loss


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        AlgorithmConfig().clip_ratio = 0.3  # type: ignore[misc]


def test_config_and_metric_types_import_no_torch() -> None:
    code = "import sys, strop.algorithms.config, strop.utils.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"metric": "score"},
        {"max_rounds": 3},
        {"at_limit": "stop"},
        {"highest_mean": 0.9},
        {"defer_failed": 1},
    ],
)
def test_a_filter_that_is_off_has_no_settings(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(
        ValueError, match=f"filter_groups.{name} is set, but .*enable is false: set that to true"
    ):
        FilterGroupsConfig(**settings)
    assert FilterGroupsConfig(enable=True, **settings).enable
