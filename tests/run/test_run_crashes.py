"""A process that dies during a checkpoint save, at every boundary, leaves a valid checkpoint behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import save
from program_path import python_path

import strop
from strop.run import CheckpointStore

Start = Callable[[list[str]], "subprocess.Popen[str]"]
CRASHER = Path(__file__).with_name("checkpoint_crasher.py")


def open_store(root: Path) -> CheckpointStore:
    return CheckpointStore(root, keep_last=1, keep_best=0)


def save_again(root: Path, step: int) -> None:
    """The run goes on: the next save works and leaves nothing else in the folder."""
    store = open_store(root)
    save(store, step, lambda folder: (folder / "model.bin").write_bytes(b"next") and None, facts={})
    assert sorted(path.name for path in root.iterdir()) == [
        f"global_step_{step}",
        "latest_checkpointed_iteration.txt",
    ]
    found, skipped = store.latest_valid()
    assert found is not None
    assert (found.step, skipped) == (step, [])


@pytest.mark.parametrize("mode", ["first", "replace", "background"])
def test_kill_at_every_write_boundary_leaves_a_valid_checkpoint(memory_path: Path, mode: str) -> None:
    result = subprocess.run(
        [sys.executable, str(CRASHER), str(memory_path), mode],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": python_path(Path(strop.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    boundaries = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    # The save passes every kind of boundary, or this test would prove little.
    text = "\n".join(boundaries.values())
    for kind in (
        "os.mkdir",
        "write",
        "fsync",
        r"open .*manifest\.json",
        "os.rename",
        "os.remove",
        r"os\.rmdir|rmtree",
    ):
        assert re.search(kind, text), f"no boundary {kind} in:\n{text}"
    generations = []
    for kill_at, boundary in boundaries.items():
        root = memory_path / kill_at
        found, skipped = open_store(root).latest_valid()
        assert found is not None, f"nothing valid after a kill before: {boundary}; {skipped}"
        assert found.step in ((20,) if mode == "replace" else (20, 40))
        generations.append(found.manifest.facts["run"])
        if mode != "replace":
            assert (found.step == 40) == (generations[-1] == "new")
        content = (b"old" * 1000, b"new" * 999)[generations[-1] == "new"]
        assert (found.path / "model/a.safetensors").read_bytes() == content
        assert all(f"using {found.step}" in sentence for sentence in skipped)
        save_again(root, 60)
    # Up to the rename the old one is chosen, from there on the new one; never old again.
    assert generations == sorted(generations, reverse=True)
    assert set(generations) == {"old", "new"}


def test_a_save_that_died_is_reported_by_step_and_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, 180, lambda folder: (folder / "model.bin").write_bytes(b"x") and None, facts={})
    (tmp_path / ".saving-global_step_200").mkdir()
    (tmp_path / ".saving-global_step_200/model.bin").write_bytes(b"x")
    found, skipped = store.latest_valid()
    assert found is not None
    assert found.step == 180
    assert skipped == ["ckpt 200 has no manifest (crash during save) - using 180"]


@pytest.mark.parametrize("moment", ["written", "half written", "sealed by nobody"])
def test_a_process_that_dies_between_begin_and_seal_leaves_the_one_before(
    tmp_path: Path, moment: str
) -> None:
    store = open_store(tmp_path)
    save(store, 180, lambda folder: (folder / "model.bin").write_bytes(b"x") and None, facts={})
    pending = store.begin(200, facts={})  # and then its process is gone
    if moment != "written":
        (pending.folder / "actor").mkdir()
        (pending.folder / "actor" / "shard-00001-of-00002.safetensors").write_bytes(b"x")
    if moment == "sealed by nobody":
        (pending.folder / "actor" / "shard-00002-of-00002.safetensors").write_bytes(b"x")
    found, skipped = open_store(tmp_path).latest_valid()
    assert found is not None
    assert found.step == 180
    assert skipped == ["ckpt 200 has no manifest (crash during save) - using 180"]
    save_again(tmp_path, 200)


ENDLESS_SAVER = """
import os, sys, threading
from pathlib import Path
from strop.run import CheckpointStore
from strop.run.sealing import Sealing

def say(line):  # in one write: two processes have this pipe
    os.write(1, f"{line}\\n".encode())

def save_without_end(root, mode):
    store = CheckpointStore(Path(root), keep_last=2, keep_best=1)
    sealing = None
    for step in range(1, 10**6):
        def write(folder, content=str(step).encode() * 200_000):
            for name in "abc":
                (folder / name).write_bytes(content)
        if mode == "now":
            pending = store.begin(step, score=-step % 7, facts={"step": step})
            with pending.writing():
                write(pending.folder)
            pending.seal()
            say(step)
        else:
            if sealing is not None:
                sealing.result()
            pending = store.begin(step, score=-step % 7, facts={"step": step})
            say(step - 1)  # the one before is on the disk
            writer = threading.Thread(target=write, args=(pending.folder,))
            writer.start()
            sealing = Sealing(pending, writer.join)

for line in sys.stdin:  # each root in a fork: imports take seconds
    pid = os.fork()
    if pid == 0:
        save_without_end(line.strip(), sys.argv[1])
    say(f"pid {pid}")
    os.waitpid(pid, 0)
    say("ended")
"""


@pytest.mark.parametrize("mode", ["now", "in background"])
def test_kill_9_from_outside_at_random_moments(memory_path: Path, start: Start, mode: str) -> None:
    choose = random.Random(0)
    process = start([sys.executable, "-c", ENDLESS_SAVER, mode])
    assert process.stdin is not None
    assert process.stdout is not None
    for attempt in range(4):
        root = memory_path / str(attempt)
        print(root, file=process.stdin, flush=True)
        pid, reported = 0, [0]
        while pid == 0 or reported[-1] < 3:
            words = process.stdout.readline().split()
            assert words, "the process has ended"
            if words[0] == "pid":
                pid = int(words[1])
            else:
                reported.append(int(words[0]))
        time.sleep(choose.uniform(0.0, 0.05))  # the moment is random on purpose; any moment must do
        os.kill(pid, signal.SIGKILL)
        while (line := process.stdout.readline().strip()) != "ended":
            reported.append(int(line))
        found, _ = CheckpointStore(root, keep_last=2, keep_best=1).latest_valid()
        assert found is not None
        assert found.step >= reported[-1], "a save that returned is never lost"
        assert found.manifest.facts == {"step": found.step}
        assert (found.path / "c").read_bytes() == str(found.step).encode() * 200_000
        save_again_step = found.step + 1
        store = CheckpointStore(root, keep_last=1, keep_best=0)
        save(store, save_again_step, lambda folder: (folder / "a").write_bytes(b"x") and None, facts={})
        assert store.steps() == [save_again_step]
