"""One sample's reward function does its worst; the other samples and the run notice nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
from reward_cases import reward_processes, score_all, write_reward

from strop.rewards import RewardConfig

pytestmark = pytest.mark.timeout(120)

HOSTILE = r"""
import ctypes, os, signal, sys, threading, time

class Nasty(Exception):
    def __init__(self):
        super().__init__(lambda: None, threading.Lock())
    def __str__(self):
        raise RuntimeError("no text")
    def __repr__(self):
        raise RuntimeError("no text")
    def __reduce__(self):
        raise TypeError("cannot be pickled")

class Loud:
    def __repr__(self):
        raise RuntimeError("no repr")

def spin():
    while True:
        time.sleep(0.01)

def compute_score(solution_str, **_):
    match solution_str:
        case "nasty": raise Nasty()
        case "nasty group": raise BaseExceptionGroup("all", [Nasty(), KeyboardInterrupt()])
        case "deep group":
            error = ValueError("inside")
            for _ in range(5000):
                error = ExceptionGroup("one more", [error])
            raise error
        case "giant error": raise ValueError("x" * 50_000_000)
        case "giant part": return {"score": 1.0, "text": "x" * 50_000_000}
        case "giant output":
            for _ in range(20): os.write(1, b"x" * 1_000_000)
            print("y" * 1_000_000, flush=True)
            return 1.0
        case "fork":
            os.fork()
            return 1.0
        case "fork and spin":
            ready, told = os.pipe()
            if os.fork() == 0:
                filled = b"x" * (400 << 20)  # takes a while to be given back
                os.write(told, b"x")
                spin()
            os.read(ready, 1)
            return 1.0
        case "fork and raise":
            if os.fork() == 0: raise ValueError("in the copy")
            return 1.0
        case "threads":
            for _ in range(3): threading.Thread(target=spin).start()
            return 1.0
        case "close": os.closerange(3, 200)
        case "input": input()
        case "loud": return Loud()
        case "alarm": signal.setitimer(signal.ITIMER_REAL, 0.01); spin()
        case "stack": return deep(0)
        case "no stdout": sys.stdout.close(); sys.stderr.close(); return 1.0
        case "surrogate": return {"score": 1.0, "pred": "\ud800\u2028"}
    return int(solution_str) / 7

def deep(n):
    return deep(n + 1)
"""
EXPECTED = {
    "nasty": "raised Nasty, whose text cannot be shown",
    "nasty group": "raised Nasty, whose text cannot be shown",
    "deep group": "raised ExceptionGroup",
    "giant error": "raised ValueError: xxx",
    "giant part": "returned more than 1048576 bytes; return less text",
    "giant output": 1.0,
    "fork": 1.0,
    "fork and spin": 1.0,
    "fork and raise": 1.0,
    "threads": 1.0,
    "close": "the worker process exited with status",
    "input": "raised EOFError",
    "loud": "returned the Loud <Loud>, which is no number",
    "alarm": "died with SIGALRM",
    "stack": "raised RecursionError",
    "no stdout": 1.0,
    "surrogate": 1.0,
}


def test_whatever_one_sample_does_the_others_have_their_scores(tmp_path: Path) -> None:
    before = threading.active_count()
    texts: list[str] = []
    for number, case in enumerate(EXPECTED):
        texts += [case, str(number)]
    config = RewardConfig(path=write_reward(tmp_path, HOSTILE), timeout_s=20.0)
    outcomes = score_all(config, texts)
    for text, outcome in zip(texts, outcomes, strict=True):
        wanted = EXPECTED.get(text, int(text) / 7 if text.isdigit() else None)
        if isinstance(wanted, str):
            assert (text, outcome.kind, outcome.score) == (text, "error", None)
            assert wanted in outcome.error
            assert len(outcome.error) < 3000
            assert "\n" not in outcome.error
        else:
            assert (text, outcome.score, outcome.error) == (text, wanted, "")
    assert reward_processes() == []
    assert threading.active_count() <= before + 1, "the pool's own thread has ended, or is about to"


def test_copies_that_a_function_forked_end_with_its_worker(tmp_path: Path) -> None:
    others = {process.pid for process in psutil.process_iter()}
    config = RewardConfig(path=write_reward(tmp_path, HOSTILE), num_workers=1, timeout_s=20.0)
    outcomes = score_all(config, ["fork and spin", "7"])
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0]
    left = [
        process.pid for process in psutil.process_iter(["cmdline"])
        if process.pid not in others and "strop.rewards" in " ".join(process.info["cmdline"] or [])
        and process.status() != psutil.STATUS_ZOMBIE and process.ppid() == 1
    ]  # fmt: skip
    assert left == []
