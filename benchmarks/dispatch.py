"""What a call of a worker group costs, and what passes through the controller, by number of worker processes.

    make bench BENCH=dispatch
    make bench BENCH=dispatch ARGS="--workers 2 4"

prints one JSON line. For each number of workers: the seconds until all have started, and the memory that one of them
has for itself; the median of blocking calls that do nothing on all workers; and, for a step in which one role makes a
column of the size of the tokens and another one reads it, the time and the bytes through the controller: once with
futures (rows go from worker to worker), once with batches that the controller fetches and sends on. The workers are
light: a hundredth of a core each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from machine import machine

from strop.controller import Dispatch, Worker, register, role
from strop.controller.ray import Cluster, RayRuntime
from strop.protocol import DataProto, jagged

ROWS, TOKENS = 256, 1024


class Maker(Worker):
    """Makes tokens."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Answer."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def own_memory_bytes(self) -> int:
        """What the process shares with no other."""
        return int(psutil.Process().memory_full_info().uss)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, prompts: DataProto) -> DataProto:
        """Columns tokens [B, R~], heavy, and rewards [B], light."""
        rows = [torch.arange(TOKENS) for _ in range(len(prompts))]
        tokens = jagged(rows) if rows else jagged([torch.arange(1)])[:0]
        return DataProto.from_dict({"tokens": tokens, "rewards": torch.ones(len(prompts))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_making(self, prompts: DataProto) -> DataProto:
        """The same, as a future."""
        return self.make(prompts)


class Reader(Worker):
    """Reads tokens."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data: DataProto) -> int:
        """Number of tokens."""
        return int(data.tensors()["tokens"].values().numel())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    where = machine()
    started = time.perf_counter()
    cluster = Cluster()  # held, so that all runtimes share it
    cluster_s = time.perf_counter() - started
    results = [measure(num, arguments.calls, arguments.steps) for num in arguments.workers]
    cluster.close()
    print(
        json.dumps(
            {
                "benchmark": "dispatch",
                "machine": where,
                "cluster_s": round(cluster_s, 2),
                "rows_per_step": ROWS,
                "tokens_per_row": TOKENS,
                "results": results,
            }
        )
    )


def measure(num_workers: int, calls: int, steps: int) -> dict[str, Any]:
    """One number of workers."""
    threads = {"OMP_NUM_THREADS": "1"}
    with RayRuntime(ranks=num_workers, cpus_per_rank=0.01, start_timeout_s=1200, env=threads) as runtime:
        started = time.perf_counter()
        groups = runtime.groups({"maker": role(Maker), "reader": role(Reader)})
        start_s = time.perf_counter() - started
        maker, reader = groups["maker"].call, groups["reader"].call
        prompts = DataProto.from_dict({"seeds": torch.arange(ROWS)})

        def chained() -> None:
            data = maker.start_making(prompts)
            counts: Any = reader.read(data)
            rewards = data.select(["rewards"], []).get()  # type: ignore[attr-defined]
            assert (sum(counts), len(rewards)) == (ROWS * TOKENS, ROWS)

        def fetched() -> None:
            data = maker.make(prompts)
            counts: Any = reader.read(data)
            assert (sum(counts), len(data.tensors()["rewards"])) == (ROWS * TOKENS, ROWS)

        return {
            "workers": num_workers,
            "start_s": round(start_s, 2),
            "own_memory_mib": maker.own_memory_bytes() >> 20,
            "empty_call_ms": round(1e3 * median_s(maker.nothing, calls), 3),
            "with_futures": step_facts(runtime, chained, steps),
            "through_the_controller": step_facts(runtime, fetched, steps),
        }


def step_facts(runtime: RayRuntime, step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Time and traffic of one step."""
    step()
    before = (runtime.traffic.sent_bytes, runtime.traffic.received_bytes)
    step()
    sent, received = (runtime.traffic.sent_bytes - before[0], runtime.traffic.received_bytes - before[1])
    return {
        "step_ms": round(1e3 * median_s(step, steps), 2),
        "sent_bytes": sent,
        "received_bytes": received,
    }


def median_s(run: Callable[[], Any], times: int) -> float:
    """Median duration of a call, in seconds, after two to warm up."""
    durations = []
    for number in range(times + 2):
        started = time.perf_counter()
        run()
        if number >= 2:
            durations.append(time.perf_counter() - started)
    return statistics.median(durations)


if __name__ == "__main__":
    main()
