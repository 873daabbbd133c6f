"""Real processes that are killed, disks that fill up, checkpoints that rot: the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_runs import Done, Project, chain_of, check_records, resume_in, train_in

from strop.cli.quickstart.stages import start_or_resume
from strop.config import save_config
from strop.observability.trackers.setup import read_metrics
from strop.run import CheckpointError, RunError, RunFolder
from strop.trainer.checkpointing import Checkpointer
from strop.trainer.config import Config
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run

NUM_STEPS = 12
DEADLINE_S = 120.0
"""Longest wait for a process to come to the place where it is killed."""

SETTINGS = [
    f"trainer.max_steps={NUM_STEPS}",
    "actor.samples_per_update=9",
    "actor.optim.schedule=cosine",
    "actor.optim.warmup_steps=3",
    "algorithm.use_kl_loss=true",
    "eval.every=3",
    "run.save_every=2",
    "run.keep_last=3",
]
"""Two updates a step, a schedule, a reference: as much state as a run can have. 24 rows in steps of 4: two epochs."""


@dataclass
class Processes:
    """Starts `strop` in processes of its own, which are gone at the end."""

    started: list[subprocess.Popen[str]]
    module: str = "strop.cli.main"
    """Module that is run, with the folder of tests on its path."""

    def start(self, *words: object) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": str(len(self.started) + 1),  # nothing may depend on the order of a set
        }
        command = [sys.executable, "-m", self.module, *map(str, words)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def finish(self, *words: object) -> str:
        """Run to the end; what it said."""
        process = self.start(*words)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        return said

    def kill_when(self, is_time: Callable[[], bool], *words: object) -> None:
        """Start, and kill at once when the time has come."""
        process = self.start(*words)
        deadline = time.monotonic() + DEADLINE_S
        while not is_time():
            assert process.poll() is None, f"it ended before it could be killed: {process.communicate()[1]}"
            assert time.monotonic() < deadline, "the moment to kill it never came"
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        assert process.returncode == -signal.SIGKILL


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that do not outlive the test."""
    those = Processes([])
    yield those
    for process in those.started:
        process.kill()
        process.communicate()


def events_of(folder: Path) -> list[dict[str, object]]:
    """All records of a log that may be written at this moment, rolled back ones included."""
    path = folder / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def step_is_done(folder: Path, step: int) -> Callable[[], bool]:
    """True from the moment a step's fingerprint is on record; what follows it is still to be done."""
    return lambda: any(e["kind"] == "fingerprint" and e["step"] == step for e in events_of(folder))


def is_saving(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".saving-*"))


@pytest.fixture(scope="module")
def config(project: Project) -> Config:
    return project.config(*SETTINGS)


@pytest.fixture(scope="module")
def uninterrupted(project: Project, config: Config) -> Done:
    """The run that nothing happens to, in this process."""
    return train_in(project.folder / "uninterrupted", config)


def assert_same_run(folder: Path, uninterrupted: Done) -> None:
    """The same chain, the same numbers, a ledger that adds up."""
    assert [one.chain for one in chain_of(folder)] == [one.chain for one in uninterrupted.chain]
    check_records(folder, num_steps=NUM_STEPS)
    ours = read_metrics(folder / "metrics.jsonl")
    assert [numbers["step"] for numbers in ours] == [numbers["step"] for numbers in uninterrupted.metrics]
    for mine, theirs in zip(ours, uninterrupted.metrics, strict=True):
        # A death right after a checkpoint takes the time that it took along.
        assert set(mine) ^ set(theirs) <= {"timing_s/save_checkpoint"}
        for name in ("actor/loss", "actor/lr", "actor/kl_loss", "val-core/strop/exact/acc/mean@1"):
            assert mine.get(name) == theirs.get(name)
    with RunFolder.open(folder, read_only=True) as run:
        assert run.ledger.counts()["trained"] == 16 * NUM_STEPS
        assert run.samples.steps() == list(range(1, NUM_STEPS + 1))
        assert [e["step"] for e in run.events.read("validation")] == [0, 3, 6, 9, 12]


