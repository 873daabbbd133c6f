"""Copies of a run at a URL: made while it trains, continued and begun from elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_calls import Project, cli, interrupted_after

from strop.run import RunFolder

pytestmark = pytest.mark.slow


def events(run: Path, kind: str) -> list[dict[str, object]]:
    with RunFolder.open(run, read_only=True) as opened:
        return opened.events.read(kind)


@pytest.fixture(scope="module")
def store(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the copy of a run that was interrupted in its second step, whose own folder is gone."""
    folder = tmp_path_factory.mktemp("copies")
    run = folder / "here" / "sums"
    words = [
        "--config",
        project.config,
        "--out",
        run,
        "run.save_every=1",
        "run.keep_last=1",
        "run.keep_best=0",
    ]
    with interrupted_after(step=2):
        begun = cli("train", *words, "trainer.max_steps=3", f"run.copy_to={(folder / 'store').as_uri()}")
    assert begun.code == 130, begun.err
    assert [one["step"] for one in events(run, "copied")][-1] == 2, begun.err
    shutil.rmtree(run)
    return folder / "store"


def test_the_copy_has_what_the_run_keeps_and_no_more(store: Path) -> None:
    names = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    assert {"sums/run.json", "sums/config.yaml", "sums/events.jsonl", "sums/metrics.jsonl"} < names
    assert {name.split("/")[2] for name in names if "/checkpoints/" in name} == {"global_step_2"}
    assert not any("samples" in name for name in names)


def test_a_run_whose_machine_is_gone_goes_on_from_its_copy(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    done = cli("train", "--resume", (store / "sums").as_uri(), "--out", out, "--json")
    assert done.code == 0, done.err
    assert done.record["steps"] == 3
    assert [event["step"] for event in events(out, "resumed")] == [2]
    taken = cli("train", "--resume", (store / "sums").as_uri(), "--out", out)
    assert "is there: name an absent folder with --out, or continue it with --resume" in taken.sentence


def test_a_run_begins_with_the_weights_of_a_copy(
    store: Path, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    url, out = (store / "sums").as_uri(), tmp_path / "begun"
    done = cli(
        "train", "--config", project.config, "--from", url, "--out", out, "trainer.max_steps=1", "--json"
    )
    assert done.code == 0, done.err
    assert events(out, "started_from")[0]["from_step"] == 2
    missing = cli("train", "--config", project.config, "--from", f"{url}@1", "--out", tmp_path / "none")
    assert "has no checkpoint of step 1; it has 2" in missing.sentence


def test_a_store_that_fails_stops_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder is needed")
    run = tmp_path / "run"
    words = [
        "--config",
        project.config,
        "--out",
        run,
        "trainer.max_steps=1",
        f"run.copy_to={blocked.as_uri()}",
    ]
    done = cli("train", *words)
    assert done.code == 0, done.err
    failed = events(run, "copy_failed")
    assert [one["step"] for one in failed] == [1]
    assert "blocked" in str(failed[0]["error"])
    assert events(run, "copied") == []
