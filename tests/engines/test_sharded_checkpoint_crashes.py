"""Processes that die while a sharded checkpoint is written in the background: the one before is chosen."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from strop.engines.checkpoint import load_sharded
from strop.run import CheckpointError, CheckpointStore, PendingCheckpoint
from strop.run.sealing import Sealing

Start = Callable[..., "subprocess.Popen[str]"]

TENSORS = """
import sys
import torch
from pathlib import Path
from strop.engines.checkpoint import save_sharded_async
from strop.engines.parallel.ranks import Parallel

def tensors(step):
    return {f"model/{name}": torch.full((300, 300), float(step)) for name in "abcdefgh"}
"""

TRAINER = (
    TENSORS
    + """
from strop.run import CheckpointStore
from strop.run.sealing import Sealing
sealing = None
store = CheckpointStore(Path(sys.argv[1]), keep_last=2, keep_best=0)
live = tensors(0)
for step in range(1, 10**6):
    for tensor in live.values():
        tensor.fill_(step)  # while the save before may still be written
    if sealing is not None:
        sealing.result()
    pending = store.begin(step, facts={"step": step})
    print(step - 1, flush=True)
    writing = save_sharded_async(
        pending.folder / "actor", live, {"step": step}, parallel=Parallel(device=torch.device("cpu"))
    )
    sealing = Sealing(pending, lambda writing=writing: writing.result(60))
"""
)

RANK = (
    TENSORS
    + """
parallel = Parallel(rank=int(sys.argv[1]), world_size=2, device=torch.device("cpu"))
print("ready", flush=True)
for line in sys.stdin:
    step, folder = line.split()
    save_sharded_async(Path(folder), tensors(int(step)), {"step": int(step)}, parallel=parallel).result(60)
    print(step, flush=True)
"""
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script with pipes; it is gone when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start_one(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *map(str, arguments)]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the memory disk where there is one: an fsync costs nothing there."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else None, prefix="strop-test-") as path:
        yield Path(path)


def assert_whole(checkpoint: Path, step: int) -> None:
    found = {f"model/{name}": torch.empty(300, 300) for name in "abcdefgh"}
    assert load_sharded(checkpoint / "actor", found) == {"step": step}
    assert all(tensor.eq(step).all() for tensor in found.values()), "no value of another step"


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_kill_9_of_a_process_that_trains_and_saves_in_the_background(
    folder: Path, start: Start, seed: int
) -> None:
    process = start(TRAINER, folder)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 3:
        pass
    time.sleep(random.Random(seed).uniform(0.0, 0.03))  # any moment must do
    process.send_signal(signal.SIGKILL)
    on_disk = [3, *map(int, process.stdout.read().split())][-1]
    process.wait()
    found, skipped = CheckpointStore(folder, keep_last=2, keep_best=0).latest_valid()
    assert found is not None
    assert found.step >= on_disk, "what was settled is never lost"
    assert all(sentence.endswith(f"- using {found.step}") for sentence in skipped)
    assert_whole(found.path, found.step)


@pytest.mark.slow
def test_a_rank_or_a_controller_that_dies_meanwhile_leaves_the_checkpoint_before(
    folder: Path, start: Start
) -> None:
    ranks = [start(RANK, rank) for rank in range(2)]
    outputs = [rank.stdout for rank in ranks]
    assert [output.readline() for output in outputs if output] == ["ready\n", "ready\n"]
    store = CheckpointStore(folder, keep_last=3, keep_best=0)

    def tell(step: int, pending: PendingCheckpoint) -> None:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{step} {pending.folder / 'actor'}\n")

    def wait(step: int) -> None:
        for number, output in enumerate(outputs):
            if output is None or output.readline() != f"{step}\n":
                raise OSError(f"rank {number} ended while it wrote")

    def chosen() -> tuple[int, list[str]]:
        found, skipped = CheckpointStore(folder, keep_last=3, keep_best=0).latest_valid()
        assert found is not None
        assert_whole(found.path, found.step)
        return found.step, skipped

    pending = store.begin(1, facts={})
    tell(1, pending)
    saved = Sealing(pending, lambda: wait(1)).result(60)
    names = sorted(path.name for path in (saved.path / "actor").iterdir())
    assert names == ["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors", "state.json"]
    assert chosen() == (1, [])

    # Every rank has written, but the controller dies before it seals.
    pending = store.begin(2, facts={})
    tell(2, pending)
    wait(2)
    assert_whole(pending.folder, 2)
    assert chosen() == (1, ["ckpt 2 has no manifest (crash during save) - using 1"])

    # The next controller goes on; a rank stands still, then dies.
    store = CheckpointStore(folder, keep_last=3, keep_best=0)
    ranks[1].send_signal(signal.SIGSTOP)
    pending = store.begin(2, facts={})
    tell(2, pending)
    sealing = Sealing(pending, lambda: wait(2))
    threading.Timer(0.2, ranks[1].kill).start()
    with pytest.raises(
        CheckpointError, match="checkpoint 2 .*: rank 1 ended while it wrote; checkpoint 1 stays valid"
    ):
        sealing.result(60)
    assert chosen() == (1, [])


@pytest.mark.slow
def test_a_full_disk_comes_to_light_at_the_next_save(tmp_path: Path) -> None:
    shell = 'mount -t tmpfs -o size=4m tmpfs "$1" 2>/dev/null || exit 77; exec "$2" -c "$3" "$1/run"'
    script = (
        TENSORS
        + """
from strop.run import CheckpointError, CheckpointStore
from strop.run.sealing import Sealing
store = CheckpointStore(Path(sys.argv[1]), keep_last=1, keep_best=0)
alone = Parallel(device=torch.device("cpu"))

def begin(step, size):
    pending = store.begin(step, facts={})
    live = {"model/a": torch.full((size,), float(step))}
    writing = save_sharded_async(pending.folder / "actor", live, {"step": step}, parallel=alone)
    return Sealing(pending, lambda: writing.result(60))

begin(1, 1000).result()
second = begin(2, 10**7)
print("training goes on")
try:
    second.result()
except CheckpointError as error:
    print(error)
print(store.latest_valid()[0].step, sorted(path.name for path in store.root.iterdir()))
print(begin(3, 1000).result(60).step, store.steps())
"""
    )
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, script]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no small disk can be mounted")
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this user may not mount a small disk")
    assert result.returncode == 0, result.stderr
    going_on, sentence, state, after = result.stdout.splitlines()
    assert going_on == "training goes on"
    assert sentence.startswith("checkpoint 2 could not be saved to ")
    assert "No space left on device; checkpoint 1 stays valid. Free space" in sentence
    assert state == "1 ['global_step_1', 'latest_checkpointed_iteration.txt']"
    assert after == "3 [3]"
