"""The run folder: one writer, clear refusals, and a rollback that all its parts follow."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import save

from strop.run import Fate, RunConfig, RunError, RunFolder, is_run

Start = Callable[[list[str]], "subprocess.Popen[str]"]


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, config={"trainer": {"seed": 3}}, command=["strop", "train"])


def write_model(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"x")


def test_create_records_where_the_run_comes_from(tmp_path: Path) -> None:
    with create(tmp_path / "a" / "run") as run:
        assert is_run(run.path)
        assert sorted(path.name for path in run.path.iterdir()) == [
            "checkpoints", "events.jsonl", "lock", "run.json", "samples"
        ]  # fmt: skip
    info = json.loads((tmp_path / "a/run/run.json").read_text())
    assert info["command"] == ["strop", "train"]
    assert info["config"] == {"trainer": {"seed": 3}}
    assert info["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"strop", "torch", "transformers"} <= set(info["versions"])
    assert info["machine"]["cpus"] == os.cpu_count()
    with RunFolder.open(tmp_path / "a/run") as again:
        assert again.info == info
        assert [record["kind"] for record in again.events.read()] == ["created"]


def refusal(code: int | None) -> RunError:
    error = RunError("refused")
    error.__cause__ = None if code is None else OSError(code, os.strerror(code))
    return error


def test_a_run_that_was_refused_before_it_began_is_removed(tmp_path: Path) -> None:
    for number, error in enumerate((ValueError("x"), refusal(None), refusal(errno.EACCES))):
        with create(tmp_path / str(number)) as run:
            for kind in ("no_end_known", "reward_check", "environment", "preflight"):
                run.events.append(kind, 0)
            assert run.remove_unstarted(error)
        assert not run.path.exists()


def test_logs_that_the_error_names_stay_and_the_folder_can_be_used_again(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        log = run.path / "logs" / "vllm-0.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text("no such device")
        assert run.remove_unstarted(ValueError(f"vLLM is gone; its log is {log.absolute()}"))
    assert [path for path in run.path.rglob("*") if path.is_file()] == [log]
    with create(tmp_path / "run") as again:
        assert again.events.read()


def test_a_run_that_the_disk_refused_or_that_has_done_something_stays(tmp_path: Path) -> None:
    with create(tmp_path / "disk") as run:
        assert not run.remove_unstarted(refusal(errno.ENOSPC))
    with create(tmp_path / "step") as run:
        run.events.append("step", 1)
        assert not run.remove_unstarted(refusal(None))
    with create(tmp_path / "samples") as run:
        (run.path / "samples" / "val-000000.parquet").touch()
        assert not run.remove_unstarted(refusal(None))
    assert all(is_run(tmp_path / name) for name in ("disk", "step", "samples"))


def test_an_existing_run_points_to_resume(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    with pytest.raises(
        RunError, match=r"already holds the run \d{8}-\d{6}-\w{6}, started .*--resume .*run, or"
    ):
        create(tmp_path / "run")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(
        RunError, match=r"exists and is no run folder \(it holds thesis\.tex\): choose an empty"
    ):
        create(tmp_path)
    with pytest.raises(RunError, match=r"thesis\.tex is a file, not a folder"):
        create(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_and_the_rest_of_an_interrupted_start_are_taken(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "lock").write_text("")
    (tmp_path / "events.jsonl").write_text('{"kind":"created","step":0}\n')
    with create(tmp_path) as run:
        assert len(run.events.read()) == 1


@pytest.mark.parametrize("place", ["below a file", "in /proc"])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    path = {"below a file": tmp_path / "file" / "run", "in /proc": Path("/proc/strop/run")}[place]
    with pytest.raises(
        RunError, match=rf"cannot write the run folder {path}: [\w ]+; choose another one with --out"
    ):
        create(path)


READ_ONLY_DISK = """
import sys
from strop.run import RunError, RunFolder
for make in (lambda: RunFolder.create(sys.argv[1] + "/new", config={}, command=[]),
             lambda: RunFolder.open(sys.argv[1] + "/old")):
    try:
        make()
    except RunError as error:
        print(error)
