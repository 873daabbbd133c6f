"""Routers in the updates of policies and of fine-tuning: their losses, whatever the cut, and loads of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from actor_batches import make_actor, random_batch
from test_actor import Update, assert_same, settings, update

from strop.engines.config import EngineConfig, MoEConfig
from strop.trainer.checks.parallel import check_router_settings
from strop.workers.routers import check_routers

MOE = MoEConfig(balance_loss_coef=0.5, z_loss_coef=0.25)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of six experts, of which a token goes to two."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    shape = transformers.Qwen3MoeConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    return folder


def updated(folder: Path, moe: MoEConfig, *, max_tokens: int = 1000) -> Update:
    return update(make_actor(folder, settings("token-mean"), moe=moe, max_tokens=max_tokens), random_batch())


@pytest.mark.usefixtures("float64_norms")
def test_losses_of_routers_are_added_whatever_the_cut(moe_folder: Path) -> None:
    whole = updated(moe_folder, MOE)
    assert_same(whole, updated(moe_folder, MOE, max_tokens=18), tolerance=1e-9)
    metrics = whole.metrics
    of_routers = 2 * (
        0.25 * metrics["actor/moe/z_loss"] + 0.5 * metrics["actor/moe/balance_loss"]
    )  # two layers
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] + of_routers, rel=1e-9)
    assert metrics["actor/moe/balance_loss"] > 1
    assert 1 < metrics["actor/moe/max_load"] < 3
    assert 0 < metrics["actor/moe/load_entropy"] < 1
    assert metrics["actor/moe/unused_experts"] == 0


@pytest.mark.usefixtures("float64_norms")
def test_without_them_loads_are_measured_and_routers_learn_from_the_policy_alone(moe_folder: Path) -> None:
    without, with_losses = updated(moe_folder, MoEConfig()), updated(moe_folder, MOE)
    assert without.metrics["actor/loss"] == without.metrics["actor/pg_loss"]
    assert "actor/moe/z_loss" not in without.metrics
    for name in ("max_load", "load_entropy", "unused_experts"):  # also over the rows that have no gradient
        assert without.metrics[f"actor/moe/{name}"] == with_losses.metrics[f"actor/moe/{name}"]
    assert without.metrics["actor/grad_norm"] != pytest.approx(with_losses.metrics["actor/grad_norm"])


def test_what_cannot_have_them_is_refused() -> None:
    with pytest.raises(
        ValueError, match="actor.moe.z_loss_coef is 0.1, but qwen3 is a dense model, without routers"
    ):
        check_routers(transformers.Qwen3Config(), MoEConfig(z_loss_coef=0.1), section="actor.moe")
    check_routers(transformers.Qwen3MoeConfig(), MOE, section="actor.moe")
    check_routers(transformers.Qwen3Config(), MoEConfig(), section="actor.moe")
    with pytest.raises(
        ValueError, match="does not go with sft.engine.compile=true: set that to false, or sft.moe"
    ):
        check_router_settings("sft", EngineConfig(compile=True), MOE)
    check_router_settings("actor", EngineConfig(pipeline_parallel=2), MOE)
    check_router_settings("actor", EngineConfig(kind="megatron"), MOE)
