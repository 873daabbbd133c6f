"""Asynchronous trackers: steps arrive in order, with samples, and the run never waits."""

from __future__ import annotations

import json
import logging
import posixpath
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli.cli_calls import cli
from observability.viewer.made_runs import make_run

from strop.observability.trackers import async_logger
from strop.observability.trackers.async_logger import Remote, make_async_tracker
from strop.observability.trackers.group import TrackerGroup, check_trackers, trackers
from strop.observability.trackers.mlflow import Mlflow, legal_name
from strop.observability.trackers.run_metadata import COLUMNS, RunMetadata
from strop.observability.trackers.setup import TrackerSetup
from strop.utils.quiet_libraries import terminal_log


class RecordingRemote(Remote):
    """Records its calls; a subclass fails or waits."""

    name = "recording"
    package = "json"
    calls: ClassVar[list[Any]] = []

    def begin(self) -> None:
        self.calls.append(("begin", self.metadata.name, self.project, self.metadata.stored_id(self.name)))
        self.metadata.store_id(self.name, "its-id")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        self.calls.append(
            ("samples", step, split, [dict(zip(COLUMNS, row, strict=True))["id"] for row in rows])
        )

    def log_curve(self, picture: Path) -> None:
        self.calls.append(("curve", picture.read_bytes()[:4]))

    def end(self) -> None:
        self.calls.append(("end",))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RecordingRemote.calls.clear()
    return make_run(tmp_path / "first")


