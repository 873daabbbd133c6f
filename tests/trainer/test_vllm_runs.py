"""Training with vLLM: the toy task is learned through it, in one process and with generation apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_task import LearningTask
from tiny_runs import Done, check_records, train_in

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VLLM = ("rollout.engine=vllm", "rollout.vllm.cpu_cache_gib=0.25", "algorithm.use_kl_loss=true")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> LearningTask:
    return LearningTask(tmp_path_factory.mktemp("task"), head_dim=32)  # vLLM on a CPU has no smaller one


def largest_difference(done: Done) -> float:
    return max(step["training/rollout_probs_diff_max"] for step in done.steps)


def test_the_toy_task_is_learned_in_one_process(task: LearningTask, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", task.config(None, *VLLM))
    before, after = done.result.pass_rate_start, done.result.pass_rate_final
    assert after >= before + 0.2, (before, after)
    assert largest_difference(done) < 1e-4
    assert any(line.startswith("rollout: vllm, time-shared") for line in done.said)
    check_records(tmp_path / "run", num_steps=40)


def test_an_adapter_reaches_generation_apart(task: LearningTask, tmp_path: Path) -> None:
    apart = ("resources.runtime=ray", "resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5")
    done = train_in(
        tmp_path / "run",
        task.config(None, *VLLM, *apart, "model.lora.rank=4", "actor.optim.lr=1e-2", "trainer.max_steps=4"),
    )
    assert largest_difference(done) < 1e-4
    assert any(line.startswith("rollout: vllm, apart, in 1 process") for line in done.said)
    check_records(tmp_path / "run", num_steps=4)
