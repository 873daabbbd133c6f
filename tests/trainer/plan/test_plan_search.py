"""Search for a placement: the answers of trying every one, and only axes that the engine takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_configs import SMALL, config_of
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from strop.trainer.config import Config
from strop.trainer.plan.candidates import axis_choices, candidates
from strop.trainer.plan.placement import Placement, placed_run, search
from strop.trainer.plan.plan import Plan, make_plan

EXPERTS = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
    intermediate_size=128, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=2, vocab_size=512,
)  # fmt: skip
PPO = ("algorithm=ppo", "algorithm.use_kl_loss=true")


def every_placement(config: Config, plan: Plan, *, devices: int, available: float) -> list[Placement]:
    """Those that fit, each planned as the run that its settings make."""
    tried = (
        placed_run(config, plan.roles, candidate, device=plan.device, available=available)
        for candidate in candidates(devices, axis_choices(plan.roles))
    )
    return [placement for placement in tried if placement is not None]


@pytest.mark.parametrize(
    ("model", "devices", "overrides"),
    [
        pytest.param(SMALL, 6, (), marks=pytest.mark.slow),
        (SMALL, 3, PPO),
        pytest.param(EXPERTS, 8, (), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("room", [0.5, 2.0])
def test_a_search_finds_what_trying_every_placement_finds(
    model: PreTrainedConfig, devices: int, overrides: tuple[str, ...], room: float, tmp_path: Path
) -> None:
    config = config_of(tmp_path, *overrides, model=model)
    plan = make_plan(config, device="h100", advises=False)
    available = room * plan.peak_bytes
    everything = every_placement(config, plan, devices=devices, available=available)
    found = search(config, plan.roles, plan.device, devices=devices, available=available)
    assert 0 < len(everything) == found.num_fitting < found.num_tried + (room > 1)
    assert found.fastest == min(everything, key=lambda placement: placement.time.step)
    assert found.cheapest == min(everything, key=lambda placement: placement.device_hours)


def test_axes_that_the_engine_refuses_are_not_tried(tmp_path: Path) -> None:
    # 6 heads and 2 key heads divide over 2 ranks, and not over 4; 3 layers make at most 3 stages.
    model = Qwen3Config(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=512,
    )  # fmt: skip
    choices = axis_choices(make_plan(config_of(tmp_path, model=model), device="h100", advises=False).roles)
    assert (choices.tensor, choices.pipeline, choices.experts) == ([1, 2], [1, 2], [1])
    of_experts = make_plan(config_of(tmp_path, model=EXPERTS), device="h100", advises=False).roles
    assert axis_choices(of_experts).experts == [1, 8, 16]
