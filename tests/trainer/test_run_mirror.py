"""Copies of a run at a URL: what is there after which checkpoint, and what is not taken for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.run import Checkpoint, RunConfig, RunFolder
from strop.trainer.run_mirror import RunMirror, fetch_run, state_of_copy
from strop.utils import trust

KEPT = RunConfig(keep_last=1, keep_best=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "sums", config={}, command=["strop", "train"], settings=KEPT) as made:
        yield made


def saved(run: RunFolder, step: int) -> Checkpoint:
    pending = run.checkpoints.begin(step, facts={"weights of": step})
    (pending.folder / "actor").mkdir()
    (pending.folder / "actor" / "weights.bin").write_bytes(bytes([step]) * 1000)
    return pending.seal()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_each_checkpoint_is_copied_and_what_the_run_lets_go_leaves(run: RunFolder, tmp_path: Path) -> None:
    store = tmp_path / "store"
    mirror = RunMirror(run, store.as_uri() + "/")
    states = set()
    for step in (1, 2):
        mirror.copy(saved(run, step))
        mirror.finish(30.0)
        states.add(state_of_copy(mirror.url))
        mirror = RunMirror(run, store.as_uri())
    name = "sums/checkpoints/global_step_2"
    assert files(store) == {
        "sums/run.json",
        "sums/events.jsonl",
        f"{name}/manifest.json",
        f"{name}/actor/weights.bin",
    }
    assert len(states) == 2, "the key of a copy tells its states apart"
    assert [one["step"] for one in run.events.read("copied")] == [1, 2]

    back = fetch_run(mirror.url, tmp_path / "back")
    with RunFolder.open(back, read_only=True) as opened:
        checkpoint, _ = opened.checkpoints.latest_valid()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.manifest.facts) == (2, {"weights of": 2})

    (store / name / "manifest.json").unlink()  # as a copy that broke off leaves it
    with pytest.raises(ValueError, match="holds no copy of a run with a checkpoint"):
        fetch_run(mirror.url, tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_a_store_that_fails_is_told_and_stops_nothing(run: RunFolder, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is needed")
    mirror = RunMirror(run, blocked.as_uri())
    mirror.copy(saved(run, 1))
    mirror.finish(30.0)
    failed = run.events.read("copy_failed")
    assert [(one["step"], one["url"]) for one in failed] == [(1, mirror.url)]
    assert "blocked" in failed[0]["error"]
    assert run.events.read("copied") == []


def test_what_is_no_url_and_what_others_settings_name_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="run.copy_to is '/backup', which is no URL"):
        RunMirror(run, "/backup")
    with trust.door():
        trust.close("a run of somebody", own=())
        with pytest.raises(trust.UntrustedCode, match="run.copy_to"):
            RunMirror(run, "s3://somebody/bucket")