def register(remote: type[Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers, "recording", make_async_tracker(remote))


def test_everything_is_logged_in_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(RecordingRemote, monkeypatch)
    with TrackerGroup(["recording"], TrackerSetup(folder=run, total_steps=4, project="sums")) as group:
        group.log(0, {"val-core/math/acc/mean@1": 0.2})
        group.log(1, {"critic/rewards/mean": 0.25, "actor/loss": float("nan"), "actor/lr": float("inf")})
        group.log(4, {"critic/rewards/mean": 1.0, "val-core/math/acc/mean@1": 0.8})
    assert RecordingRemote.calls == [
        ("begin", "first", "sums", None),
        ("log", 0, {"val-core/math/acc/mean@1": 0.2}),
        ("samples", 0, "val", ["e0-000007/0"]),
        ("log", 1, {"critic/rewards/mean": 0.25}),
        ("log", 4, {"critic/rewards/mean": 1.0, "val-core/math/acc/mean@1": 0.8}),
        ("samples", 4, "val", ["e3-000007/0"]),
        ("samples", 4, "train", [f"e3-{row:06d}/{index}" for row in range(3) for index in range(2)]),
        ("curve", b"\x89PNG"),
        ("end",),
    ]
    with TrackerGroup(["recording"], TrackerSetup(folder=run, total_steps=4, resume_step=2)):
        pass
    assert RecordingRemote.calls[-3] == ("begin", "first", "strop", "its-id"), "a resume finds the run there"


def test_one_that_fails_is_reported_once_and_the_others_go_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(RecordingRemote):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError("the server is away")

    register(Failing, monkeypatch)
    (run / "metrics.jsonl").unlink()
    with (
        caplog.at_level(logging.WARNING),
        TrackerGroup(["recording", "jsonl"], TrackerSetup(folder=run, total_steps=9)) as group,
    ):
        for step in range(9):
            group.log(step, {"actor/loss": 1.0})
            time.sleep(0.01)
    sentences = [record.getMessage() for record in caplog.records]
    assert len(sentences) == 1
    assert "the tracker 'recording' failed and is switched off" in sentences[0]
    assert "ConnectionError: the server is away" in sentences[0]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == list(
        range(9)
    )


def test_each_of_several_that_fail_is_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(RecordingRemote):
        def begin(self) -> None:
            raise RuntimeError("no key")

    for name in ("first", "second"):
        monkeypatch.setitem(trackers, name, make_async_tracker(Failing))
    with (
        terminal_log(debug=False),
        TrackerGroup(["first", "second"], TrackerSetup(folder=run, total_steps=4)) as group,
    ):
        group.log(1, {"critic/rewards/mean": 0.25})
    told = capsys.readouterr().err
    assert told.count("the tracker 'first' failed") == told.count("the tracker 'second' failed") == 1


@pytest.mark.parametrize("method", ["begin", "log", "end"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_one_that_ends_its_thread_is_reported_and_the_run_goes_on(
    run: Path,
    method: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def end_thread(*arguments: Any) -> None:
        raise error("no account")

    register(type("Ending", (RecordingRemote,), {method: end_thread}), monkeypatch)
    with (
        caplog.at_level(logging.WARNING),
        TrackerGroup(["recording"], TrackerSetup(folder=run, total_steps=9)) as group,
    ):
        for step in range(9):
            group.log(step, {"actor/loss": 1.0})
            time.sleep(0.01)
    (sentence,) = [record.getMessage() for record in caplog.records]
    assert "the tracker 'recording' failed and is switched off" in sentence
    assert f"RuntimeError: {error.__name__} in the thread of the tracker: no account" in sentence


def test_one_that_waits_for_ever_costs_the_run_nothing_but_a_while_at_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    class Waiting(RecordingRemote):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 3:
                stop.wait(60)

    register(Waiting, monkeypatch)
    monkeypatch.setattr(async_logger, "CLOSE_S", 0.5)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        TrackerGroup(["recording"], TrackerSetup(folder=run, total_steps=2000)) as group,
    ):
        for step in range(2000):
            group.log(step, {"actor/loss": 1.0})
        assert time.monotonic() - began < 5, "2,000 steps wait for nobody"
    stop.set()
    for thread in threading.enumerate():
        if thread.name == "tracker recording":
            thread.join(30)
    assert time.monotonic() - began < 10
    (sentence,) = [record.getMessage() for record in caplog.records]
    assert (
        f"it had taken 3 of 2000 steps 0 s after the last one; `strop track {run} --to recording` sends all of it later"
        in sentence
    )


def test_a_missing_package_is_reported_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_logger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'wandb' needs a package that is not installed: pip install 'strop\[wandb\]'"
    ):
        check_trackers(["jsonl", "wandb"])


def test_a_recorded_run_is_sent_from_its_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.cli.commands import track

    monkeypatch.setattr(track, "built_in", lambda name: make_async_tracker(RecordingRemote))
    result = cli("track", run, "--to", "mlflow", "--project", "p", "--name", "n", "--json")
    assert result.code == 0, result.err
    assert (result.record["steps"], result.record["to"]) == (5, "mlflow")
    assert RecordingRemote.calls[0] == ("begin", "n", "p", None)
    assert [call[1] for call in RecordingRemote.calls if call[0] == "log"] == [0, 1, 2, 3, 4]
    assert RecordingRemote.calls[-1] == ("end",)
    assert not (run / "trackers.json").exists(), "the run that trains keeps its own id there"
    for name in ("paper", "console", "tensorboard"):
        assert f"invalid choice: '{name}'" in cli("track", run, "--to", name).err
    (run / "metrics.jsonl").unlink()
    assert "has no numbers in metrics.jsonl" in cli("track", run, "--to", "mlflow").sentence


def test_metadata_of_a_run_without_samples_or_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    metadata = RunMetadata.read(TrackerSetup(folder=run, total_steps=1))
    assert metadata.samples(99, "train") == []
    assert metadata.flat_config()["trainer.seed"] == "1"
    (run / "metrics.jsonl").write_text("")
    assert metadata.curve() is None


@pytest.mark.parametrize(
    ("setting", "variable", "project"),
    [("strop", "mine", "mine"), ("sums", "mine", "sums"), ("strop", "", "strop"), ("strop", None, "strop")],
)
def test_a_project_that_no_setting_names_is_the_one_of_the_library_s_variable(
    run: Path, monkeypatch: pytest.MonkeyPatch, setting: str, variable: str | None, project: str
) -> None:
    monkeypatch.setattr(RecordingRemote, "project_variable", "RECORDING_PROJECT")
    monkeypatch.delenv("RECORDING_PROJECT", raising=False)
    if variable is not None:
        monkeypatch.setenv("RECORDING_PROJECT", variable)
    metadata = RunMetadata.read(TrackerSetup(folder=run, total_steps=4, project=setting))
    assert RecordingRemote(metadata).project == project


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("val-core/math/acc/mean@1", "val-core/math/acc/mean_1"),
        ("val-core/https://a.b/c//d/acc/mean@1", "val-core/https:/a.b/c/d/acc/mean_1"),
        ("val-core/./data/../x.parquet/acc", "val-core/_/data/__/x.parquet/acc"),
        ("val-core/数学/acc", "val-core/数学/acc"),
        ("/a/", "a"),
    ],
)
def test_a_data_source_of_any_name_is_a_metric_that_mlflow_takes(name: str, legal: str) -> None:
    assert legal_name(name) == legal
    assert posixpath.normpath(legal) == legal, "mlflow refuses a name that is another one as a path"


def test_long_names_at_mlflow_stay_apart_and_keep_their_ends() -> None:
    # Two sources of 300 characters, which differ in the middle alone: MLflow takes 250 characters.
    first, second = (
        legal_name(f"val-core/{'x' * 149}{middle}{'x' * 150}/acc/mean@1") for middle in ("a", "b")
    )
    assert first != second
    for name in (first, second):
        assert len(name) <= 250
        assert name.startswith("val-core/xxx")
        assert name.endswith("xxx/acc/mean_1")


def test_mlflow_gets_no_more_metrics_in_one_request_than_a_server_takes(run: Path) -> None:
    requests: list[list[tuple[str, float, int]]] = []

    class Client:
        def log_batch(self, run_id: str, *, metrics: list[tuple[str, float, int]]) -> None:
            requests.append(metrics)

    remote = Mlflow(RunMetadata.read(TrackerSetup(folder=run, total_steps=4)))
    remote._client, remote._id = Client(), "its-id"
    remote._metric = lambda name, value, at, step: (name, value, step)
    remote.log(3, {f"a/{index}": float(index) for index in range(450)})
    assert [len(request) for request in requests] == [200, 200, 50], "Azure's servers take 200, others 1000"
    assert [point for request in requests for point in request] == [
        (f"a/{n}", float(n), 3) for n in range(450)
    ]
