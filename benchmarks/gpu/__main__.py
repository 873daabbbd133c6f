"""All steps, one JSON line each: `python -m benchmarks.gpu [--device cpu] [--only env,rollout] [--out FOLDER]`.

The line of a step is printed when the step ends, and has all measurements of it, also where it failed or was stopped.
Steps are in order of value; those of one group run side by side, since they wait for Python and not for the device:
their times are not for quoting. Later groups have the time that earlier ones left. The exit code is 1 where a step
failed.

The folder gets results.jsonl (these lines), summary.txt, a log and the measurements of each step (NAME.log,
NAME.jsonl), and profile.json.gz (ten decode steps, for chrome://tracing).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from strop.utils.allocator import allocator_variables
from strop.utils.device import num_devices

ROOT = Path(__file__).resolve().parents[2]
END_S = 5.0
"""Kept for the summary."""
LEAST_S = 12.0
"""A step that would have less is skipped."""
POLL_S = 0.1
"""Between two looks at the steps that run."""
CPU_FACTOR = 4.0
"""Limits of a rehearsal, over those of a card: toys, but slow imports."""


@dataclass(frozen=True)
class Step:
    """A process of measurements."""

    name: str
    limit_s: float
    group: int
    about: str


STEPS = (
    Step("env", 45, 0, "card, versions, ceilings, costs of small calls; makes the model"),
    Step("tests", 130, 1, "tests marked gpu"),
    Step("quickstart", 130, 1, "strop quickstart: does it learn"),
    Step("agreement", 100, 1, "log-probs of rollout and trainer, tokens of generate"),
    Step("compile", 130, 1, "compiled layers, and a model sharded over one rank"),
    Step("rollout", 80, 2, "tokens/s of generation beside transformers"),
    Step("update", 75, 3, "tokens/s of an update beside a padded loop"),
    Step("grpo", 75, 4, "whole steps: phases, waits, idle share"),
    Step("memory", 35, 5, "memory handed over; what is said when there is none"),
    Step("kernels", 35, 6, "attention, sampling and head alone"),
)


@dataclass
class Running:
    """A step that was started."""

    step: Step
    process: subprocess.Popen[bytes]
    begin: float
    deadline: float


def main() -> None:
    """Run the steps, and write what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="its content is replaced")
    parser.add_argument("--total-s", type=float, default=480.0, help="for all steps; no limit on a CPU")
    arguments = parser.parse_args()
    steps = _chosen(arguments.only)
    check_transformers(metadata.version("transformers"))
    if num_devices(arguments.device) == 0:
        sys.exit("torch finds no GPU on this machine; `make gpu DEVICE=cpu` rehearses the steps with toys")
    out: Path = arguments.out.resolve()
    _clear(out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    on_card = arguments.device != "cpu"
    end = time.time() + arguments.total_s - END_S if on_card else float("inf")
    # A rehearsal runs them one after another: on a small machine.
    groups = groupby(steps, key=lambda step: step.group if on_card else step.name)
    rows, left_s = [], 0.0
    try:
        for _, members in groups:
            group, begin = list(members), time.time()
            rows += _run(group, out, end, arguments.device, left_s=left_s)
            left_s += max(step.limit_s for step in group) - (time.time() - begin)
    finally:
        (out / "summary.txt").write_text(_summary(rows))
        shutil.rmtree(out / "work", ignore_errors=True)
    sys.exit(any(row["status"] != "ok" for row in rows))


def check_transformers(version: str) -> None:
    """Refuse a version of transformers that runs of strop refuse: a machine's own may be older, and then four of the
    steps would fail after minutes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = (
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "transformers"
    )
    if not declared.specifier.contains(version, prereleases=True):
        sys.exit(
            f"transformers {version} is installed, and strop needs {declared}: its runs refuse chat templates of "
            f"others; install it first (its wheel alone: pip install --no-deps)"
        )


def _clear(out: Path) -> None:
    """Remove what an earlier call left, its model too, which may be a toy: nothing of it is this one's."""
    for file in (*out.glob("*.jsonl"), *out.glob("*.log"), *out.glob("summary.txt")):
        file.unlink()
    if (out / "work").exists():
        shutil.rmtree(out / "work")
    out.mkdir(parents=True, exist_ok=True)


def _chosen(only: str) -> list[Step]:
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        sys.exit(f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if not names or step.name in names]


def _run(
    group: Sequence[Step], out: Path, end: float, device: str, *, left_s: float = 0.0
) -> list[dict[str, Any]]:
    """The lines of steps that run side by side, in the order in which they end; earlier ones left them so much time
    beyond their own limits."""
    rows: list[dict[str, Any]] = []
    running: list[Running] = []
    try:
        for step in group:
            begin = time.time()
            limit_s = step.limit_s * CPU_FACTOR if device == "cpu" else step.limit_s + max(0.0, left_s)
            deadline = min(begin + limit_s, end)
            if deadline - begin < LEAST_S:
                rows.append(_row(step, out, "skipped", 0.0, "no time was left"))
            else:
                process = _start(_command(step.name, device, out, deadline - 4), out / f"{step.name}.log")
                running.append(Running(step, process, begin, deadline))
        rows += _ends(running, out)
    except BaseException:  # an interrupt ends what was started too
        for one in running:
            if one.process.returncode is None:
                _kill(one.process)
        raise
    return rows


def _command(step: str, device: str, out: Path, deadline: float) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.steps", step, device, str(out), str(deadline)]


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **allocator_variables(os.environ), **_ENVIRONMENT}, start_new_session=True,
        )  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a step and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}  # fmt: skip


def _ends(running: Sequence[Running], out: Path) -> Iterator[dict[str, Any]]:
    """The line of each step as soon as it has ended, or was ended at its deadline."""
    left = list(running)
    while left:
        for one in [one for one in left if one.process.poll() is not None or time.time() >= one.deadline]:
            left.remove(one)
            yield _end(one, out)
        time.sleep(POLL_S if left else 0)


def _end(running: Running, out: Path) -> dict[str, Any]:
    """End a step with whatever it has started, and print its line."""
    step, code, seconds = running.step, running.process.poll(), time.time() - running.begin
    if code is None:
        status, why = "stopped", f"at its limit of {running.deadline - running.begin:.0f} s"
    else:
        status, why = ("ok", "") if code == 0 else ("failed", f"exit code {code}; see {step.name}.log")
    _kill(running.process)
    return _row(step, out, status, seconds, why)


def _row(step: Step, out: Path, status: str, seconds: float, why: str) -> dict[str, Any]:
    file = out / f"{step.name}.jsonl"
    measured = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    row: dict[str, Any] = {"step": step.name, "status": status, "seconds": round(seconds, 1)}
    row |= {"why": why} if why else {}
    row["measured"] = measured
    with (out / "results.jsonl").open("a") as results:
        results.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line per measurement."""
    about = {step.name: step.about for step in STEPS}
    lines = []
    for row in rows:
        name = row["step"]
        lines.append(f"## {name} ({about[name]}): {row['status']}, {row['seconds']} s {row.get('why', '')}")
        for measured in row["measured"]:
            facts = json.dumps({key: value for key, value in measured.items() if key != "what"})
            lines.append(f"  {measured['what']}: {facts}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
