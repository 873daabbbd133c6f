from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from strop.algorithms.config import AlgorithmConfig


def test_clip_ratio_alone_sets_both_sides() -> None:
    # If low and high had defaults of their own, clip_ratio alone would do nothing.
    config = AlgorithmConfig(clip_ratio=0.1)
    assert (config.clip_low, config.clip_high) == (0.1, 0.1)


def test_low_and_high_override_their_side() -> None:
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.28).clip_high == 0.28
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.28).clip_low == 0.1
    assert AlgorithmConfig(clip_ratio=0.1, clip_ratio_low=0.0).clip_low == 0.0


def test_the_constant_divisor_has_no_default() -> None:
    with pytest.raises(
        ValueError, match="algorithm.loss_scale_factor is not set: set it, usually to data.max"
    ):
        AlgorithmConfig(loss_agg_mode="seq-mean-token-sum-norm")
    config = AlgorithmConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512)
    assert config.loss_scale_factor == 512


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_scale_factor": 512.0}, "loss_agg_mode is token-mean: remove it, or change the mode"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 0.0}, "finite number above 0"),
        ({"loss_agg_mode": "mean"}, "algorithm.loss_agg_mode is 'mean'; known: token-mean"),
        ({"kl_loss_type": "full"}, "algorithm.kl_loss_type is 'full'; known: k1"),
        ({"clip_ratio": -0.1}, "algorithm.clip_ratio is -0.1, but a clip range is"),
        ({"clip_ratio_high": float("nan")}, "algorithm.clip_ratio_high is nan"),
        ({"clip_ratio_c": 1.0}, "algorithm.clip_ratio_c is 1.0, but dual clip needs a value above 1"),
        ({"entropy_coeff": float("inf")}, "algorithm.entropy_coeff is inf"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**values)


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        AlgorithmConfig().clip_ratio = 0.3  # type: ignore[misc]


def test_config_and_metric_types_import_no_torch() -> None:
    code = "import sys, strop.algorithms.config, strop.algorithms.reduce; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
