"""Checkpoints beside the training: each is whole before the next one begins, and a failure surfaces there."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.data.tiny_model import make_tiny_tokenizer
from strop.run import CheckpointError, RunConfig, RunFolder
from strop.trainer.fault_tolerance.background import BackgroundCheckpointer, checkpointer


class Role:
    """A role whose files are there a moment after it was asked, or which its disk refuses."""

    def __init__(self) -> None:
        self.call = self
        self.is_refused = False

    def save_checkpoint(self, folder: Path, *, in_background: bool) -> None:
        assert in_background
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_bytes(b"1")

    def is_checkpoint_written(self) -> list[bool]:
        return [True]

    def finish_checkpoint(self) -> None:
        if self.is_refused:
            raise OSError(28, "No space left on device")


def test_a_checkpoint_is_sealed_by_polls_and_a_failure_surfaces_at_the_next_save(tmp_path: Path) -> None:
    role, sealed = Role(), list[int]()
    settings = RunConfig(async_save=True, hf_model="never")
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"], settings=settings) as run:
        trained: Any = {"actor": role}
        sampler: Any = SimpleNamespace(state=dict, progress=dict)
        saver = checkpointer(settings)(
            run,
            trained,
            settings=settings,
            tokenizer=make_tiny_tokenizer(),
            source_model=tmp_path,
            sampler=sampler,
            say=print,
            limit_s=60.0,
            on_sealed=lambda checkpoint: sealed.append(checkpoint.step),
        )
        assert isinstance(saver, BackgroundCheckpointer)
        saver.save(1, None, facts={}, is_last=False)
        assert run.checkpoints.steps() == []
        deadline = time.monotonic() + 30
        while not sealed and time.monotonic() < deadline:
            saver.poll()
            time.sleep(0.01)
        assert run.checkpoints.steps() == sealed == [1]
        saver.save(2, None, facts={}, is_last=False)
        role.is_refused = True
        with pytest.raises(
            CheckpointError, match="checkpoint 2 could not be saved .*; checkpoint 1 stays valid"
        ):
            saver.save(3, None, facts={}, is_last=False)
        role.is_refused = False
        saver.save(3, None, facts={}, is_last=True)
        saver.finish()
        assert run.checkpoints.steps() == [1, 3]
        assert [event["step"] for event in run.events.read("checkpoint")] == [1, 3]
