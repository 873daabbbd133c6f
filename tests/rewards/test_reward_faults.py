"""Reward functions that hang, crash and lie, in real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from program_path import python_path
from reward_cases import (
    DEADLINE_S,
    FAULTS,
    make_prompt,
    make_trajectory,
    score_all,
    score_one,
    write_reward,
)

from strop.rewards import Outcome, RewardConfig, RewardError, RewardPool
from strop.rewards.outcome import remedies

pytestmark = pytest.mark.timeout(60)


BAD_RETURNS = {
    "float('nan')": "returned nan; return a finite number",
    "float('inf')": "returned inf; return a finite number",
    "10 ** 400": "returned inf; return a finite number",
    "'0.5'": "returned the str '0.5', which is no number",
    "None": "returned None, which is no number",
    "[1.0]": "returned the list [1.0], which is no number",
    "1j": "returned the complex 1j, which is no number",
    "{'acc': 1}": "returned a dictionary without \"score\": the dict {'acc': 1}",
    "{'score': None}": "returned a dictionary whose score is None",
    "{'score': float('nan')}": "returned a dictionary whose score is nan",
}
RAISED = {
    "1 / 0": "raised ZeroDivisionError: division by zero at my_reward.py:",
    "sys.exit(3)": "raised SystemExit: 3 at my_reward.py:",
    "compute_score(solution_str)": "raised RecursionError: ",
    "interrupt()": "raised KeyboardInterrupt at my_reward.py:3",
    "json.loads('{')": "raised JSONDecodeError: Expecting property name",
}


def test_bad_return_or_exception_is_an_error_that_names_it(tmp_path: Path) -> None:
    expected = BAD_RETURNS | RAISED
    cases = "".join(f"    if solution_str == {case!r}: return {case}\n" for case in expected)
    source = (
        f"import json, sys\ndef interrupt():\n    raise KeyboardInterrupt\n"
        f"def compute_score(solution_str, **_):\n{cases}    return 1\n"
    )
    outcomes = score_all(RewardConfig(path=write_reward(tmp_path, source)), [*expected, "good"])
    for case, outcome in zip(expected, outcomes, strict=False):
        assert (case, outcome.kind, outcome.score) == (case, "error", None)
        assert f"compute_score in my_reward.py {expected[case]}" in outcome.error
        assert "\n" not in outcome.error
    assert "at my_reward.py:15" in outcomes[list(expected).index("1 / 0")].error
    assert outcomes[-1].score == 1.0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("os._exit(3)", "exited with status 3 in compute_score"),
        ("ctypes.string_at(8)", "died with SIGSEGV in compute_score in my_reward.py at my_reward.py:4"),
        ("os.kill(os.getpid(), 9)", "died with SIGKILL (often the system's out-of-memory killer)"),
        ("os.abort()", "died with SIGABRT"),
    ],
)
def test_death_of_the_process_is_an_error_with_its_signal(tmp_path: Path, body: str, sentence: str) -> None:
    outcome = score_one(tmp_path, f"import ctypes, os\n\ndef compute_score(**_):\n    {body}\n")
    assert outcome.kind == "error"
    assert sentence in outcome.error


@pytest.mark.parametrize(
    "body", ["while True: pass", "time.sleep(1e6)", "sum(range(10**12))", "signal.pause()"]
)
def test_function_that_never_returns_is_a_timeout_that_names_the_line(tmp_path: Path, body: str) -> None:
    started = time.monotonic()
    outcome = score_one(tmp_path, f"import time, signal\n\ndef compute_score(**_):\n    {body}\n")
    assert outcome.kind == "timeout"
    assert "did not finish in 0.3 s (reward.timeout_s) at my_reward.py:4 in compute_score" in outcome.error
    assert DEADLINE_S <= outcome.seconds < DEADLINE_S + 2
    assert time.monotonic() - started < 10


def test_a_file_that_takes_too_much_memory_is_told_the_limit(tmp_path: Path) -> None:
    config = RewardConfig(
        path=write_reward(tmp_path, "kept = bytearray(1 << 30)\ndef compute_score(**_): return 1.0\n"),
        num_workers=1, max_memory_gib=0.25,
    )  # fmt: skip
    with pytest.raises(RewardError, match=r"MemoryError at my_reward.py:1; a worker may allocate 0\.25 GiB"):
        score_all(config, ["x"])


def test_too_much_memory_is_an_error_and_the_next_sample_is_scored(tmp_path: Path) -> None:
    source = """
        kept = []
        def compute_score(solution_str, **_):
            if solution_str == "greedy":
                while True:
                    kept.append(bytearray(16 << 20))
            return len(kept)
    """
    config = RewardConfig(
        path=write_reward(tmp_path, source), num_workers=1, max_memory_gib=0.25, timeout_s=20.0
    )
    greedy, modest = score_all(config, ["greedy", "modest"])
    assert greedy.kind == "error"
    assert "ran out of memory" in greedy.error
    assert "a worker may allocate 0.25 GiB (reward.max_memory_gib)" in greedy.error
    assert (modest.score, modest.error) == (0.0, "")  # in a process of its own: nothing kept


def test_output_of_the_function_does_not_disturb_the_scores(tmp_path: Path) -> None:
    source = """
        import os, sys
        def compute_score(solution_str, **_):
            print('["done", 0, 99.0, {}, [], "", 0.0]')
            sys.stderr.write("x" * 200_000)
            os.write(1, b"\\xff\\n" * 1000)
            return int(solution_str)
    """
    outcomes = score_all(RewardConfig(path=write_reward(tmp_path, source)), [str(n) for n in range(20)])
    assert [outcome.score for outcome in outcomes] == [float(n) for n in range(20)]


def test_other_samples_are_the_same_with_and_without_faults(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), timeout_s=DEADLINE_S)
    good = [str(n) for n in range(60)]
    mixed = list(good)
    faults = {
        5: "sleep",
        11: "segfault",
        12: "exit",
        30: "raise",
        31: "nan",
        47: "text",
        50: "spin",
        61: "exit",
    }
    for position, fault in faults.items():
        mixed.insert(position, fault)
    with_faults = score_all(config, mixed)
    kinds = {fault: with_faults[position].kind for position, fault in faults.items()}
    assert kinds == {
        "sleep": "timeout", "spin": "timeout", "segfault": "error", "exit": "error", "raise": "error",
        "nan": "error", "text": "error",
    }  # fmt: skip
    others = [outcome.score for position, outcome in enumerate(with_faults) if position not in faults]
    assert others == [n / 7 for n in range(60)]
    assert others == [outcome.score for outcome in score_all(config, good)]


REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_descriptors_and_threads_do_not_grow_with_crashes(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), num_workers=1)
    score_all(config, ["exit", "1"])
    before = psutil.Process().num_fds()
    score_all(config, ["exit", "segfault", "exit", "1"])
    assert psutil.Process().num_fds() == before


def test_processes_that_the_function_started_end_with_its_timeout(tmp_path: Path) -> None:
    source = f"""
        import pathlib, subprocess
        def compute_score(**_):
            process = subprocess.Popen(["sleep", "600"])
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(process.pid))
            process.wait()
    """
    assert score_one(tmp_path, source).kind == "timeout"
    assert_gone(int((tmp_path / "pid").read_text()))


def assert_gone(pid: int, within_s: float = 5.0) -> None:
    until = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.02)


PARENT = """
import asyncio, os, psutil, sys
from strop.rewards import RewardConfig, RewardPool
from strop.protocol.trajectory import Prompt

