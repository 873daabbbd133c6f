"""Training through the SGLang adapter, with the server that speaks SGLang's protocol (tests/rollout/sglang_server)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from learning_task import LearningTask
from tiny_runs import check_records, train_in

pytestmark = pytest.mark.slow

ROLLOUT = Path(__file__).parents[1] / "rollout"


def test_the_toy_task_is_learned_with_its_weights_after_every_step(tmp_path: Path) -> None:
    python = tmp_path / "python"
    root = f"{ROLLOUT / 'sglang_server'}:{ROLLOUT.parents[1]}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    task = LearningTask(tmp_path / "task")
    settings = ("rollout.engine=sglang", f"rollout.sglang.python={python}", "algorithm.use_kl_loss=true")
    done = train_in(tmp_path / "run", task.config(None, *settings))
    before, after = done.result.pass_rate_start, done.result.pass_rate_final
    assert after >= before + 0.2, (before, after)
    assert max(step["training/rollout_probs_diff_max"] for step in done.steps) < 1e-4
    assert any(line.startswith("rollout: sglang, time-shared") for line in done.said)
    check_records(tmp_path / "run", num_steps=40)