# ---------------------------------------------------------------------------- kill -9


@pytest.mark.slow
def test_a_run_killed_again_and_again_is_the_run_that_was_never_killed(
    config: Config, uninterrupted: Done, processes: Processes, tmp_path: Path
) -> None:
    save_config(config, tmp_path / "config.yaml")
    run = tmp_path / "run"
    # In the first validation, right after the run folder was made.
    processes.kill_when(
        lambda: (run / "metrics.jsonl").exists(), "train", "--config", tmp_path / "config.yaml", "--out", run
    )
    assert chain_of(run) == []
    # In a validation: it follows the fingerprint of step 3, which no checkpoint holds.
    processes.kill_when(step_is_done(run, 3), "train", "--resume", run)
    # While a checkpoint is written: it is begun in this folder, and renamed when it is whole.
    for _ in range(3):
        processes.kill_when(lambda: is_saving(run), "train", "--resume", run)
        if is_saving(run):
            break
    assert is_saving(run), "each time the kill came after the checkpoint was in its place"
    # In another validation, and before the checkpoint of the next step.
    processes.kill_when(step_is_done(run, 9), "train", "--resume", run)
    validated = {e["step"] for e in events_of(run) if e["kind"] == "validation"}
    assert not {3, 9} <= validated, "both times the kill came after the validation"
    said = processes.finish("train", "--resume", run, "--json")
    assert "resumed at step 8: 128 samples trained, " in said
    assert_same_run(run, uninterrupted)
    assert not is_saving(run)


@pytest.mark.slow
def test_a_killed_fine_tuning_is_the_one_that_was_never_killed(
    project: Project, processes: Processes, tmp_path: Path
) -> None:
    config = project.config("run.save_every=2", "sft.num_epochs=4", "sft.examples_per_update=4")
    save_config(config, tmp_path / "config.yaml")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start = start_run(whole, config, command=["strop", "sft"])
    with start.run:
        fine_tune(config, start.run, say=lambda line: None)
    processes.kill_when(step_is_done(killed, 7), "sft", "--config", tmp_path / "config.yaml", "--out", killed)
    processes.kill_when(lambda: is_saving(killed), "sft", "--resume", killed)
    processes.finish("sft", "--resume", killed)
    assert [one.chain for one in chain_of(killed)] == [one.chain for one in chain_of(whole)]
    check_records(killed, num_steps=24)


# ---------------------------------------------------------------------------- other ends, in this process


class Killed(BaseException):
    """Stands for the end of the process."""


