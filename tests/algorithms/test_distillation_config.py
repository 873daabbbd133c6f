"""Settings of distillation that cannot apply are refused, and those that can are read."""

from __future__ import annotations

import pytest

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.algorithms.rollout_correction_config import CorrectionConfig


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "jsd"}, "kind is 'jsd', but it needs one of none, reverse_kl, forward_kl"),
        ({"coef": 0.5}, "coef is 0.5, but algorithm.distillation.kind=none has no teacher"),
        ({"top_k": 8}, "top_k is 8, but algorithm.distillation.kind=none has no teacher"),
        (
            {"kind": "reverse_kl", "top_k": 8},
            "it is a setting of algorithm.distillation.kind=forward_kl",
        ),
        (
            {"kind": "reverse_kl", "with_tail": True},
            "it is a setting of algorithm.distillation.kind=forward",
        ),
        (
            {"kind": "forward_kl", "kl_kind": "k3"},
            "it is a setting of algorithm.distillation.kind=reverse_kl",
        ),
        ({"kind": "forward_kl", "top_k": 0}, "top_k is 0, but it needs a whole number of at least 1"),
        ({"kind": "forward_kl", "coef": 0.0}, "coef is 0.0, but it needs a finite number above 0"),
        ({"kind": "forward_kl", "coef": float("nan")}, "coef is nan, but it needs a finite number above 0"),
        ({"kind": "reverse_kl", "kl_kind": "k9"}, "kl_kind is 'k9', but it needs one of k1, kl"),
        ({"kind": "reverse_kl", "kl_kind": "kl"}, "kl_kind is kl, whose gradient averages to zero"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="algorithm.distillation") as caught:
        DistillationConfig(**settings)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"policy_coef": 0.5}, "policy_coef is 0.5, but there is no teacher"),
        ({"policy_coef": -1.0}, "policy_coef is -1.0, but it needs a finite number of at least 0"),
    ],
)
def test_a_weight_of_the_policy_loss_needs_a_teacher(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AlgorithmConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("use_kl_in_reward", {"use_kl_in_reward": True}),
        ("correction.weights", {"correction": CorrectionConfig(weights="token")}),
        ("filter_groups.enable", {"filter_groups": FilterGroupsConfig(enable=True)}),
    ],
)
def test_without_a_policy_loss_nothing_may_change_advantages(key: str, setting: dict[str, object]) -> None:
    teacher = DistillationConfig(kind="forward_kl")
    with pytest.raises(ValueError, match=rf"algorithm\.{key} is set, but it changes what advantages teach"):
        AlgorithmConfig(distillation=teacher, policy_coef=0.0, **setting)  # type: ignore[arg-type]
    assert AlgorithmConfig(distillation=teacher, policy_coef=0.1, **setting).policy_coef == 0.1  # type: ignore[arg-type]
    assert AlgorithmConfig(distillation=teacher, policy_coef=0.0).policy_coef == 0.0


def test_nothing_is_on_by_default() -> None:
    assert not AlgorithmConfig().distillation.is_on
    assert AlgorithmConfig(distillation=DistillationConfig(kind="reverse_kl")).distillation.is_on
