"""Runs of a model with experts: with the routing of the rollout, and with experts on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_experts import make_expert_model
from tiny_runs import Done, Project, resume_in, train_in

from references.megatron_in_workers import IS_INSTALLED, SETTINGS
from strop.trainer.checks.models import check_models

MOE = ("actor.moe.balance_loss_coef=0.01", "actor.moe.z_loss_coef=0.001")
EXACT = ("model.dtype=float64", "resources.num_threads=1", "run.save_every=1", *MOE)
ON_TWO = ("resources.runtime=ray", "resources.ranks=2", "actor.engine.expert_parallel=2")
COMPARED = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/moe/balance_loss", "actor/moe/max_load")


@pytest.fixture(scope="module")
def moe_model(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_expert_model(tmp_path_factory.mktemp("experts") / "model", project.model)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that were sent to given experts, by pass and layer."""
    from strop.engines.moe.routing import Routing

    counts: list[int] = []
    experts_of = Routing.experts_of

    def noted(self: Routing, number: int) -> torch.Tensor | None:
        experts = experts_of(self, number)
        if experts is not None:
            assert int(experts.min()) >= 0
            counts.append(len(experts))
        return experts

    monkeypatch.setattr(Routing, "experts_of", noted)
    return counts


def numbers(run: Done) -> list[list[float]]:
    return [[step[name] for name in COMPARED] for step in run.steps]


def test_training_takes_the_routing_of_the_rollout(
    project: Project, moe_model: Path, tmp_path: Path, replayed: list[int]
) -> None:
    settings = (f"model.path='{moe_model}'", "trainer.max_steps=2", "actor.samples_per_update=8")
    run = train_in(tmp_path / "run", project.config(*settings, *MOE, "rollout.router_replay=true"))
    assert len(run.steps) == 2
    assert len(replayed) >= 2 * 2 * 3  # steps, layers, passes: old log-probs and two updates
    for step in run.steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["actor/moe/max_load"] >= 1
    assert "routed_experts" in run.records[0].fetched.tensors()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_training_takes_the_routing_of_vllm(project: Project, tmp_path: Path, replayed: list[int]) -> None:
    model = make_expert_model(
        tmp_path / "model", project.model, head_dim=32
    )  # it has no smaller one on a CPU
    run = train_in(
        tmp_path / "run",
        project.config(
            f"model.path='{model}'", "trainer.max_steps=2", "actor.samples_per_update=8", *MOE,
            "rollout.router_replay=true", "rollout.engine=vllm", "rollout.vllm.cpu_cache_gib=0.1",
        ),
    )  # fmt: skip
    assert len(run.steps) == 2
    assert len(replayed) >= 2 * 2 * 3  # steps, layers, passes: old log-probs and two updates
    for step in run.steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4


def test_without_it_nothing_is_replayed(
    project: Project, moe_model: Path, tmp_path: Path, replayed: list[int]
) -> None:
    train_in(tmp_path / "run", project.config(f"model.path='{moe_model}'", "trainer.max_steps=1"))
    assert replayed == []


def test_what_cannot_be_replayed_or_divided_is_refused(project: Project, moe_model: Path) -> None:
    with pytest.raises(
        ValueError, match="router_replay is true, which does not go with rollout.max_staleness=1"
    ):
        project.config(
            "rollout.router_replay=true", "rollout.max_staleness=1", "algorithm.old_log_probs=rollout"
        )
    with pytest.raises(ValueError, match="rollout.router_replay is true, but the model is dense"):
        check_models(project.config("rollout.router_replay=true"))
    with pytest.raises(ValueError, match="actor.moe.z_loss_coef is 0.1, but qwen3 is a dense model"):
        check_models(project.config("actor.moe.z_loss_coef=0.1"))
    on_ranks = ("resources.runtime=ray", "resources.ranks=3", "actor.engine.expert_parallel=3")
    with pytest.raises(ValueError, match="the 4 experts of a layer of the model do not divide over 3 ranks"):
        check_models(project.config(f"model.path='{moe_model}'", *on_ranks))
    with pytest.raises(
        ValueError, match="expert_parallel is 2, which does not go with actor.optim.name=adamw_8bit"
    ):
        project.config(*ON_TWO, "actor.optim.name=adamw_8bit")
    with pytest.raises(ValueError, match=r"does not go with model.lora.target_modules=\[experts.down_proj\]"):
        project.config(*ON_TWO, "model.lora.rank=2", "model.lora.target_modules=[experts.down_proj]")
    stages = (
        "actor.engine.pipeline_parallel=2",
        "actor.engine.pipeline_schedule=zero_bubble",
        "resources.ranks=2",
    )
    adapter = ("model.lora.rank=2", "model.lora.target_modules=[experts.down_proj]")
    with pytest.raises(
        ValueError, match=r"pipeline_schedule is zero_bubble, which does not go with model.lora"
    ):
        project.config("resources.runtime=ray", *stages, *adapter)


@pytest.mark.dist
@pytest.mark.skipif(not IS_INSTALLED, reason="megatron-core is not installed")
@pytest.mark.parametrize("axis", ["expert_parallel", "pipeline_parallel"])
def test_a_run_of_the_megatron_engine_is_that_of_the_torch_engine(
    project: Project, moe_model: Path, tmp_path: Path, axis: str
) -> None:
    """Generation within the actor records experts, which its log-probs and updates take."""
    divided = (
        "resources.runtime=ray", "resources.ranks=2", "model.external_lib=references.megatron_in_workers",
        *(f"actor.engine.{setting}" for setting in SETTINGS), f"actor.engine.{axis}=2",
    )  # fmt: skip
    settings = (
        f"model.path='{moe_model}'",
        *EXACT,
        "rollout.router_replay=true",
        "algorithm.use_kl_loss=false",
        "trainer.max_steps=2",
    )
    alone = train_in(tmp_path / "alone", project.config(*settings))
    on_two = train_in(tmp_path / "on_two", project.config(*settings, *divided))
    assert len(alone.steps) == len(on_two.steps) == 2
    for ours, expected in zip(numbers(on_two), numbers(alone), strict=True):
        assert ours == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert max(abs(step["training/rollout_probs_diff_max"]) for step in on_two.steps) < 1e-4


@pytest.mark.dist
@pytest.mark.parametrize("axis", ["expert_parallel", "pipeline_parallel"])
def test_a_run_on_two_ranks_is_the_run_of_one_process_and_goes_on_alone(
    project: Project, moe_model: Path, tmp_path: Path, axis: str
) -> None:
    divided = ("resources.runtime=ray", "resources.ranks=2", f"actor.engine.{axis}=2")
    settings = (f"model.path='{moe_model}'", *EXACT, "rollout.router_replay=true")
    alone = train_in(tmp_path / "alone", project.config(*settings, "trainer.max_steps=2"))
    on_two = train_in(tmp_path / "on_two", project.config(*settings, *divided, "trainer.max_steps=2"))
    assert "routed_experts" in on_two.records[0].fetched.tensors()
    for ours, expected in zip(numbers(on_two), numbers(alone), strict=True):
        assert ours == pytest.approx(expected, abs=1e-9, rel=1e-9)
    longer = resume_in(alone.folder, "trainer.max_steps=3")
    back = resume_in(
        on_two.folder, "trainer.max_steps=3", "resources.runtime=inline", "resources.ranks=1",
        f"actor.engine.{axis}=1",
    )  # fmt: skip
    assert numbers(back) == [pytest.approx(one, abs=1e-9, rel=1e-9) for one in numbers(longer)]
