"""Runs with the Megatron engine on Ray: those of the torch engine in one process, with generation and checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_runs import Done, Project, resume_in, to_reward_model, train_in

from references.megatron_in_workers import IS_INSTALLED, SETTINGS
from strop.data.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not IS_INSTALLED, reason="megatron-core is not installed"),
]
EXACT = ("model.dtype=float64", "resources.num_threads=1", "run.save_every=1", "algorithm.use_kl_loss=false")
COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean")


def megatron(**sizes: int) -> tuple[str, ...]:
    """Settings of a run on two ranks that divide the policy so."""
    return (
        "resources.runtime=ray",
        "resources.ranks=2",
        "model.external_lib=references.megatron_in_workers",
        "actor.engine.kind=megatron",
        "actor.engine.megatron.distributed_optimizer=false",
        *(f"actor.engine.{name}={size}" for name, size in sizes.items()),
    )


@pytest.fixture
def two_key_heads(project: Project, tmp_path: Path) -> Project:
    """A model that two ranks can divide."""
    folder = tmp_path / "model"
    make_tiny_model(
        folder, seed=0, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_position_embeddings=256,
    )  # fmt: skip
    return dataclasses.replace(project, model=folder)


def numbers(run: Done) -> list[list[float]]:
    return [[step[name] for name in COMPARED] for step in run.steps]


@pytest.mark.parametrize("axis", ["tensor_parallel", "pipeline_parallel"])
def test_a_run_is_that_of_the_torch_engine_which_continues_it(
    two_key_heads: Project, tmp_path: Path, axis: str
) -> None:
    """The native engine generates with the weights of all ranks; a checkpoint moves between the engines."""
    project, settings = two_key_heads, megatron(**{axis: 2})
    alone = train_in(tmp_path / "alone", project.config(*EXACT, "trainer.max_steps=2"))
    divided = train_in(tmp_path / "divided", project.config(*EXACT, *settings, "trainer.max_steps=2"))
    assert len(alone.steps) == len(divided.steps) == 2
    for ours, expected in zip(numbers(divided), numbers(alone), strict=True):
        assert ours == pytest.approx(expected, abs=1e-9, rel=1e-9)
    longer = numbers(resume_in(alone.folder, "trainer.max_steps=3"))
    back = resume_in(
        divided.folder, "trainer.max_steps=3", "resources.runtime=inline", "resources.ranks=1",
        "actor.engine.kind=torch", f"actor.engine.{axis}=1",
    )  # fmt: skip
    assert numbers(back) == [pytest.approx(one, abs=1e-9, rel=1e-9) for one in longer]


def test_weights_reach_a_rollout_engine_of_its_own(two_key_heads: Project, tmp_path: Path) -> None:
    """Whole weights, one after the other; the reference of the same process is divided in the same way."""
    project, kl = two_key_heads, ("algorithm.use_kl_loss=true", "trainer.max_steps=2")
    exact = [setting for setting in EXACT if "use_kl" not in setting]
    alone = train_in(tmp_path / "alone", project.config(*exact, *kl))
    reference = ("reference.engine.kind=megatron", "reference.engine.tensor_parallel=2")
    apart = ("resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5")
    divided = train_in(
        tmp_path / "divided", project.config(*exact, *kl, *megatron(tensor_parallel=2), *reference, *apart)
    )
    for name in (*COMPARED, "actor/kl_loss"):
        ours, expected = ([step[name] for step in run.steps] for run in (divided, alone))
        assert ours == pytest.approx(expected, abs=1e-9, rel=1e-9), name


@pytest.mark.parametrize("kind", ["megatron", "torch"])
def test_critic_and_reward_model_are_divided_as_well(
    two_key_heads: Project, tmp_path: Path, kind: str
) -> None:
    project, judge = two_key_heads, tmp_path / "judge"
    make_tiny_model(
        judge, seed=1, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
        max_position_embeddings=128,
    )  # fmt: skip
    to_reward_model(judge)
    common = (
        *EXACT, "algorithm.adv_estimator=gae", f"reward_model.path='{judge}'", "reward_model.dtype=float64",
        "reward_model.max_tokens=128", "trainer.max_steps=2",
    )  # fmt: skip
    divided = [f"{role}.engine.tensor_parallel=2" for role in ("actor", "critic", "reward_model")]
    if kind == "megatron":
        divided += [f"{role}.engine.{setting}" for role in ("critic", "reward_model") for setting in SETTINGS]
        divided += megatron()
    else:
        divided += ["resources.runtime=ray", "resources.ranks=2"]
    one = train_in(tmp_path / "one", project.config(*common))
    two = train_in(tmp_path / "two", project.config(*common, *divided))
    assert len(one.steps) == len(two.steps) == 2
    for name in (
        *COMPARED,
        "critic/vf_loss",
        "critic/grad_norm",
        "critic/values/mean",
        "reward_model/score/mean",
    ):
        ours, expected = ([step[name] for step in run.steps] for run in (two, one))
        assert ours == pytest.approx(expected, abs=1e-9, rel=1e-9), name
        assert any(expected), name