async def main():
    prompt = Prompt(uid="u", row=0, token_ids=(1,), messages=(), data_source="", ground_truth="")
    async with RewardPool(RewardConfig(path=sys.argv[1], timeout_s=600.0)) as pool:
        waiting = [asyncio.ensure_future(pool.score_text(prompt, text)) for text in ("sleep", "children")]
        while not os.path.exists(sys.argv[2]):
            await asyncio.sleep(0.01)
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        await asyncio.gather(*waiting)

asyncio.run(main())
"""


def test_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    source = f"""
        import os, pathlib, subprocess, time
        def compute_score(solution_str, **_):
            if solution_str == "children":
                process = subprocess.Popen(["sleep", "600"])
                pathlib.Path({str(mark)!r}).touch()
            while True:
                pass
    """
    command = [sys.executable, "-c", PARENT, write_reward(tmp_path, source), str(mark)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path(REPO)}
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3, "two workers and what one of them started"
        parent.send_signal(signal.SIGKILL)
    for pid in pids:
        assert_gone(pid)


@pytest.mark.parametrize("name", ["ground_truth", "extra_info"])
def test_no_row_ends_the_worker_that_reads_it(name: str) -> None:
    """Rows that the worker could not read ended it before it began to score, and three such ends end the pool."""

    def nested(depth: int) -> object:
        value: object = {"__bytes__": "aGk="}
        for _ in range(depth):
            value = [value]
        return value

    values = [{"__bytes__": one} for one in (1, None, [], "!", "aGk", "é")]
    values += [nested(depth) for depth in (90, 300, *range(860, 1000, 5))] + [10**4299]
    plain = make_prompt()
    hostile = [replace(plain, **{name: {"a": value} if name == "extra_info" else value}) for value in values]

    async def run() -> tuple[list[Outcome], Outcome]:
        async with RewardPool(RewardConfig(num_workers=1)) as pool:
            outcomes = [await pool.score(prompt, make_trajectory(), "12") for prompt in hostile]
            return outcomes, await pool.score(plain, make_trajectory(), "12")

    outcomes, last = asyncio.run(run())
    assert {one.kind for one in outcomes} <= {"score", "error"}
    assert last.score == 1.0


@pytest.mark.parametrize(("num_deaths", "is_loaded"), [(2, True), (3, False)])
def test_a_worker_that_is_killed_while_it_loads_is_started_again(
    tmp_path: Path, num_deaths: int, is_loaded: bool
) -> None:
    loads = tmp_path / "loads"
    loads.write_text("")
    source = f"""
