"""Seconds and bytes of a checkpoint: saved now or in the background, and read again, on 1 and on 2 ranks.

    make bench BENCH=checkpoint ARGS="--parameters 50"

prints one JSON line. A checkpoint holds what a resume needs: float32 weights and both moments of AdamW, 12 bytes per
parameter. Each rank is a process with one thread; on 2 ranks everything is sharded over them. Per number of ranks,
the best of several tries:

    critical_s      how long training stands still: the whole save, or in the background the copy to host memory
    total_s         until every file is written and synced (in the background: with nothing else to do)
    seal_s          manifest with hashes, verification by reading back, rename; by the controller
    load_s          reading into a model of the same sharding; files may still be in the page cache
    write_gib_s     bytes over total_s of the save now
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from strop.controller.store_server import Rendezvous, RendezvousServer
from strop.engines.checkpoint import load_sharded, save_sharded, save_sharded_async
from strop.engines.parallel.process_group import join_ranks, leave_ranks
from strop.engines.parallel.ranks import Parallel, alone
from strop.run import CheckpointStore

HIDDEN, LAYER_ROWS = 1024, 12
"""A layer is a matrix [12 * hidden, hidden], as many numbers as attention and MLP of a transformer block have."""
RENDEZVOUS = "STROP_BENCHMARK_MEETING"
"""Environment variable that says to the ranks where they meet."""


def main() -> None:
    """Measure and print; with --rank, be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=25, help="millions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(_rank(*arguments.rank, arguments.parameters, arguments.repeats, arguments.folder)))
        return
    where = machine()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="strop-checkpoint-"))
    try:
        results = {
            str(size): _measure(size, arguments.parameters, arguments.repeats, folder)
            for size in arguments.ranks
        }
    finally:
        shutil.rmtree(folder)
    print(
        json.dumps(
            {"name": "checkpoint", "parameters": arguments.parameters * 10**6, "ranks": results, **where}
        )
    )


def _measure(world_size: int, millions: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Start the ranks; their slowest counts."""
    place = RendezvousServer("127.0.0.1")
    command = [sys.executable, __file__, "--parameters", str(millions), "--repeats", str(repeats)]
    processes = [
        subprocess.Popen(
            [*command, "--folder", str(folder), "--rank", str(rank), str(world_size)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", RENDEZVOUS: json.dumps(asdict(place.rendezvous))},
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=1800)[0] for process in processes]
    place.close()
    for process in processes:
        if process.returncode:
            raise SystemExit(f"a rank ended with exit code {process.returncode}")
    reports = [json.loads(output) for output in outputs]
    seconds = {
        key: round(max(report[key] for report in reports), 3) for key in reports[0] if key.endswith("_s")
    }
    num_bytes = sum(report["bytes"] for report in reports)
    return {**seconds, "seal_s": _seal_seconds(folder), "bytes": num_bytes,
            "write_gib_s": round(num_bytes / 2**30 / seconds["now_total_s"], 2)}  # fmt: skip


def _rank(rank: int, world_size: int, millions: int, repeats: int, folder: Path) -> dict[str, float]:
    parallel = alone("cpu")
    if world_size > 1:
        parallel = join_ranks(
            rank=rank,
            world_size=world_size,
            rendezvous=Rendezvous(**json.loads(os.environ[RENDEZVOUS])),
            device="cpu",
        )
    tensors = _state(millions, parallel)
    times: dict[str, list[float]] = {}
    for attempt in range(repeats):
        for kind in ("now", "background"):
            target = folder / f"{kind}-{attempt}"
            parallel.barrier(f"{kind} {attempt}")
            started = time.perf_counter()
            if kind == "now":
                save_sharded(target, tensors, {"num_steps": attempt}, parallel=parallel)
                times.setdefault("now_critical_s", []).append(time.perf_counter() - started)
            else:
                pending = save_sharded_async(target, tensors, {"num_steps": attempt}, parallel=parallel)
                times.setdefault("background_critical_s", []).append(time.perf_counter() - started)
                pending.result()
            times.setdefault(f"{kind}_total_s", []).append(time.perf_counter() - started)
        parallel.barrier("all files")
        started = time.perf_counter()
        load_sharded(folder / f"now-{attempt}", tensors)
        times.setdefault("load_s", []).append(time.perf_counter() - started)
        parallel.barrier("loaded")
        if rank == 0:
            for path in folder.glob(f"*-{attempt}"):
                path.rename(folder / "sealed") if _is_last(path, attempt, repeats) else shutil.rmtree(path)
    own = folder / "sealed" / f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"
    parallel.barrier("the last checkpoint is in its place")
    report = {key: min(values) for key, values in times.items()} | {"bytes": own.stat().st_size}
    leave_ranks()
    return report


def _is_last(path: Path, attempt: int, repeats: int) -> bool:
    return attempt == repeats - 1 and path.name.startswith("now")


def _seal_seconds(folder: Path) -> float:
    """What the controller does with the files of all ranks."""
    store = CheckpointStore(folder / "store", keep_last=1, keep_best=0)
    pending = store.begin(1, facts={})
    (folder / "sealed").rename(pending.folder / "actor")
    started = time.perf_counter()
    pending.seal()
    seconds = round(time.perf_counter() - started, 3)
    shutil.rmtree(folder / "store")
    return seconds


def _state(millions: int, parallel: Parallel) -> Mapping[str, Tensor]:
    """Weights and moments of a model of this size, sharded by rows."""
    rows = _layer_rows(millions * 10**6 // HIDDEN)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for kind in ("model", "optim/exp_avg", "optim/exp_avg_sq"):
        for number, count in enumerate(rows):
            whole = torch.randn(count, HIDDEN, generator=generator)
            mesh = parallel.mesh
            tensors[f"{kind}/layers.{number}.weight"] = (
                whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])
            )
    return tensors


def _layer_rows(rows: int) -> Sequence[int]:
    """Rows of each layer; the last one has the rest."""
    full, rest = divmod(rows, LAYER_ROWS * HIDDEN)
    return [LAYER_ROWS * HIDDEN] * full + ([rest] if rest else [])


if __name__ == "__main__":
    main()
