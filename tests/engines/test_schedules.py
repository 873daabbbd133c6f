"""The learning rate of each step, in closed form."""

from __future__ import annotations

import math

import pytest

from strop.engines.config import OptimizerConfig
from strop.engines.optimizer import learning_rate


def test_schedules_in_closed_form() -> None:
    def rates(schedule: str, *, warmup: int = 0, total: int | None = 5, floor: float = 0.0) -> list[float]:
        config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)  # type: ignore[arg-type]
        return [learning_rate(config, step, total) for step in range(5)]

    assert rates("constant", total=None) == [2.0] * 5
    assert rates("constant", warmup=4, total=None) == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates("linear") == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    assert rates("linear", floor=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert rates("linear", warmup=2) == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    half = math.sqrt(0.5)  # cos(pi / 4)
    assert rates("cosine") == pytest.approx([2.0, 1 + half, 1.0, 1 - half, 0.0], abs=1e-12)
    assert rates("cosine", floor=0.1) == pytest.approx(
        [0.2 + 0.9 * x for x in (2.0, 1 + half, 1.0, 1 - half, 0.0)]
    )
    # Beyond the last step the rate stays at its end.
    assert learning_rate(OptimizerConfig(lr=2.0, schedule="linear", min_lr_ratio=0.25), 9, 5) == 0.5


def test_a_warm_up_may_be_a_share_of_all_steps() -> None:
    def rates(schedule: str, share: float, total: int) -> list[float]:
        config = OptimizerConfig(lr=2.0, schedule=schedule, warmup_share=share)  # type: ignore[arg-type]
        return [learning_rate(config, step, total) for step in range(total)]

    assert rates("constant", 0.4, 10) == [0.5, 1.0, 1.5, 2.0, *[2.0] * 6]
    assert rates("linear", 0.4, 5) == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    assert rates("wsd", 0.5, 4) == pytest.approx([1.0, 2.0, 2.0, 0.0])
    assert rates("constant", 0.1, 4) == [2.0] * 4  # 0.4 of a step is none
    with pytest.raises(
        ValueError, match="optim.warmup_share is set for this role, which needs to know the number"
    ):
        learning_rate(OptimizerConfig(warmup_share=0.1), 0, None)
    with pytest.raises(
        ValueError, match=r"optim.warmup_steps is 3 and optim.warmup_share is 0\.1, which both say"
    ):
        OptimizerConfig(warmup_steps=3, warmup_share=0.1)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_decaying_schedule_needs_the_number_of_steps(schedule: str) -> None:
    with pytest.raises(
        ValueError, match=f"optim.schedule is {schedule} for this role, which needs to know the number"
    ):
        learning_rate(OptimizerConfig(schedule=schedule), 0, None)  # type: ignore[arg-type]


def test_wsd_stays_at_the_peak_and_decays_over_the_last_share() -> None:
    def rates(total: int, share: float, *, warmup: int = 0, floor: float = 0.0) -> list[float]:
        config = OptimizerConfig(
            lr=2.0, schedule="wsd", decay_share=share, warmup_steps=warmup, min_lr_ratio=floor
        )
        return [learning_rate(config, step, total) for step in range(total)]

    # Four of ten steps decay, in quarters of the way down.
    assert rates(10, 0.4) == pytest.approx([2.0] * 6 + [1.5, 1.0, 0.5, 0.0])
    assert rates(10, 0.4, floor=0.5) == pytest.approx([2.0] * 6 + [1.75, 1.5, 1.25, 1.0])
    assert rates(8, 0.25, warmup=2) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.0])
    # At least one step decays, and at most all after the warm-up.
    assert rates(4, 0.01) == pytest.approx([2.0, 2.0, 2.0, 0.0])
    assert rates(4, 1.0) == pytest.approx([1.5, 1.0, 0.5, 0.0])
    assert rates(4, 1.0, warmup=2) == pytest.approx([1.0, 2.0, 1.0, 0.0])
    config = OptimizerConfig(lr=2.0, schedule="wsd", decay_share=0.5, min_lr_ratio=0.25)
    assert learning_rate(config, 99, 10) == 0.5  # after the last step


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("decay_share", 0.0, "optim.decay_share is 0.0, but it needs a number above 0 and at most 1"),
        ("decay_share", 1.5, "optim.decay_share is 1.5"),
        ("schedule", "step", "optim.schedule is 'step', but it needs one of constant, linear, cosine, wsd"),
        (
            "name",
            "adam",
            "optim.name is 'adam', but it needs one of adamw, adamw_8bit, muon; did you mean adamw",
        ),
        ("momentum", 1.0, "optim.momentum is 1.0, but it needs a number of at least 0 and below 1"),
    ],
)
def test_wrong_settings_are_refused(field: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OptimizerConfig(**{field: value})  # type: ignore[arg-type]