import os, pathlib
loads = pathlib.Path({str(loads)!r})
loads.write_text(loads.read_text() + "x")
if len(loads.read_text()) <= {num_deaths}:
    os.kill(os.getpid(), 9)

def compute_score(**_):
    return 1.0
"""
    config = RewardConfig(path=write_reward(tmp_path, source), num_workers=1)
    if is_loaded:
        assert [one.score for one in score_all(config, ["good"])] == [1.0]
    else:
        with pytest.raises(RewardError, match="died with SIGKILL .* while loading compute_score"):
            score_all(config, ["good"])
    assert len(loads.read_text()) == 3


def test_after_workers_that_could_not_live_the_next_calls_find_new_ones(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    source = f"""
import os, pathlib
if pathlib.Path({str(broken)!r}).exists():
    os._exit(4)

def compute_score(solution_str, **_):
    if solution_str == "die":
        os._exit(5)
    return 1.0
"""

    async def run() -> list[Outcome]:
        async with RewardPool(RewardConfig(path=write_reward(tmp_path, source), num_workers=2)) as pool:

            async def score(*texts: str) -> list[Outcome]:
                calls = (pool.score(make_prompt(), make_trajectory(), text) for text in texts)
                return list(await asyncio.gather(*calls))

            first = await score("good")
            broken.touch()
            deaths = await score("die", "die")
            none = await score("good", "good")
            broken.unlink()
            return [*first, *deaths, *none, *await score("good", "good")]

    outcomes = asyncio.run(run())
    assert [one.score for one in outcomes] == [1.0, None, None, None, None, 1.0, 1.0]
    for one in outcomes[3:5]:
        assert one.kind == "infrastructure"
        assert (
            "not scored: reward workers die before they score anything: the worker process exited with status 4"
            in one.error
        )
        assert "what the reward file does as it is loaded" in remedies([one], repair="mend it")
