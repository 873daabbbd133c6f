"""Runs whose matrices, or layers, lie on two ranks: those of one process, with generation, checkpoints and a critic."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_kill_and_resume import Processes, processes
from test_kills_ahead import NUM_STEPS, kill_and_resume
from tiny_runs import Done, Project, chain_of, resume_in, train_in

__all__ = ["processes"]

EXACT = ("model.dtype=float64", "resources.num_threads=1", "algorithm.adv_estimator=gae", "run.save_every=1")
ON_TWO = ("resources.runtime=ray", "resources.ranks=2")
AXES = ("tensor_parallel", "pipeline_parallel")
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy")


def numbers(run: Done) -> list[list[float]]:
    return [[step[name] for name in COMPARED] for step in run.steps]


LORA = ("model.lora.rank=4", "critic.lora.rank=4", "actor.optim.lr=0.01")


@pytest.mark.dist
@pytest.mark.parametrize("lora", [(), LORA[::2]], ids=["all", "lora"])
@pytest.mark.parametrize("axis", AXES)
def test_weights_reach_a_rollout_engine_of_its_own(
    project: Project, tmp_path: Path, axis: str, lora: tuple[str, ...]
) -> None:
    """The second step samples with what the first has taught."""
    settings = (*EXACT, *lora, "trainer.max_steps=2", "algorithm.adv_estimator=grpo")
    alone = train_in(tmp_path / "alone", project.config(*settings))
    apart = train_in(
        tmp_path / "apart",
        project.config(
            *settings,
            *ON_TWO,
            f"actor.engine.{axis}=2",
            "resources.apart={rollout: 1}",
            "resources.cpus_per_rank=0.5",
        ),
    )
    names = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")
    for ours, expected in zip(apart.steps, alone.steps, strict=True):
        assert [ours[name] for name in names] == pytest.approx(
            [expected[name] for name in names], abs=1e-9, rel=1e-9
        )


@pytest.mark.dist
@pytest.mark.parametrize("lora", [(), LORA], ids=["all", "lora"])
@pytest.mark.parametrize("axis", AXES)
def test_a_run_on_two_ranks_is_the_run_of_one_process_and_goes_on_alone(
    project: Project, tmp_path: Path, axis: str, lora: tuple[str, ...]
) -> None:
    """Also with a checkpoint of two ranks that one process continues, and the other way round."""
    alone = train_in(tmp_path / "alone", project.config(*EXACT, *lora, "trainer.max_steps=2"))
    on_two = train_in(
        tmp_path / "on_two",
        project.config(
            *EXACT, *lora, *ON_TWO, f"actor.engine.{axis}=2", f"critic.engine.{axis}=2", "trainer.max_steps=2"
        ),
    )
    assert len(alone.steps) == len(on_two.steps) == 2
    for ours, expected in zip(numbers(on_two), numbers(alone), strict=True):
        assert ours == pytest.approx(expected, abs=1e-9, rel=1e-9)
    longer = resume_in(alone.folder, "trainer.max_steps=3")
    back = resume_in(
        on_two.folder, "trainer.max_steps=3", "resources.runtime=inline", "resources.ranks=1",
        f"actor.engine.{axis}=1", f"critic.engine.{axis}=1",
    )  # fmt: skip
    assert numbers(back) == [pytest.approx(one, abs=1e-9, rel=1e-9) for one in numbers(longer)]


@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_on_two_axes_a_run_that_is_killed_is_the_run_that_was_never_killed(
    project: Project, tmp_path: Path, processes: Processes
) -> None:
    """Matrices on two ranks, layers on two: the controller is killed, and its workers end by themselves."""
    settings = (
        "resources.runtime=ray", "resources.ranks=4", "resources.cpus_per_rank=0.25", "actor.engine.tensor_parallel=2",
        "actor.engine.pipeline_parallel=2", "rollout.load_balance=false", "data.prompts_per_step=8",
        f"trainer.max_steps={NUM_STEPS}", "run.save_every=1", "data.val_files=[]",
    )  # fmt: skip
    whole = train_in(tmp_path / "whole", project.config(*settings))

    def check(folder: Path) -> None:
        assert [one.chain for one in chain_of(folder)] == [one.chain for one in whole.chain]

    kill_and_resume(project, tmp_path, processes, settings, check, kills=2)
