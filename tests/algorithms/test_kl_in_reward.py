"""The KL penalty on token rewards, and the controllers of its coefficient."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from references import critics as reference
from strop.algorithms.kl_controller import kl_controller
from strop.algorithms.reward_kl import less_kl, reward_kl
from strop.algorithms.reward_kl_config import KlControlConfig


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
OLD = double([[-1.0, -2.0, math.nan], [-3.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
REF = double([[-1.5, -1.0, 0.0], [-3.25, math.inf, 0.0], [0.0, 0.0, 0.0]])


def test_the_penalty_by_hand() -> None:
    # k1 is old - ref: 0.5 and -1 in row 0, 0.25 in row 1. Coefficient 2.
    kl, mean = reward_kl(OLD, REF, MASK, kind="kl")
    scores = double([[0.0, 0.0, 7.0], [1.0, 5.0, 0.0], [0.0, 0.0, 3.0]])
    rewards = less_kl(scores, MASK, kl, 2.0)
    # The scores of tokens that were not sampled stay, and no NaN comes from them.
    torch.testing.assert_close(rewards, double([[-1.0, 2.0, 7.0], [0.5, 5.0, 0.0], [0.0, 0.0, 3.0]]))
    # Row means -0.25 and 0.25; the row without a sampled token has none.
    assert mean.item() == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("kind", "row_0", "row_1"),
    [
        ("abs", 0.75, 0.25),
        ("k2", (0.125 + 0.5) / 2, 0.03125),
        ("k3", (math.exp(-0.5) + 0.5 - 1 + math.e - 1 - 1) / 2, math.exp(-0.25) + 0.25 - 1),
        ("k1+", -0.25, 0.25),
    ],
)
def test_every_estimator_can_be_the_penalty(kind: str, row_0: float, row_1: float) -> None:
    assert reward_kl(OLD, REF, MASK, kind=kind)[1].item() == pytest.approx((row_0 + row_1) / 2, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    controller = kl_controller(KlControlConfig(kl_coef=0.3))
    controller.update(100.0, 512)
    assert controller.value == 0.3
    assert controller.state() == {}


def test_an_adaptive_coefficient_by_hand() -> None:
    # Target 0.1, horizon 100, 10 samples a step: at most 2 % per step.
    #   KL 0.11: error 0.1 -> factor 1.01. KL 5: error capped at 0.2 -> 1.02. KL 0: capped at -0.2 -> 0.98.
    controller = kl_controller(KlControlConfig(type="adaptive", kl_coef=1.0, target_kl=0.1, horizon=100))
    for kl, expected in ((0.11, 1.01), (5.0, 1.01 * 1.02), (0.0, 1.01 * 1.02 * 0.98)):
        controller.update(kl, 10)
        assert controller.value == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_coefficient_equals_the_reference_and_moves_towards_the_target() -> None:
    kls = [0.05, 0.3, 0.101, 0.099, -0.2, 0.1]
    controller = kl_controller(KlControlConfig(type="adaptive", kl_coef=0.02, horizon=1000, target_kl=0.1))
    seen = []
    for kl in kls:
        before = controller.value
        controller.update(kl, 64)
        seen.append(controller.value)
        assert (controller.value > before) == (kl > 0.1)
    assert seen == pytest.approx(reference.adaptive_kl(0.02, kls, 0.1, 1000, 64), rel=1e-12)


def test_a_restored_controller_goes_on_where_it_was() -> None:
    config = KlControlConfig(type="adaptive", kl_coef=0.02, horizon=100)
    first = kl_controller(config)
    first.update(3.0, 40)
    second = kl_controller(config)
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.value == first.value != 0.02
    first.update(0.0, 40)
    second.update(0.0, 40)
    assert second.value == first.value
    with pytest.raises(ValueError, match=r"no coefficient of the KL penalty \(found: nothing\); it is of a"):
        second.load_state({})


def test_what_no_coefficient_can_follow_is_refused() -> None:
    controller = kl_controller(KlControlConfig(type="adaptive", kl_coef=1.0, target_kl=0.1, horizon=100))
    with pytest.raises(ValueError, match="the KL of the policy to the reference is nan"):
        controller.update(math.nan, 10)
    with pytest.raises(
        ValueError, match=r"horizon is 100 samples, but one step has 500, .* set it above 100"
    ):
        controller.update(0.0, 500)
    controller.update(0.0, 499)
    assert controller.value > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "linear"}, "algorithm.kl_ctrl.type is 'linear', but it needs one of fixed, adaptive"),
        ({"kl_coef": -0.1}, "algorithm.kl_ctrl.kl_coef is -0.1, but it needs a finite number of at least 0"),
        ({"type": "adaptive", "kl_coef": 0.0}, "is 0, and an adaptive coefficient is changed by factors"),
        ({"horizon": 0}, "algorithm.kl_ctrl.horizon is 0, but it needs a whole number"),
        ({"target_kl": 0.0}, "algorithm.kl_ctrl.target_kl is 0.0, but it needs a finite number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KlControlConfig(**values)  # type: ignore[arg-type]
