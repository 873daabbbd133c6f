"""A process of a run before it has a model: memory of the interpreter and of what it imports, and on several ranks what
it costs them to talk."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from strop.trainer.config import Config

_PROCESS = """
import json
import strop.cli.commands.train, strop.cli.launching, strop.trainer.start, strop.trainer.train
import strop.engines.model, strop.data.loading, pyarrow.parquet, tokenizers, datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3 import modeling_qwen3
import torch
def most():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def pass_and_step(layer):
    layer(torch.rand(64, 256)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
pass_and_step(torch.nn.Linear(256, 256))
"""
_ONE = """
print(json.dumps({"num_bytes": most()}))
"""
_TWO = """
import sys
from torch.distributed.fsdp import fully_shard
from strop.trainer.plan.rank_costs import collective_seconds, meet, sent_bytes_per_s
torch.set_num_threads(1)
mesh = meet(int(sys.argv[1]), sys.argv[2])
pass_and_step(fully_shard(torch.nn.Linear(256, 256), mesh=mesh))
num_bytes, sent = most(), sent_bytes_per_s(mesh)
print(json.dumps({"num_bytes": num_bytes, "call_s": collective_seconds(mesh), "bytes_per_s": sent}))
"""
TIMEOUT_S = 120.0
_POLL_S = 0.02
_REAP_S = 5.0
"""Wait for a process that was killed."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Such a process."""

    num_bytes: int
    """Its most memory."""
    call_s: float = 500e-6
    """Seconds of its processor that a collective of tensor-parallel ranks adds to a pass of a few tokens, with what
    Python does around it: two ranks, and a model of two layers in them."""
    bytes_per_s: float = 0.7e9
    """Of a large one: sent by a rank, in a second of its processor."""
    is_measured: bool = True
    reason: str = field(default="", compare=False)
    """Reason for which it is not measured."""


ASSUMED = Baseline(num_bytes=750 << 20, is_measured=False)
"""Assumption for a system that does not tell it, or not in that time."""


class _NotMeasured(Exception):
    """The processes did not say it; the message is the reason."""


def baseline_of(config: Config) -> Baseline:
    """Of a run's processes with a model."""
    most = max(config.resources.ranks_of(role) for role in config.used_engines)
    return baseline(uses_ray=config.resources.runtime == "ray", is_one_of_several=most > 1)


@lru_cache
def baseline(*, uses_ray: bool = False, is_one_of_several: bool = False) -> Baseline:
    """Measured on this machine, in processes of its own: about ten seconds.

    Args:
        uses_ray: the process is one of Ray's.
        is_one_of_several: ranks that hold a model together.
    """
    program = ("import ray\n" if uses_ray else "") + _PROCESS + (_TWO if is_one_of_several else _ONE)
    try:
        return _read(_output(program, num_ranks=2 if is_one_of_several else 1))
    except _NotMeasured as error:
        return replace(ASSUMED, reason=str(error))


def _read(output: str) -> Baseline:
    """The measurement in the last line of an output."""
    try:
        measured = Baseline(**json.loads(output.splitlines()[-1]))
    except (IndexError, TypeError, ValueError) as error:  # no line, or none that says it
        raise _NotMeasured("the process said something else") from error
    if min(measured.call_s, measured.bytes_per_s) <= 0:
        raise _NotMeasured("other programs took more time than what was measured")
    return measured


def _output(program: str, *, num_ranks: int) -> str:
    """Output of the first of as many processes, each with its rank and the path of a file to meet at as arguments.

    Each is started, and none forked: a fork may wait for ever for threads that it has not. All are killed at the end,
    whether or not they have ended.

    Raises:
        _NotMeasured: one of them failed, or had not ended after TIMEOUT_S.
    """
    end = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        errors = stack.enter_context(tempfile.TemporaryFile("a+", dir=folder, errors="replace"))
        output = stack.enter_context((Path(folder) / "output").open("w+", encoding="utf-8"))
        for rank in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(rank), f"{folder}/meeting"],
                stdout=subprocess.DEVNULL if rank else output, stderr=errors,
            )  # fmt: skip
            processes.append(process)
            stack.callback(_end, process)
        statuses = [process.poll() for process in processes]
        while None in statuses and not any(statuses):  # the others would wait for one that has failed
            if time.monotonic() > end:
                raise _NotMeasured(f"its process had not ended after {TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
            statuses = [process.poll() for process in processes]
        if failed := [status for status in statuses if status]:
            errors.seek(0)
            raise _NotMeasured(_ending(failed[0], errors.read()))
        output.seek(0)
        return output.read()


def _ending(status: int, errors: str) -> str:
    """Sentence on a process that failed, with the last line of what it said."""
    if status < 0:
        cause = ", perhaps for memory" if -status == signal.SIGKILL else ""
        ended = f"its process was ended by {signal.Signals(-status).name}{cause}"
    else:
        ended = f"its process ended with status {status}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"{ended}: {lines[-1]}" if lines else ended


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, and leave it where the system does not let it go."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
