"""A process of a run before it has a model: memory of the interpreter and of what it imports, and on several ranks what
it costs them to talk."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache

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


ASSUMED = Baseline(num_bytes=750 << 20, is_measured=False)
"""Assumption for a system that does not tell it, or not in that time."""


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
    output = _output(program, num_ranks=2 if is_one_of_several else 1)
    try:
        measured = Baseline(**json.loads(output.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):  # no line, or none that says it
        return ASSUMED
    return measured if min(measured.call_s, measured.bytes_per_s) > 0 else ASSUMED


def _output(program: str, *, num_ranks: int) -> str:
    """Output of the first of as many processes, each with its rank and the path of a file to meet at as arguments;
    empty where one of them fails, or has not ended in time.

    Each is started, and none forked: a fork may wait for ever for threads that it has not.
    """
    end = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(rank), f"{folder}/meeting"],
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        try:
            output, _ = processes[0].communicate(timeout=TIMEOUT_S)
            if processes[0].returncode:  # the others would wait for it
                return ""
            failed = [process for process in processes if process.wait(max(0.0, end - time.monotonic()))]
        except subprocess.TimeoutExpired:
            return ""
    return "" if failed else output