print(RunFolder.open(sys.argv[1] + "/old", read_only=True).info["config"])
"""


def test_a_read_only_disk_can_be_looked_at_but_not_written(tmp_path: Path) -> None:
    create(tmp_path / "old").close()
    shell = (
        'mount --bind -o ro "$1" "$1" 2>/dev/null && mount -o remount,bind,ro "$1" 2>/dev/null || exit 77; '
    )
    shell += 'exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, READ_ONLY_DISK]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no read-only disk can be mounted")
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("this user may not mount a read-only disk")
    assert result.returncode == 0, result.stderr
    new, old, info = result.stdout.splitlines()
    assert (
        new
        == f"cannot write the run folder {tmp_path}/new: Read-only file system; choose another one with --out"
    )
    assert (
        old
        == f"cannot write the run folder {tmp_path}/old: Read-only file system; choose another one with --out"
    )
    assert info == "{'trainer': {'seed': 3}}"


def test_open_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"absent does not exist; give the folder that --out named"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(RunError, match=r"is no run folder \(it has no run\.json\)"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        RunFolder.open(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match=r"not of format 1; use the strop that wrote it"):
        RunFolder.open(tmp_path)


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with create(tmp_path / "run") as run:
        run.ledger.issue(1, ["a/0"])
        with pytest.raises(RunError, match=r"is being written by this process: wait until it ends"):
            RunFolder.open(run.path)
        reader = RunFolder.open(run.path, read_only=True)
        assert reader.ledger.in_flight() == ("a/0",)
        with pytest.raises(RunError, match="reading only"):
            reader.events.append("x", 1)
        reader.close()
    RunFolder.open(tmp_path / "run").close()


HOLDER = """
import sys, time
from strop.run import RunFolder
run = RunFolder.open(sys.argv[1])
run.events.append("step", 1)
print("held", flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_live_process_holds_and_dies_with_it(tmp_path: Path, start: Start) -> None:
    create(tmp_path).close()
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = start(command)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=rf"is being written by process {process.pid}: wait until it ends"):
        RunFolder.open(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == process.pid, (
        "the dead process is still named"
    )
    with RunFolder.open(tmp_path) as run:
        assert [record["step"] for record in run.events.read("step")] == [1]
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_without_flock_the_process_named_in_the_file_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    create(tmp_path).close()

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    sleeper = start(["sleep", "600"])
    host = os.uname().nodename
    (tmp_path / "lock").write_text(json.dumps({"pid": sleeper.pid, "host": host}))
    with pytest.raises(RunError, match=rf"written by process {sleeper.pid}: wait"):
        RunFolder.open(tmp_path)
    sleeper.kill()
    sleeper.wait()
    RunFolder.open(tmp_path).close()
    (tmp_path / "lock").write_text(json.dumps({"pid": sleeper.pid, "host": "elsewhere"}))
    with pytest.raises(
        RunError, match=rf"written by process {sleeper.pid} on elsewhere: wait .* remove .*lock"
    ):
        RunFolder.open(tmp_path)


def test_rollback_takes_back_events_ledger_fingerprints_samples_and_checkpoints(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", config={}, command=[], settings=RunConfig(keep_last=5))
    for step in (1, 2, 3):
        run.ledger.issue(step, [f"p{step}/0"])
        run.ledger.settle(step, {f"p{step}/0": Fate("trained")})
        run.samples.write(step, [{"id": f"p{step}/0", "uid": f"p{step}", "sample_index": 0}])
        run.fingerprints.append(step, loss=str(step))
        save(
            run.checkpoints,
            step,
            write_model,
            facts={"ledger": run.ledger.state(), "chain": run.fingerprints.head},
        )
    run.rollback(2)
    facts = run.checkpoints.at(2).manifest.facts
    assert run.ledger.state() == facts["ledger"]
    assert run.fingerprints.head == facts["chain"]
    assert run.samples.steps() == [1, 2]
    assert run.checkpoints.steps() == [1, 2]
    run.ledger.issue(3, ["p3/0"])
    run.fingerprints.append(3, loss="other")
    run.close()
    with RunFolder.open(run.path) as again:
        assert again.ledger.in_flight() == ("p3/0",)
        assert [one.stages["loss"] for one in again.fingerprints.read()] == ["1", "2", "other"]
        assert "versions" in again.events.read("resumed")[0]
        again.ledger.check()


def test_the_room_loads_without_torch_and_pyarrow() -> None:
    code = "import sys, strop.run; print({'torch', 'pyarrow', 'matplotlib', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "set()\n", result.stdout + result.stderr
