"""The event log: whole records only, whatever interrupted a write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strop.run import EventLog, RunConfig, RunError

Start = Callable[[list[str]], "subprocess.Popen[str]"]
LINE = b'{"kind":"step","step":%d,"time":0.0}\n'


def steps(log: EventLog) -> list[int]:
    return [record["step"] for record in log.read()]


def test_records_come_back_in_order_with_their_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append("created", 0, id="a")
    log.append("step", 1, reward=0.5, ids=("x", "y"), count=np.int64(3), flag=np.bool_(True))
    (record,) = log.read("step")
    assert record["time"] > 1e9
    del record["time"]
    assert record == {"kind": "step", "step": 1, "reward": 0.5, "ids": ["x", "y"], "count": 3, "flag": True}
    assert [one["kind"] for one in EventLog(log.path).read()] == ["created", "step"]


def test_non_finite_numbers_become_words_that_every_json_reader_takes(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append("step", 1, values=[float("nan"), float("inf"), np.float32("-inf")])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    record = json.loads(log.path.read_text(), parse_constant=refuse)
    assert record["values"] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize(
    "torn", [b"{", b'{"kind":"step","step":3', LINE[:-1] % 3, b"\0" * 40, b"\xff\xfe", b"\0\0\n"]
)
def test_torn_last_line_is_skipped_then_cut(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(LINE % 1 + LINE % 2 + torn)
    assert steps(EventLog(path)) == [1, 2]
    assert path.read_bytes().endswith(torn), "reading must not change the file"
    log = EventLog(path)
    log.append("step", 4)
    assert steps(log) == [1, 2, 4]
    assert path.read_bytes().startswith(LINE % 1 + LINE % 2 + b'{"kind":"step","step":4,')


def test_every_cut_of_the_file_gives_the_whole_lines_before_it(tmp_path: Path) -> None:
    content = b"".join(LINE % step for step in range(3))
    for cut in range(len(content) + 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(content[:cut])
        log = EventLog(path)
        whole = list(range(content[:cut].count(b"\n")))
        assert steps(log) == whole
        log.append("step", 9)
        assert steps(EventLog(path)) == [*whole, 9]
        log.close()


def test_damage_in_the_middle_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(LINE % 1 + b"garbage\n" + LINE % 2)
    with pytest.raises(RunError, match=r"line 2 of .*events\.jsonl is no event record.*garbage"):
        EventLog(path).read()


def test_rollback_drops_later_steps_written_before_it_only(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3, 4):
        log.append("step", step)
    log.rollback(2)
    for step in (3, 4, 5):
        log.append("again", step)
    log.rollback(4)
    log.append("last", 5)
    kinds = [(record["kind"], record["step"]) for record in EventLog(log.path).read()]
    assert kinds == [
        ("step", 1), ("step", 2), ("resumed", 2), ("again", 3), ("again", 4), ("resumed", 4), ("last", 5)
    ]  # fmt: skip


def test_bad_records_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="step -1; steps count from 0"):
        log.append("step", -1)
    with pytest.raises(ValueError, match="a field 'time'"):
        log.append("step", 1, time=3)
    assert log.read() == []


def test_read_only_log_refuses_to_write(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="open for reading only"):
        EventLog(tmp_path / "events.jsonl", read_only=True).append("step", 1)


SIZE_LIMIT = """
import resource, sys
from pathlib import Path
from strop.run import EventLog, RunError
log = EventLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for step in range(100):
        log.append("step", step)
except RunError as error:
    print(step, error)
"""


def test_a_refused_write_keeps_the_records_before_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", SIZE_LIMIT, str(path)], capture_output=True, text=True, timeout=60
    )
    failed_step, message = result.stdout.split(" ", 1)
    assert "cannot write the event log" in message
    assert "File too large" in message
    assert steps(EventLog(path)) == list(range(int(failed_step)))
    assert path.read_bytes().endswith(b"\n"), "the part of a line that fitted is taken back"


KILLED = """
import sys
from collections.abc import Callable
from pathlib import Path
from strop.run import EventLog
log = EventLog(Path(sys.argv[1]))
for step in range(10**9):
    log.append("step", step, ids=["x" * 50] * 20)
    if step == 50:
        print("going", flush=True)
"""


def test_kill_9_loses_no_record_that_append_returned_from(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "events.jsonl"
    process = start([sys.executable, "-c", KILLED, str(path)])
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = steps(EventLog(path))
    assert len(found) > 50
    assert found == list(range(len(found)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("save_every", -1, "whole number of at least 0"),
        ("keep_last", 0, "needs its newest checkpoint"),
        ("keep_best", -1, "whole number of at least 0"),
    ],
)
def test_run_config_refuses_impossible_numbers(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"run\.{field} is {value}, but .*{message}"):
        RunConfig(**{field: value})
