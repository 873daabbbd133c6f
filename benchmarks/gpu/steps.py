"""Process of one step: `python -m benchmarks.gpu.steps NAME DEVICE FOLDER DEADLINE`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.agreement import agreement
from benchmarks.gpu.checks import gpu_tests, quickstart
from benchmarks.gpu.compiled import compiled
from benchmarks.gpu.generation import rollout
from benchmarks.gpu.kernels import kernels
from benchmarks.gpu.look import Look
from benchmarks.gpu.machine import env
from benchmarks.gpu.memory import memory
from benchmarks.gpu.training import grpo
from benchmarks.gpu.update import update

STEPS: dict[str, Callable[[Look], None]] = {
    "env": env,
    "tests": gpu_tests,
    "quickstart": quickstart,
    "agreement": agreement,
    "compile": compiled,
    "rollout": rollout,
    "update": update,
    "grpo": grpo,
    "memory": memory,
    "kernels": kernels,
}


def main() -> None:
    """Run a step; exit code 1 where one of its measurements failed."""
    name, device, out, deadline = sys.argv[1:]
    look = Look(device=device, out=Path(out), step=name, deadline=float(deadline))
    STEPS[name](look)
    sys.exit(look.num_failed > 0)


if __name__ == "__main__":
    main()