def die_at_append(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the process at the n-th record of the event log: before it, nothing after it."""
    from strop.run.events import EventLog

    append, count = EventLog.append, 0

    def append_or_die(self: EventLog, kind: str, step: int, **fields: object) -> None:
        nonlocal count
        count += 1
        if count >= number:
            raise Killed
        append(self, kind, step, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(EventLog, "append", append_or_die)


def check_death_at(
    config: Config, uninterrupted: Done, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        die_at_append(patch, number)
        with pytest.raises(Killed):
            train_in(folder, config)
    done = resume_in(folder)
    assert_same_run(folder, uninterrupted)
    assert done.result.pass_rate_final == uninterrupted.result.pass_rate_final


@pytest.mark.slow
def test_a_death_before_a_record_of_the_log_is_survived(
    config: Config, uninterrupted: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Events of a step: issued, settled, fingerprint, then validation, step and checkpoint where due.
    check_death_at(config, uninterrupted, tmp_path / "run", monkeypatch, 17)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 30, 45, 57, 58, 59, 60]
)
def test_a_death_before_any_record_of_the_log_is_survived(
    config: Config, uninterrupted: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    check_death_at(config, uninterrupted, tmp_path / "run", monkeypatch, number)


def unfinished_copy(run: Path, folder: Path) -> Path:
    """A copy of a finished run that does not know that it ended."""
    shutil.copytree(run, folder, symlinks=True)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(line for line in lines if '"finished"' not in line))
    return folder


def test_a_corrupt_checkpoint_is_passed_over_for_the_one_before(uninterrupted: Done, tmp_path: Path) -> None:
    run = unfinished_copy(uninterrupted.folder, tmp_path / "run")
    damaged = run / "checkpoints" / "global_step_12" / "actor" / "shard-00001-of-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    truncated = run / "checkpoints" / "global_step_10" / "model" / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-100])
    done = resume_in(run)
    assert any(
        "ckpt 12" in line and "actor/shard-00001-of-00001.safetensors" in line and "using 8" in line
        for line in done.said
    )
    assert any("ckpt 10" in line and "model.safetensors" in line for line in done.said)
    assert any(line.startswith("resumed at step 8: 128 samples trained, 64 after") for line in done.said)
    assert [record.step for record in done.records] == [9, 10, 11, 12]
    assert_same_run(run, uninterrupted)


def test_a_resume_at_the_last_step_has_nothing_to_do_but_to_finish(
    uninterrupted: Done, tmp_path: Path
) -> None:
    run = unfinished_copy(uninterrupted.folder, tmp_path / "run")
    done = resume_in(run)
    assert done.records == []
    assert (
        done.result.seconds
        > sum(float(str(one["seconds"])) for one in events_of(run) if one["kind"] == "step")
        > 0
    )
    assert done.result.pass_rate_final == uninterrupted.result.pass_rate_final
    assert_same_run(run, uninterrupted)


def test_a_full_disk_ends_a_run_with_a_sentence_and_the_checkpoint_before_goes_on(
    config: Config, uninterrupted: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Checkpointer.save
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_small_disk(
        checkpointer: Checkpointer, step: int, *args: object, **kwargs: object
    ) -> object:
        if step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
        try:
            return save(checkpointer, step, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "save", save_on_a_small_disk)
        with pytest.raises(CheckpointError) as caught:
            train_in(tmp_path / "run", config)
    sentence = str(caught.value)
    assert sentence.startswith("checkpoint 6 could not be saved to ")
    assert "File too large; checkpoint 4 stays valid. Free space" in sentence
    assert not is_saving(tmp_path / "run")
    done = resume_in(tmp_path / "run")
    assert any(line.startswith("resumed at step 4: 64 samples trained, 32 after") for line in done.said)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_starting_again_continues_the_run_of_these_settings_and_no_other(
    project: Project, config: Config, uninterrupted: Done, tmp_path: Path
) -> None:
    run = unfinished_copy(uninterrupted.folder, tmp_path / "run")
    again = start_or_resume(run, config, command=["strop"], say=lambda line: None)
    again.run.close()
    assert again.checkpoint is not None
    assert again.checkpoint.step == NUM_STEPS
    other = project.config(*SETTINGS, "trainer.seed=1")
    events = (run / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="holds a run with other settings"):
        start_or_resume(run, other, command=["strop"], say=lambda line: None)
    assert (run / "events.jsonl").read_bytes() == events
    fresh = start_or_resume(tmp_path / "fresh", config, command=["strop"], say=lambda line: None)
    fresh.run.close()
    assert (fresh.checkpoint, fresh.is_finished) == (None, False)


def test_a_finished_run_has_nothing_to_resume(config: Config, uninterrupted: Done) -> None:
    said: list[str] = []
    start = start_or_resume(uninterrupted.folder, config, command=["strop"], say=said.append)
    start.run.close()
    assert start.is_finished
    assert said == [
        f"{uninterrupted.folder} is finished; nothing to resume (more steps or epochs make it longer)"
    ]


def test_a_run_that_died_between_its_first_two_files_begins_again(config: Config, tmp_path: Path) -> None:
    start_run(tmp_path / "run", config, command=["strop"]).run.close()
    (tmp_path / "run" / "config.yaml").unlink()
    start = start_or_resume(tmp_path / "run", config, command=["strop"], say=lambda line: None)
    start.run.close()
    assert start.config == config
