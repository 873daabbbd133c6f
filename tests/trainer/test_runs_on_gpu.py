"""Whole runs on one GPU, in this process: the first step is that of a CPU, and idle roles leave the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import Done, Project, check_records, train_in

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def check_steps(done: Done) -> None:
    """Three steps that moved the policy, with rollout and trainer in agreement."""
    check_records(done.folder, num_steps=3)
    for numbers in done.steps:
        assert numbers["actor/grad_norm"] > 1e-3
        assert numbers["training/rollout_log_probs_diff_max"] <= 1e-4


def test_grpo_learns_on_a_gpu_as_on_a_cpu(project: Project, tmp_path: Path) -> None:
    on_gpu, on_cpu = (
        train_in(tmp_path / device, project.config(f"resources.device={device}", "model.dtype=float32"))
        for device in (DEVICE, "cpu")
    )
    check_steps(on_gpu)
    assert on_gpu.steps[0]["actor/grad_norm"] == pytest.approx(on_cpu.steps[0]["actor/grad_norm"], rel=1e-3)


def test_ppo_with_a_reference_runs_on_a_gpu_and_idle_roles_leave_it(project: Project, tmp_path: Path) -> None:
    config = project.config(
        f"resources.device={DEVICE}",
        "model.dtype=float32",
        "resources.offload_idle=true",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=true",
    )
    check_steps(train_in(tmp_path / "run", config))


def test_bfloat16_which_a_gpu_computes_in_by_itself_agrees_within_its_rounding(
    project: Project, tmp_path: Path
) -> None:
    done = train_in(tmp_path / "run", project.config(f"resources.device={DEVICE}"))
    check_records(done.folder, num_steps=3)
    for numbers in done.steps:
        assert numbers["actor/grad_norm"] > 1e-3
        assert numbers["training/rollout_log_probs_diff_max"] <= 0.1
