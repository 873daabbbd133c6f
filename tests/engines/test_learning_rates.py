"""Learning rates that are too large for a trained model: limits and sentences."""

from __future__ import annotations

from typing import Any

import pytest

from strop.engines.config import OptimizerConfig
from strop.engines.learning_rates import too_large, unfinished_warm_up


@pytest.mark.parametrize(
    ("lr", "has_adapter", "says"),
    [
        (0.01, False, None),
        (0.011, False, "may destroy"),
        (0.1, False, "destroys"),
        # LoRA's usual rates are ten times larger, and so are both limits.
        (0.011, True, None),
        (0.1, True, None),
        (0.11, True, "may destroy"),
        (1.0, True, "destroys"),
    ],
)
def test_both_limits_are_ten_times_larger_with_adapters(
    lr: float, has_adapter: bool, says: str | None
) -> None:
    found = too_large("sft", OptimizerConfig(lr=lr), has_adapter=has_adapter)
    assert (found is None) == (says is None)
    if found is not None:
        assert found.advice.startswith(f"that {says} what a trained model has learned; usual are ")
        assert found.is_destroying == (says == "destroys")
        assert ("every weight of the adapters" in found.text) == has_adapter


@pytest.mark.parametrize("warmup", [{"warmup_steps": 10}, {"warmup_share": 0.1}])
def test_with_a_warm_up_the_first_update_is_a_small_one(warmup: dict[str, Any]) -> None:
    # The warm-up begins at 0: the first update moves weights by a part of the rate only.
    found = too_large("actor", OptimizerConfig(lr=1.0, **warmup), has_adapter=False)
    assert found is not None
    assert (
        "actor.optim.lr=1 moves every weight by about that much in an update after the warm-up" in found.text
    )
    plain = too_large("actor", OptimizerConfig(lr=1.0), has_adapter=False)
    assert plain is not None
    assert "in the first update, more than weights are in size" in plain.text


def test_a_warm_up_that_the_run_does_not_come_to_the_end_of_is_said() -> None:
    # Update n of a warm-up over 100 has n / 100 of the rate: the third and last one 3 %.
    optim = OptimizerConfig(warmup_steps=100)
    assert "3 optimizer steps: the learning rate comes to 3.0% of sft.optim.lr at most" in unfinished_warm_up(
        "sft", optim, 3
    )
    assert unfinished_warm_up("sft", optim, 100) == ""
    assert unfinished_warm_up("sft", OptimizerConfig(warmup_share=1.0), 3) == ""
