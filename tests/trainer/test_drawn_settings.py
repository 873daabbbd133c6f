"""Runs whose settings are drawn: one that is interrupted is the one that was not, and the cut of its batches changes no
number. STROP_SEEDS=FIRST:LAST tries others than the few of every time."""

from __future__ import annotations

import math
import os
from pathlib import Path
from random import Random

import pytest
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine_clock")]

PPO = "algorithm.adv_estimator=gae"
FILTER = ("algorithm.filter_groups.enable=true", "trainer.max_steps=4")
CHOICES: tuple[tuple[str, ...], ...] = (
    *(
        (f"algorithm.adv_estimator={name}",)
        for name in ("dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "remax", "raft", "reinforce_plus_plus_baseline")
    ),
    (PPO, "algorithm.gamma=0.9", "algorithm.lam=0.9"), (PPO, "critic.epochs=2", "critic.samples_per_update=3"),
    (PPO, "trainer.critic_warmup=2"), ("algorithm.adv_estimator=prime", "prm.optim.lr=1e-3"),
    *(
        (f"algorithm.policy_loss={name}",)
        for name in ("gspo", "gmpo", "cispo", "sapo", "dppo_tv", "clip_cov", "kl_cov", "dro", "reinforce")
    ),
    ("algorithm.loss_agg_mode=token-sum",), ("algorithm.loss_agg_mode=seq-mean-token-mean",),
    ("algorithm.entropy_coeff=0.01",), ("algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k3+"),
    ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"), ("algorithm.old_log_probs=rollout",),
    ("algorithm.correction.weights=token", "algorithm.correction.normalize=true"),
    ("algorithm.correction.weights=sequence", "algorithm.correction.reject={token_k1: [0.9999, 1.0001]}"),
    ("algorithm.keep.best=2",), ("algorithm.resampling=pow", "algorithm.resampling_within=prompt"),
    FILTER, (*FILTER, "algorithm.filter_groups.defer_failed=1"), (*FILTER, "algorithm.filter_groups.max_rounds=2"),
    (*FILTER, "algorithm.filter_groups.prompts_per_round=5", "algorithm.filter_groups.retire_solved=true"),
    ("actor.epochs=2",), ("actor.samples_per_update=5",), ("actor.samples_per_update=1",),
    ("rollout.samples_per_prompt=2",), ("rollout.samples_per_prompt=5",), ("rollout.top_p=0.9", "rollout.top_k=5"),
    ("rollout.max_staleness=1",), ("rollout.max_staleness=0.5",), ("rollout.over_issue=0.5",),
    ("rollout.over_issue=0.25", "rollout.slowest=drop"), ("rollout.longest_first=true",), ("rollout.max_running=3",),
    ("data.sampler=near_half", "data.reorder_every=1"), ("data.sampler=hard_first",), ("data.prompts_per_step=7",),
    ("data.max_train_prompts=9",), ("data.streaming=true",), ("trainer.max_steps=null", "trainer.num_epochs=1"),
    ("model.lora.rank=4",), ("model.gradient_checkpointing=true",), ("model.dtype=bfloat16",),
    ("actor.optim.name=muon",), ("actor.optim.schedule=cosine", "actor.optim.warmup_share=0.4"),
    ("actor.engine.offload=all",), ("actor.engine.offload_activations=true",), ("resources.offload_idle=true",),
    ("reward.name=picky", "reward.max_failed_share=1"), ("reward.overlong_buffer=2",), ("reward.weight=-1",),
    ("eval.every=1",), ("eval.every=2", "eval.samples_per_prompt=3", "eval.temperature=1"), ("run.async_save=true",),
    ("trainer.rehearse_longest_batch=true",),
)  # fmt: skip
"""Settings beside those of `Project.settings`."""
NUM_CHOSEN = 6
_FIRST, _, _LAST = os.environ.get("STROP_SEEDS", "0:16").partition(":")
SEEDS = range(int(_FIRST), int(_LAST))
MEASURED = ("timing", "perf/", "memory", "tokens_per_s", "idle_ratio", "age_s", "test/clock")
"""Parts of the names of metrics that two equal runs do not share."""


def drawn(project: Project, seed: int) -> list[str]:
    """Settings that go together; a refusal names one of those that do not."""
    luck = Random(seed)
    chosen = luck.sample(CHOICES, NUM_CHOSEN)
    while True:
        words = [word for choice in chosen for word in choice]
        try:
            project.config(*words)
        except ConfigError as error:
            refused = [one for one in chosen if any(word.partition("=")[0] in str(error) for word in one)]
            if not refused:
                pytest.fail(f"{error} names none of {words}")
            chosen.remove(luck.choice(refused))
        else:
            return words


def numbers(run: Done) -> dict[tuple[float, str], float]:
    """Metrics of the steps, by step and name."""
    return {
        (metrics["step"], name): value
        for metrics in run.steps
        for name, value in metrics.items()
        if not any(part in name for part in MEASURED)
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_an_interrupted_run_is_the_one_that_was_not(project: Project, tmp_path: Path, seed: int) -> None:
    words = [*drawn(project, seed), "run.save_every=1", "run.keep_last=9"]
    whole = train_in(tmp_path / "whole", project.config(*words))
    last = len(whole.steps)
    step = Random(seed).randrange(1, max(last, 2))
    rest = resume_in(cut_after(whole.folder, tmp_path / "cut", step=step))
    for run in (whole, rest):
        check_records(run.folder, num_steps=last)
    said = f"{words}, interrupted after step {step}"
    assert [one.stages for one in rest.chain] == [one.stages for one in whole.chain], said
    assert numbers(rest) == pytest.approx(numbers(whole), rel=0, abs=0, nan_ok=True), said


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_into_passes_changes_no_number(project: Project, tmp_path: Path, seed: int) -> None:
    words = [word for word in drawn(project, seed) if not word.startswith("model.dtype")]
    luck = Random(seed)
    config = project.config(*words, "model.dtype=float64")
    budgets = [
        f"{role}.engine.max_tokens_per_device={luck.choice([34, 50, 75, 120])}"
        for role in config.used_engines
    ]
    once = train_in(tmp_path / "once", config)
    often = train_in(tmp_path / "often", project.config(*words, "model.dtype=float64", *budgets))
    found, wanted = numbers(often), numbers(once)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        both_nan = math.isnan(value) and math.isnan(found[key])
        assert math.isclose(found[key], value, rel_tol=1e-6, abs_tol=1e-9) or both_nan, (
            f"{key} is {found[key]}, and {value} in one piece: {words} {budgets}"
        )
