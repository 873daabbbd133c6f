"""A run that is asked to end by SIGTERM or SIGHUP saves what it has, and goes on to the same end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_runs import Done, Project, chain_of, check_records, resume_in

from strop.cli.launching import carrying_out
from strop.config import save_config
from strop.run import RunFolder
from strop.trainer.fault_tolerance.signals import SignalRequest, Terminated
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.sft.trainer import SftTrainer, fine_tune
from strop.trainer.start import resume_run, start_run
from strop.trainer.timing import Stages
from strop.trainer.train import train
from strop.utils.terminal import Interrupted

DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def _hears_of_its_terminal() -> Iterator[None]:
    """Also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def steps_saved(run: Path) -> list[str]:
    return sorted(one.name for one in (run / "checkpoints").glob("global_step_*"))


def interrupted(run: Path) -> list[tuple[int, str]]:
    with RunFolder.open(run, read_only=True) as folder:
        return [(event["step"], event["error"]) for event in folder.events.read("interrupted")]


def test_the_step_that_runs_is_finished_and_saved_and_the_run_goes_on_to_the_same_end(
    on_policy: Done, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.SIGTERM
    settings = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
    config = project.config(*settings)
    step = Trainer.step

    def asked(trainer: Trainer, number_of: int, stages: Stages) -> StepRecord:
        if number_of == 2:
            signal.raise_signal(number)
        return step(trainer, number_of, stages)

    monkeypatch.setattr(Trainer, "step", asked)
    run = tmp_path / "run"
    before = signal.getsignal(number)
    with (
        start_run(run, config, command=["strop", "train"]).run as folder,
        pytest.raises(Terminated) as caught,
    ):
        train(config, folder, say=lambda line: None)
    assert caught.value.number == number
    assert signal.getsignal(number) == before
    assert steps_saved(run) == ["global_step_2"]
    assert interrupted(run) == [(2, f"Terminated: {number.name}")]
    monkeypatch.setattr(Trainer, "step", step)
    done = resume_in(run)
    assert [record.step for record in done.records] == [3]
    assert [one.chain for one in chain_of(run)] == [one.chain for one in on_policy.chain]
    check_records(run, num_steps=3)


def test_a_step_that_takes_too_long_is_given_up(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def asked(trainer: Trainer, number_of: int, stages: Stages) -> StepRecord:
        if number_of == 2:
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(DEADLINE_S)
        return step(trainer, number_of, stages)

    monkeypatch.setattr(Trainer, "step", asked)
    config = project.config("run.save_every=1", "run.grace_s=0.05")
    started = time.monotonic()
    with (
        start_run(tmp_path / "run", config, command=["strop", "train"]).run as folder,
        pytest.raises(Terminated),
    ):
        train(config, folder, say=lambda line: None)
    assert time.monotonic() - started < DEADLINE_S, "the wait ended with the signal"
    assert steps_saved(tmp_path / "run") == ["global_step_1"]
    (event,) = interrupted(tmp_path / "run")
    assert event[0] == 2


def test_a_fine_tuning_saves_too(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = SftTrainer._step

    def asked(trainer: SftTrainer, number: int, stages: Stages) -> dict[str, float]:
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, number, stages)

    monkeypatch.setattr(SftTrainer, "_step", asked)
    config, run = project.config(), tmp_path / "run"
    with start_run(run, config, command=["strop", "sft"]).run as folder, pytest.raises(Terminated):
        fine_tune(config, folder, say=lambda line: None)
    assert steps_saved(run) == ["global_step_2"]
    assert interrupted(run) == [(2, "Terminated: SIGTERM")]
    monkeypatch.setattr(SftTrainer, "_step", step)
    start = resume_run(run, say=lambda line: None)
    with start.run as folder:
        result = fine_tune(start.config, folder, checkpoint=start.checkpoint, say=lambda line: None)
    assert result.steps > 2


def test_outside_of_a_step_the_end_comes_at_once() -> None:
    def play() -> None:
        with SignalRequest().listening():
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the handler raises")

    with pytest.raises(Terminated):
        play()


def test_an_error_after_the_request_is_its_consequence() -> None:
    """Processes of the run may have got the same signal."""

    def play(stop: SignalRequest) -> None:
        with stop.listening(), stop.step():
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("a worker is gone")

    with pytest.raises(Terminated) as caught:
        play(SignalRequest())
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal, here and in processes started from here: a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_a_wait_that_gives_the_signal_another_class_ends_as_that_signal(number: int) -> None:
    """As the waits of Ray do, whose C++ code knows of KeyboardInterrupt alone."""

    def play() -> None:
        with SignalRequest().listening():
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                raise KeyboardInterrupt from None

    before = signal.getsignal(number)
    with pytest.raises(Terminated) as caught:
        play()
    assert caught.value.number == number
    assert caught.value.__cause__ is None
    assert signal.getsignal(number) == before


def test_a_request_that_was_lost_in_a_destructor_ends_the_run_before_its_next_step() -> None:
    def play(stop: SignalRequest) -> None:
        with stop.listening():
            with contextlib.suppress(Terminated):
                signal.raise_signal(signal.SIGTERM)
            with stop.step():
                raise AssertionError("the step does not begin")

    with pytest.raises(Terminated) as caught:
        play(SignalRequest())
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_ctrl_c_and_a_schedulers_warning_let_the_step_end_and_say_so(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    done = []

    def play(stop: SignalRequest) -> None:
        with stop.listening(), stop.step():
            signal.raise_signal(number)
            done.append("the step")

    with pytest.raises(Terminated) as caught:
        play(SignalRequest())
    assert done == ["the step"]
    assert caught.value.number == number
    assert f"{number.name}: this step comes to its end and is saved first" in capfd.readouterr().err


RAY_WAITS = """
import os, signal, threading
import ray
from strop.controller.ray.cluster import Cluster
from strop.trainer.fault_tolerance.signals import SignalRequest, Terminated

cluster = Cluster()

@ray.remote(num_cpus=0)
def never():
    threading.Event().wait()

reference = never.remote()
for wait in (lambda: ray.wait([reference], timeout=60), lambda: ray.get(reference, timeout=60)):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        try:
            with SignalRequest().listening():
                wait()
        except Terminated as error:
            print(error)
cluster.close()
"""


@pytest.mark.dist
def test_a_signal_that_ends_a_wait_of_ray_is_told_as_that_signal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAY_WAITS], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.stdout.split() == ["SIGTERM", "SIGHUP", "SIGINT"] * 2, done.stderr


def test_what_fails_after_the_request_reaches_the_command(project: Project, tmp_path: Path) -> None:
    def play() -> None:
        start = start_run(tmp_path / "run", project.config(), command=["strop", "train"])
        with carrying_out(start, kind="train"), SignalRequest().listening():
            with contextlib.suppress(Terminated):
                signal.raise_signal(signal.SIGHUP)
            raise OSError("no room for the checkpoint")

    with pytest.raises(Interrupted, match=r"continue with `strop train --resume .*`") as caught:
        play()
    assert caught.value.number == signal.SIGHUP
    assert isinstance(caught.value.__cause__, OSError)


def test_another_thread_leaves_the_signals_alone() -> None:
    seen: list[object] = []

    def look() -> None:
        with SignalRequest().listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalRequest().listening():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


SECOND = """
import os, signal, time
from strop.trainer.fault_tolerance.signals import SignalRequest
stop = SignalRequest()
with stop.listening(), stop.step():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.{name})
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_the_second_signal_ends_the_process_at_once(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND.format(name=name)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-getattr(signal, name), "still here\n")
    assert "the same again ends the run at once" in done.stderr
    assert f"{name} again: the run ends at once, this step is not saved" in done.stderr


LISTENING = """
import socket

held = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))]
"""
"""The beginning of a reward file that opens ports of its own."""


def check_sockets_of_a_reward(controller: psutil.Process) -> None:
    """A run in one process listens on nothing but what the user's own code opens."""
    addresses = sorted(
        connection.laddr.ip
        for process in [controller, *controller.children(recursive=True)]
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    )
    assert addresses == ["0.0.0.0", "127.0.0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.dist)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_for_the_whole_group_ends_a_real_run_in_order(
    runtime: str, number: signal.Signals, project: Project, tmp_path: Path
) -> None:
    """What `timeout`, Slurm and a terminal that closes do."""
    ray = ["resources.runtime=ray", "resources.cpus_per_rank=0.25", "resources.ranks=2"]
    (tmp_path / "reward.py").write_text(LISTENING + (project.folder / "reward.py").read_text())
    settings = [
        f"reward.path='{tmp_path / 'reward.py'}'",
        "trainer.max_steps=400",
        "trainer.num_epochs=400",
        *(ray if runtime == "ray" else []),
    ]
    save_config(project.config(*settings), tmp_path / "config.yaml")
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "strop.cli.main", "train", "--config", tmp_path / "config.yaml", "--out", run],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE_S
    while not ((run / "events.jsonl").is_file() and '"kind":"step"' in (run / "events.jsonl").read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if runtime == "inline":
        check_sockets_of_a_reward(psutil.Process(process.pid))
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (75 if number == signal.SIGUSR1 else 128 + number), said
    how = {
        signal.SIGINT: "interrupted",
        signal.SIGUSR1: "ended before the machine's end, as its scheduler asked (SIGUSR1)",
    }.get(number, f"ended by {number.name}")
    assert said.splitlines()[-1] == f"{how}; continue with `strop train --resume {run}`"
    assert "***" not in said, "Ray's dump of C++ frames"
    ((step, reason),) = interrupted(run)
    assert reason == f"Terminated: {number.name}"
    assert steps_saved(run) == [f"global_step_{step}"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == step
    start = resume_run(
        run, overrides=["resources.runtime=inline", "resources.ranks=1"], say=lambda line: None
    )
    start.run.close()
    assert start.checkpoint is not None
    assert start.checkpoint.step == step


def name_of(process: psutil.Process) -> str:
    """Empty where it has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


@pytest.mark.dist
def test_a_signal_while_the_cluster_starts_leaves_nothing(project: Project, tmp_path: Path) -> None:
    config = project.config("resources.runtime=ray", "resources.cpus_per_rank=0.25")
    save_config(config, tmp_path / "config.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "strop.cli.main", "train", "--config", tmp_path / "config.yaml", "--out",
         tmp_path / "run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + DEADLINE_S
    family: list[psutil.Process] = []
    while not any("gcs_server" in name_of(one) for one in family):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert said.splitlines()[-1].startswith("ended by SIGTERM; continue with")
    assert "***" not in said
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
