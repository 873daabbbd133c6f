"""The trackers themselves, without a network: what each of them has of a run that was resumed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from observability.viewer.made_runs import make_run

pytestmark = pytest.mark.trackers

PROGRAM = """
import json, sys
sys.path.append({packages!r})
from pathlib import Path
from strop.observability.trackers.group import TrackerGroup
from strop.observability.trackers.setup import TrackerSetup
folder = Path({folder!r})
steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
for first, last in ((0, 2), (3, 4)):
    setup = TrackerSetup(folder=folder, total_steps=4, resume_step=first and first - 1, project="sums", name="one")
    with TrackerGroup([{name!r}], setup) as group:
        for record in steps:
            step = record.pop("step") if "step" in record else None
            if step is not None and first <= step <= last:
                group.log(step, record)
            elif step is not None:
                record["step"] = step
"""


def count_wandb(folder: Path) -> tuple[int, int]:
    """Values of one metric that were logged, and tables; two folders of one id."""
    files = list(folder.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one run"
    num_values = sum(file.read_bytes().count(b"actor/entropy") for file in files)
    return num_values, len(list(folder.glob("run/wandb/*/files/media/table/samples/*.json")))


def count_mlflow(folder: Path) -> tuple[int, int]:
    with sqlite3.connect(folder / "mlflow.db") as store:
        (count,) = store.execute("select count(*) from runs").fetchone()
        assert count == 1
        (num_values,) = store.execute("select count(*) from metrics where key = 'actor/entropy'").fetchone()
        names = dict(store.execute("select key, value from params").fetchall())
        assert names["trainer.seed"] == "1"
    return num_values, sum(
        len(json.loads(file.read_text())["data"]) > 0 for file in folder.rglob("samples/*.json")
    )


def count_swanlab(folder: Path) -> tuple[int, int]:
    files = list(folder.glob("run/swanlog/run-*/*.swanlab"))
    assert len({file.name for file in files}) == 1, "one run"
    num_values = sum(file.read_bytes().count(b"actor/entropy") for file in files)
    return num_values, len(list(folder.glob("run/swanlog/run-*/media/text/*.txt")))


def count_trackio(folder: Path) -> tuple[int, int]:
    with sqlite3.connect(folder / "trackio" / "sums.db") as store:
        rows = [
            (name, json.loads(text)) for name, text in store.execute("select run_name, metrics from metrics")
        ]
    assert len({name for name, _ in rows}) == 1, "one run"
    return (
        sum("actor/entropy" in record for _, record in rows),
        sum(name.startswith("samples/") for _, record in rows for name in record),
    )


def count_clearml(folder: Path) -> tuple[int, int]:
    text = ""
    for file in (folder / "clearml").rglob("*.zip"):
        with zipfile.ZipFile(file) as archive:
            text += archive.read("metrics.jsonl").decode()
    records = [record for line in text.splitlines() for record in json.loads(line)]
    num_values = sum(
        (record.get("metric"), record.get("variant")) == ("actor", "entropy") for record in records
    )
    return num_values, sum(record.get("metric") == "samples" for record in records)


def count_comet(folder: Path) -> tuple[int, int]:
    messages = []
    for file in (folder / "run" / "comet").glob("*.zip"):
        with zipfile.ZipFile(file) as archive:
            messages += [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
    texts = [json.dumps(message) for message in messages]
    return sum('"actor/entropy"' in text for text in texts), sum("samples-" in text for text in texts)


COUNTERS: dict[str, Callable[[Path], tuple[int, int]]] = {
    "wandb": count_wandb, "mlflow": count_mlflow, "swanlab": count_swanlab, "trackio": count_trackio,
    "clearml": count_clearml, "comet": count_comet,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTERS)
def test_a_run_and_its_resume_are_one_there(name: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    done = run_program(PROGRAM.format(packages=packages(), folder=str(tmp_path / "run"), name=name), tmp_path)
    assert "failed and is switched off" not in done.stderr, done.stderr[-3000:]
    numbers, tables = COUNTERS[name](tmp_path)
    assert numbers >= 4, "four steps have an entropy"
    assert tables >= 2, "two validations"


@pytest.mark.parametrize("name", COUNTERS)
def test_a_recorded_run_is_sent_by_the_command(name: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    program = (
        f"import sys; sys.path.append({packages()!r}); from strop.cli.main import main; "
        f"sys.exit(main(['track', {str(tmp_path / 'run')!r}, '--to', {name!r}, '--json']))"
    )
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads([line for line in done.stdout.splitlines() if line.startswith('{"run"')][-1])
    assert (record["steps"], record["to"]) == (5, name)


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_run_at_a_terminal_is_not_asked_for_a_key(name: str, tmp_path: Path) -> None:
    # Nobody answers: the question would stand in the middle of the progress, and the run wait at its end.
    make_run(tmp_path / "run")
    program = PROGRAM.format(packages=packages(), folder=str(tmp_path / "run"), name=name)
    keys = ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE")
    environ = {key: value for key, value in os.environ.items() if key not in keys}
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**environ, "HOME": str(tmp_path), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    said = b""
    with contextlib.suppress(OSError):  # the terminal is gone with the process
        while part := os.read(leader, 4096):
            said += part
    os.close(leader)
    assert process.wait(timeout=60) == 0
    assert b"Enter your choice" not in said
    assert f"the tracker '{name}' failed and is switched off".encode() in said


def packages() -> str:
    folder = os.environ.get("STROP_TRACKERS")
    assert folder, "STROP_TRACKERS names the folder with the trackers' packages: make trackers"
    return folder


def run_program(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    offline = {
        "WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=200,
    )
