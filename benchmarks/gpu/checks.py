"""Steps tests and quickstart: what is right on this card, and whether a run learns on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.look import ROOT, Facts, Look
from strop.observability.trackers.setup import read_metrics
from strop.utils.machine_limits import usable_cores

STROP = (sys.executable, "-m", "strop")
OUTCOMES = ("passed", "failed", "skipped")
SHOWN = (
    "training/rollout_log_probs_diff_max", "training/rollout_log_probs_diff_mean", "actor/grad_norm",
    "response_length/mean",
)  # fmt: skip
"""Metrics of which the first two values and the last one are noted."""


def gpu_tests(look: Look) -> None:
    """The tests marked gpu; in a rehearsal they are collected, and skip themselves."""
    look.measure("pytest -m gpu", lambda facts: _tests(look, facts))


def _tests(look: Look, facts: Facts) -> None:
    """Each file in a process of its own, as many at a time as half of the cores: after an error of CUDA nothing works
    in a process, and compiling kernels takes most of the time."""
    files = [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"mark\.gpu\b", path.read_text(errors="replace"))
    ]  # fmt: skip
    look.work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(1, usable_cores() // 2)) as at_once:
        results = dict(zip(files, at_once.map(partial(_file_tests, look), files), strict=True))
    facts["files"] = results
    facts |= {outcome: sum(result[outcome] for result in results.values()) for outcome in OUTCOMES}
    if bad := [file for file, result in results.items() if result["exit"]]:
        raise RuntimeError(f"{facts['failed']} of the tests marked gpu failed; look at {', '.join(bad)}")


def _file_tests(look: Look, file: str) -> Facts:
    """Outcomes of the tests of a file; where its process was stopped, or killed by one of them, those until then."""
    if look.left_s <= 0:
        return {"exit": "not begun", **dict.fromkeys(OUTCOMES, 0)}
    name = Path(file).stem
    report, log = look.work / f"{name}.xml", look.out / f"{name}.log"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "--tb=short"]
    code: int | str = "stopped"
    with log.open("wb") as lines, contextlib.suppress(subprocess.TimeoutExpired):
        code = subprocess.run(
            [*words, f"--junitxml={report}", file], cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=max(1, look.left_s), check=False,
        ).returncode  # fmt: skip
    if report.is_file():
        return {"exit": code, **_outcomes(report)}
    said = log.read_text(errors="replace")
    return {"exit": code, **outcomes_so_far(said), "last": said[-400:]}


def outcomes_so_far(said: str) -> Facts:
    """Tests by outcome, those that failed, and the one that ran when pytest ended, of what it said until then."""
    lines = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|Fatal|$)", said, re.MULTILINE)
    counts = Counter("failed" if outcome == "ERROR" else outcome.lower() for _, outcome in lines)
    return {
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "failures": {name: "" for name, outcome in lines if outcome in ("FAILED", "ERROR")},
        "running": [name for name, outcome in lines if outcome in ("", "Fatal")][-1:],
    }


def _outcomes(report: Path) -> Facts:
    """Tests by outcome, and the messages of those that failed."""
    counts = dict.fromkeys(OUTCOMES, 0)
    failures = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error")), None)
        if bad is not None:
            counts["failed"] += 1
            said = bad.get("message") if bad.tag == "failure" else (bad.text or "")[-400:]
            failures[str(case.get("name"))] = (said or "")[:400]
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return {**counts, "failures": failures}


def quickstart(look: Look) -> None:
    """`strop quickstart` on the device."""
    look.measure("strop quickstart", lambda facts: _quickstart(look, facts))


def _quickstart(look: Look, facts: Facts) -> None:
    folder = look.work / "quickstart"
    words = [*STROP, "quickstart", "--json", "--out", str(folder), f"resources.device={look.device}"]
    if look.is_rehearsal:
        words += ["trainer.max_steps=2", "sft.max_steps=3", "trainer.preflight=false"]
    metrics = folder / "train" / "metrics.jsonl"
    try:
        done = run_strop(look, words, facts)
    finally:
        if metrics.is_file():
            note_metrics(metrics, facts)
    facts |= json.loads(done.stdout.strip().splitlines()[-1])


def run_strop(look: Look, words: list[str], facts: Facts) -> subprocess.CompletedProcess[str]:
    """A command that must succeed in the time that is left."""
    try:
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=max(10, look.left_s), check=False
        )
    except subprocess.TimeoutExpired as error:
        print(*((text or b"")[-4000:].decode(errors="replace") for text in (error.stdout, error.stderr)))
        raise
    print(done.stdout[-4000:], done.stderr[-4000:])
    facts["exit"] = done.returncode
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[2:5])} ended with {done.returncode}: {done.stderr[-400:]}")
    return done


def note_metrics(file: Path, facts: Facts) -> None:
    """Medians of the stages' times over the steps behind the first, and what says that rollout and trainer agree."""
    steps = [row for row in read_metrics(file) if "timing_s/step" in row]
    if not steps:
        return
    late = steps[1:] or steps
    names = sorted({name for row in late for name in row if re.fullmatch(r"timing_s/\w+", name)})
    facts["steps"] = len(steps)
    facts["median_s"] = {
        name.removeprefix("timing_s/"): round(statistics.median(row[name] for row in late if name in row), 3)
        for name in names
    }
    for name in SHOWN:
        values = [row[name] for row in steps if name in row]
        if values:
            facts[name] = [round(value, 8) for value in values[:2] + values[-1:]]
    facts["perf"] = {name: round(value, 4) for name, value in late[-1].items() if name.startswith("perf/")}
