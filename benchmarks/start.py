"""What a command costs before it does anything, and what a busy program beside a quickstart costs it.

    python benchmarks/start.py                    processor seconds of commands that only read settings
    python benchmarks/start.py --quickstart 100   besides: a quickstart of 100 steps alone and beside an endless loop

Processor time is that of the command and its children, so it hardly depends on what else the machine does; the seconds
of the quickstart do, and `load_at_start` says how much that was. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

STROP = (sys.executable, "-m", "strop.cli.main")
EXAMPLES = Path(__file__).parent.parent / "examples"
COMMANDS = {
    "import strop": (sys.executable, "-c", "import strop"),
    "config show": (*STROP, "config", "show"),
    "config explain": (*STROP, "config", "explain", "algorithm.adv_estimator"),
    "config diff": (
        *STROP, "config", "diff", str(EXAMPLES / "arithmetic/config.yaml"), str(EXAMPLES / "smollm2/config.yaml"),
    ),
    "train, key misspelt": (*STROP, "train", "trainer.max_stepz=3"),
    "train, settings refused": (*STROP, "train", "algorithm=dr_grpo"),
    "migrate": (*STROP, "migrate", "verl", "script.sh"),
}  # fmt: skip
SCRIPT = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n"
BUSY = (sys.executable, "-c", "while True: pass")


def processor_seconds(command: tuple[str, ...], folder: Path) -> float:
    """User and system time of a command, the least of three."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=folder, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(took), 3)


def quickstart(folder: Path, steps: int, *overrides: str, is_busy: bool) -> dict[str, Any]:
    """Seconds of a quickstart, and the threads it chose; beside an endless loop if `is_busy`."""
    other = subprocess.Popen(BUSY) if is_busy else None
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*STROP, "quickstart", "--out", str(folder), f"trainer.max_steps={steps}", *overrides],
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        if other is not None:
            other.kill()
            other.wait()
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("threads: ")]
    return {"seconds": round(time.perf_counter() - start, 1), "threads": said}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", type=int, default=0, metavar="STEPS", help="0: leave it out")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "start", "machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.sh").write_text(SCRIPT, encoding="utf-8")
        result["processor_s"] = {
            what: processor_seconds(command, folder) for what, command in COMMANDS.items()
        }
        if args.quickstart:
            alone = quickstart(folder / "alone", args.quickstart, is_busy=False)
            beside = quickstart(folder / "beside", args.quickstart, is_busy=True)
            result["quickstart"] = {
                "alone": alone,
                "beside_a_busy_program": beside,
                "ratio": round(beside["seconds"] / alone["seconds"], 2),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
