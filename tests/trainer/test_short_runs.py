"""A run that is too short for its schedules says so before its first step."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import Project, train_in

from strop.config import load_config
from strop.trainer.checks.schedules import schedule_warnings
from strop.trainer.config import Config
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run


def warnings(num_steps: int, *settings: str) -> list[str]:
    return schedule_warnings(load_config(Config, overrides=["model.path=tiny", *settings]), num_steps)


def test_each_role_that_learns_counts_its_own_optimizer_steps() -> None:
    # 10 steps of 4 prompts x 8 samples: 10 updates, and 20 of a role that takes 16 samples at a time.
    settings = ["algorithm=ppo", "data.prompts_per_step=4", "rollout.samples_per_prompt=8"]
    settings += ["actor.optim.warmup_steps=11", "critic.optim.warmup_steps=11"]
    (policy,) = warnings(10, *settings, "critic.samples_per_update=16")
    assert policy.startswith("WARNING: actor.optim.warmup_steps is 11, and the run has 10 optimizer steps")
    assert len(warnings(10, *settings, "critic.samples_per_update=all")) == 2
    assert warnings(20, *settings, "critic.samples_per_update=all") == []


def test_a_policy_that_is_never_trained_is_said() -> None:
    settings = ["algorithm=ppo", "trainer.critic_warmup=10"]
    (sentence,) = warnings(10, *settings, "actor.optim.warmup_steps=5")
    assert "critic_warmup is 10, and the run has 10 steps: the policy is not trained at all" in sentence
    assert warnings(11, *settings) == []


def test_a_run_says_it(project: Project, tmp_path: Path) -> None:
    config = project.config("trainer.max_steps=1", "actor.optim.warmup_steps=50")
    said = train_in(tmp_path / "run", config).said
    assert any("the learning rate comes to 2.0% of actor.optim.lr at most" in line for line in said)


def test_a_fine_tuning_says_it(project: Project, tmp_path: Path) -> None:
    config = project.config("sft.max_steps=2", "sft.optim.warmup_steps=8")
    said: list[str] = []
    with start_run(tmp_path / "run", config, command=["strop", "sft"]).run as run:
        fine_tune(config, run, say=said.append)
    assert any("the learning rate comes to 25.0% of sft.optim.lr at most" in line for line in said)
