"""How long a sandbox takes to start, alone and with many at once, and how many fail.

    make bench BENCH=sandbox
    make bench BENCH=sandbox ARGS="--at-once 32 --rounds 4"

prints one JSON line. Each program is a Python interpreter that prints one word. For each way: the share of programs
that did not come back with it; the median and the 95th percentile of the start (from the free launcher to the first
process of the program) and of the whole run; programs per second. The peer is the same interpreter as a plain
subprocess, without any isolation: what the sandbox costs is the ratio to it. `launcher_s` is the time until the pool's
launchers have started, which happens once, and `check_s` the proof of the isolation, once per process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from machine import machine

from strop.sandbox import LocalSandbox, Program, SandboxConfig
from strop.sandbox.mounts import host_view

PROGRAM = "print('fine')"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    where = machine()
    before = plain_processes(arguments.at_once, arguments.rounds)
    alone = asyncio.run(sandboxes(1, 20, uses_groups=True))
    ways = {
        name: asyncio.run(sandboxes(arguments.at_once, arguments.rounds, uses_groups=uses_groups))
        for name, uses_groups in (("with_control_groups", True), ("measured", False))
    }
    after = plain_processes(arguments.at_once, arguments.rounds)
    peer = min(
        before, after, key=lambda one: one["run_p50_ms"]
    )  # the machine may be less busy at one of the two times
    print(
        json.dumps(
            {
                "benchmark": "sandbox",
                "machine": where,
                "at_once": arguments.at_once,
                "programs": arguments.at_once * arguments.rounds,
                "plain_subprocess": peer,
                "one_at_a_time": alone,
                **ways,
                "ratio_of_medians_to_plain": {
                    name: round(way["run_p50_ms"] / peer["run_p50_ms"], 2) for name, way in ways.items()
                },
            }
        )
    )


def plain_processes(at_once: int, rounds: int) -> dict[str, Any]:
    """The same programs without isolation."""
    python = host_view("", ()).python

    def run_one(_number: int) -> float:
        started = time.perf_counter()
        command = [python, "-S", "-B", "-c", PROGRAM]  # -S: a sandbox has no packages to look for either
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "fine\n", "the peer does the same"
        return time.perf_counter() - started

    with ThreadPoolExecutor(at_once) as threads:
        started = time.perf_counter()
        seconds = [each for _ in range(rounds) for each in threads.map(run_one, range(at_once))]
        total_s = time.perf_counter() - started
    return {"errors": 0.0, **percentiles("run", seconds), "programs_per_s": round(len(seconds) / total_s, 1)}


async def sandboxes(at_once: int, rounds: int, *, uses_groups: bool) -> dict[str, Any]:
    """The programs in sandboxes."""
    started = time.perf_counter()
    async with LocalSandbox(
        SandboxConfig(max_concurrent=at_once, num_warm=0), uses_groups=uses_groups
    ) as sandbox:
        check_s = time.perf_counter() - started
        started = time.perf_counter()
        await asyncio.gather(*(sandbox.run(Program(code=PROGRAM)) for _ in range(at_once)))
        launcher_s = time.perf_counter() - started
        starts, runs, errors = [], [], 0

        async def run_one() -> None:
            nonlocal errors
            began = time.perf_counter()
            result = await sandbox.run(Program(code=PROGRAM))
            runs.append(time.perf_counter() - began)
            starts.append(result.start_s)
            errors += result.text != "fine\n"

        started = time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(run_one() for _ in range(at_once)))
        total_s = time.perf_counter() - started
    return {
        "errors": errors / len(runs),
        **percentiles("start", starts),
        **percentiles("run", runs),
        "programs_per_s": round(len(runs) / total_s, 1),
        "check_s": round(check_s, 2),
        "launcher_s": round(launcher_s, 2),
    }


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=20)
    return {
        f"{name}_p50_ms": round(1e3 * statistics.median(seconds), 1),
        f"{name}_p95_ms": round(1e3 * cuts[-1], 1),
    }


if __name__ == "__main__":
    main()
