"""Suggestions of a plan: given as overrides, the run is the one that was priced."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_configs import config_of
from transformers import Qwen3Config

from strop.trainer.plan.generation_time import generation_seconds
from strop.trainer.plan.placement import Placement, search
from strop.trainer.plan.plan import DEVICE_RESERVE, make_plan
from strop.trainer.plan.smallest_change import smallest_change

GRPO = ()
PPO = ("algorithm=ppo", "algorithm.use_kl_loss=true")
PLACED = (
    "resources.runtime=ray", "resources.ranks=4", "resources.nodes=2", "model.gradient_checkpointing=true",
    "actor.engine.tensor_parallel=2", "rollout.engine=vllm", "rollout.vllm.tensor_parallel=2",
    "resources.apart={rollout:1}", "rollout.max_staleness=1",
)  # fmt: skip
GIB = 2**30


def check_again(placement: Placement, folder: Path, *overrides: str) -> None:
    """Plan the suggestion as a run of its own."""
    config = config_of(folder, *overrides, *placement.settings)
    assert config == placement.config
    plan = make_plan(config, device="h100", advises=False)
    assert plan.peak_bytes == placement.peak_bytes
    assert plan.step_seconds == pytest.approx(placement.time.step)
    assert plan.num_devices == placement.devices
    assert plan.device_hours_per_step == pytest.approx(placement.device_hours)


@pytest.mark.parametrize("overrides", [GRPO, pytest.param(PPO, marks=pytest.mark.slow), PLACED])
def test_a_placement_costs_as_a_run_what_it_did_in_the_search(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    config = config_of(tmp_path, *overrides)
    plan = make_plan(config, device="h100", advises=False)
    found = search(config, plan.roles, plan.device, devices=16, available=plan.memory_bytes)
    assert found.fastest is not None
    assert found.cheapest is not None
    check_again(found.fastest, tmp_path, *overrides)
    check_again(found.cheapest, tmp_path, *overrides)


@pytest.mark.parametrize("overrides", [pytest.param(GRPO, marks=pytest.mark.slow), PPO])
def test_the_smallest_change_is_one_of_every_role(overrides: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*overrides, "data.val_files=[x]")
    phases = make_plan(config_of(tmp_path, *settings), device="h100", advises=False).phases
    memory = 0.6 * max(phase.device_bytes for phase in phases if "update" in phase.phase) / GIB
    plan = make_plan(config_of(tmp_path, *settings), device="h100", memory_gib=memory)
    assert not plan.fits
    assert plan.change is not None
    again = config_of(tmp_path, *settings, *plan.change.settings)
    assert len({engine.max_tokens_per_device for engine in again.used_engines.values()}) == 1
    changed = make_plan(again, device="h100", memory_gib=memory, advises=False)
    assert changed.fits
    assert changed.peak_bytes == plan.change.peak_bytes


def test_more_ranks_come_with_their_nodes(tmp_path: Path) -> None:
    deep = Qwen3Config(
        hidden_size=512, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
        intermediate_size=1536, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    config = config_of(tmp_path, model=deep)
    roles = make_plan(config, device="h100", advises=False).roles
    available = 0.4 * roles[0].sizes.total * 16
    change = smallest_change(config, roles, available, is_accelerator=True, per_node=2)
    assert change is not None
    again = config_of(tmp_path, *change.settings, model=deep)
    assert again.resources.ranks > 2
    assert again.resources.nodes == again.resources.ranks // 2
    plan = make_plan(again, device="h100", memory_gib=available / GIB / (1 - DEVICE_RESERVE), advises=False)
    assert plan.peak_bytes == change.peak_bytes <= available


WIDE = Qwen3Config(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=16_384, vocab_size=512, tie_word_embeddings=True,
)  # fmt: skip
ON_EIGHT = ("resources.runtime=ray", "resources.ranks=8")


@pytest.mark.parametrize(
    ("ranks", "each", "tensor", "changed"),
    [
        pytest.param(ON_EIGHT, 2.565, 2, 8, marks=pytest.mark.slow),
        (ON_EIGHT, 2.4, 4, 8),
        pytest.param(ON_EIGHT, 2.06, 8, 8, marks=pytest.mark.slow),
        ((), 1.7, 8, 16),
    ],
)
def test_matrices_are_shared_where_no_rank_has_room_for_all_of_them(
    tmp_path: Path, ranks: tuple[str, ...], each: float, tensor: int, changed: int
) -> None:
    # Each rank gathers the whole model for generation, in bfloat16; 8 ranks have 2 bytes of each number besides.
    settings = ("rollout.max_running=8", *ranks)
    config = config_of(tmp_path, *settings, model=WIDE)
    roles = make_plan(config, device="h100", advises=False).roles
    available = each * roles[0].sizes.total
    change = smallest_change(config, roles, available, is_accelerator=True, per_node=8)
    assert change is not None
    again = config_of(tmp_path, *settings, *change.settings, model=WIDE)
    assert again.resources.ranks == changed
    assert again.actor.engine.tensor_parallel == tensor
    plan = make_plan(again, device="h100", memory_gib=available / GIB / (1 - DEVICE_RESERVE), advises=False)
    assert plan.peak_bytes == change.peak_bytes <= available


def test_several_changes_at_once_are_each_as_mild_as_they_may_be(tmp_path: Path) -> None:
    # 16 bytes of each number are too many for one device. Of two, each generates 64 samples, whose keys and values have
    # no room together: that is no reason for fewer, since those without room wait.
    settings = (
        "model.gradient_checkpointing=true",
        "data.max_response_tokens=4000",
        "actor.engine.max_tokens_per_device=16384",
    )
    config = config_of(tmp_path, *settings, model=WIDE)
    roles = make_plan(config, device="h100", advises=False).roles
    available = 11.2 * roles[0].sizes.total
    change = smallest_change(config, roles, available, is_accelerator=True, per_node=8)
    assert change is not None
    more = ("resources.runtime=ray", "resources.ranks=2")
    budget = "actor.engine.max_tokens_per_device=8192"
    assert change.settings == (budget, *more)
    for milder in ((budget,), more):
        plan = make_plan(config_of(tmp_path, *settings, *milder, model=WIDE), device="h100", advises=False)
        assert plan.peak_bytes > available


def test_devices_apart_are_those_of_each_process(tmp_path: Path) -> None:
    ray = ("resources.runtime=ray", "resources.ranks=4", "rollout.engine=vllm", "rollout.max_staleness=1")
    config = config_of(tmp_path, *ray, "resources.apart={rollout:3}", "rollout.vllm.tensor_parallel=4")
    plan = make_plan(config, device="h100", advises=False)
    assert plan.num_devices == 4 + 3 * 4
    apart = generation_seconds(config, plan.roles[0], plan.device, engines=3, ranks=4, samples=128)
    assert plan.seconds_by_stage["gen"] == apart
