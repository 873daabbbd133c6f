"""Training with vLLM: the toy task is learned through it, in one process and with generation apart."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from image_task import ImageTask
from learning_task import LearningTask
from tiny_runs import Done, check_records, train_in

from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.rollout.vllm.engine import VllmEngine
from strop.run import RunFolder

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


@pytest.mark.parametrize("freeze", [False, True])
def test_the_colour_of_a_picture_is_learned_through_vllm(freeze: bool, tmp_path: Path) -> None:
    task = ImageTask(tmp_path, count=32, head_dim=32)
    config = task.config(
        *VLLM, "trainer.max_steps=60", "data.prompts_per_step=8", "rollout.samples_per_prompt=8",
        "data.max_response_tokens=1", "eval.before_train=true", f"model.freeze_vision_tower={str(freeze).lower()}",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    # Without a look at the picture every answer is right for half of them.
    assert done.result.pass_rate_start <= 0.75
    assert done.result.pass_rate_final >= 0.95
    assert largest_difference(done) < 1e-4
    check_records(tmp_path / "run", num_steps=60)


def test_prompts_with_images_reach_vllm_apart(tmp_path: Path) -> None:
    apart = ("resources.runtime=ray", "resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5")
    done = train_in(tmp_path / "run", ImageTask(tmp_path, head_dim=32).config(*VLLM, *apart))
    assert largest_difference(done) < 1e-4
    check_records(tmp_path / "run", num_steps=2)


def test_an_adapter_reaches_generation_apart(task: LearningTask, tmp_path: Path) -> None:
    apart = ("resources.runtime=ray", "resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5")
    done = train_in(
        tmp_path / "run",
        task.config(None, *VLLM, *apart, "model.lora.rank=4", "actor.optim.lr=1e-2", "trainer.max_steps=4"),
    )
    assert largest_difference(done) < 1e-4
    assert any(line.startswith("rollout: vllm, apart, in 1 process") for line in done.said)
    check_records(tmp_path / "run", num_steps=4)


@pytest.mark.parametrize("apart", [False, True])
def test_generation_ahead_of_training_goes_on_with_new_weights(
    task: LearningTask, tmp_path: Path, apart: bool
) -> None:
    placed = ("resources.runtime=ray", "resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5")
    config = task.config(
        None,
        *VLLM,
        *(placed if apart else ()),
        *("rollout.max_staleness=1", "rollout.max_running=16", "algorithm.correction.weights=token"),
        "trainer.max_steps=4",
    )
    for number in range(5):  # whether an answer is on its way when weights come is a matter of time
        run = tmp_path / f"run-{number}"
        done = train_in(run, config)
        ages = [record.step - 1 - one.versions[0] for record in done.records for one in record.reports]
        assert set(ages) == {0, 1}
        check_records(run, num_steps=4)
        crossed = any(one.versions[0] < one.versions[1] for record in done.records for one in record.reports)
        if crossed or apart:  # apart it is a matter of luck
            break
    assert crossed or apart


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_in_a_step_is_started_again_and_the_step_ends(
    how: signal.Signals, task: LearningTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, done_to = VllmEngine.generate, []

    async def disturbed(
        engine: VllmEngine,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        def hear(token: int, log_prob: float, version: int) -> None:
            if on_token is not None:
                on_token(token, log_prob, version)
            if version == 1 and request_id.startswith("e") and not done_to:
                done_to.append(engine.pid)
                os.killpg(engine.pid, how)

        return await generate(engine, request_id, prompt_ids, sampling, on_token=hear)

    monkeypatch.setattr(VllmEngine, "generate", disturbed)
    done = train_in(
        tmp_path / "run", task.config(None, *VLLM, "trainer.max_steps=3", "eval.before_train=false")
    )
    assert len(done_to) == 1
    assert largest_difference(done) < 1e-4, "the replacement has the weights of the policy"
    check_records(tmp_path / "run", num_steps=3)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        (event,) = run.events.read("engine_lost")
        versions = {v for row in run.samples.read(2) for v in row["versions"]}
    assert event["message"] == "rollout engine 0 was lost and started again, at version 1"
    assert versions == {1}
    assert not psutil.pid_exists(done_to[0]), "nothing is left of it"
