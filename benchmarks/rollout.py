"""Generation of the native engine beside `generate`, continuous batching of transformers, vLLM, and the machine.

    make bench BENCH=rollout ARGS=--json

All sides in one run, each in a process of its own, one after another: random-weight models of about 5 and about 100
million parameters, in float32 and bfloat16; prompts of 64 tokens, 8 samples each, forced lengths drawn from a
log-normal distribution (mean about 62, at most 256) in the order of arrival. The large model gets fewer prompts, so
that the slowest side ends within minutes (`requests` says how many). A side gets `--limit-s` seconds: it leaves out
tries that would not end in time (`tries` says how many there were), and when the first one does not, it is ended, and
named in `failed`.

`ratio_X` is the time of X over that of the native engine; null where one of them did not run (`failed` says why).
`ceiling_share` is the time that the necessary work would take on this machine, as measured in the same run, over that
of the native engine: every distinct prompt and every sampled token but the last one of a response through the weights
at the speed of the best matrix product, and in one step per token of the longest response at least the weights through
memory; then the keys and values that each token attends to, read once at the bandwidth of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ceiling import memory_bandwidth, product_ceiling
from machine import machine
from name_lists import names_of
from sizes import LARGE, SMALL

from strop.data.tiny_model import make_tiny_model

PROMPT_TOKENS, GROUP, MAX_TOKENS, MEAN_LOG, STD_LOG = 64, 8, 256, 3.8, 0.8
DTYPES = ("float32", "bfloat16")
SIDES = ("native", "generate", "cb", "vllm")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--requests", type=int, default=512, help="of the small model")
    parser.add_argument("--large-requests", type=int, default=128, help="of the large model; 0 leaves it out")
    parser.add_argument(
        "--repeats", type=int, default=2, help="tries of each side, of which the shortest counts"
    )
    parser.add_argument(
        "--sides", type=names_of(SIDES), default=",".join(SIDES), help="which ones, with commas"
    )
    parser.add_argument(
        "--dtypes", type=names_of(DTYPES), default=",".join(DTYPES), help="which ones, with commas"
    )
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one side")
    arguments = parser.parse_args()
    where = machine()
    result = {"name": "rollout", **_size("small", SMALL, arguments.requests, arguments)}
    if arguments.large_requests:
        result["large"] = _size("large", LARGE, arguments.large_requests, arguments)
    result |= {"threads": torch.get_num_threads(), **where}
    print(json.dumps(result))


def _size(name: str, size: dict[str, int], requests: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one model: in the first dtype, and in an object below for each other one."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(MEAN_LOG, STD_LOG, requests).astype(int), 1, MAX_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", seed=0, **size)
        prompts = generator.integers(7, 100, (requests // GROUP, PROMPT_TOKENS))
        np.savez(Path(folder) / "workload.npz", prompts=prompts, lengths=lengths)
        weights = (Path(folder) / "model" / "model.safetensors").stat().st_size // 4
        first, *others = [
            _dtype(Path(folder), dtype, size, lengths, weights, arguments) for dtype in arguments.dtypes
        ]
    return {
        **first,
        **{other["dtype"]: other for other in others},
        "parameters": weights,
        "requests": requests,
        "prompt_tokens": PROMPT_TOKENS,
        "samples_per_prompt": GROUP,
        "response_tokens": int(lengths.sum()),
    }


def _dtype(
    folder: Path,
    dtype: str,
    size: dict[str, int],
    lengths: np.ndarray,
    weights: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Every side in one precision."""
    ran: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for side in arguments.sides:
        python = _vllm_python() if side == "vllm" else sys.executable
        if python is None:
            failed[side] = "vLLM is not installed"
            continue
        words = [python, str(Path(__file__).with_name("rollout_sides.py")), side, str(folder / "model")]
        words += [str(folder / "workload.npz"), dtype, str(arguments.repeats), str(arguments.limit_s)]
        if not arguments.json:
            print(f"{dtype} {side} ...", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=arguments.limit_s, check=True
            )
            ran[side] = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            failed[side] = f"not done within {arguments.limit_s} s"
        except subprocess.CalledProcessError as error:
            failed[side] = " ".join(error.stderr.strip().splitlines()[-1:])[:300]
    seconds = {side: facts["seconds"] for side, facts in ran.items()}
    own = seconds.get("native", math.nan)
    ceiling = _ceiling(getattr(torch, dtype), size, lengths, weights)
    return {
        "dtype": dtype,
        **{f"ratio_{side}": _share(seconds.get(side, math.nan) / own, 2) for side in SIDES[1:]},
        "ceiling_share": _share(ceiling["seconds"] / own, 3),
        "ceiling": ceiling,
        "tokens_per_s": {side: round(int(lengths.sum()) / taken) for side, taken in seconds.items()},
        "peak_mib": {side: facts["peak_mib"] for side, facts in ran.items()},
        "tries": {side: facts["tries"] for side, facts in ran.items()},
        "batch_of_generate": ran.get("generate", {}).get("batch"),
        "failed": failed,
    }


def _share(value: float, digits: int) -> float | None:
    """Rounded; None where a side is missing."""
    return None if math.isnan(value) else round(value, digits)


def _ceiling(dtype: torch.dtype, size: dict[str, int], lengths: np.ndarray, weights: int) -> dict[str, float]:
    """Seconds that the necessary work takes at the machine's measured peak, and the peaks."""
    # Some processors have no products of bfloat16 worth the name.
    flops = max(product_ceiling(kind).flops for kind in {dtype, torch.float32})
    bandwidth = memory_bandwidth()
    width = torch.finfo(dtype).bits // 8
    inputs = int((lengths - 1).sum())
    through_weights = 2 * weights * (len(lengths) // GROUP * PROMPT_TOKENS + inputs) / flops
    weights_read = int(lengths.max()) * weights * width / bandwidth
    seen = int(((lengths - 1) * (PROMPT_TOKENS + lengths / 2)).sum())  # keys of all tokens
    per_token = 2 * size["num_layers"] * size["num_kv_heads"] * size["head_dim"] * width
    return {
        "seconds": round(max(through_weights, weights_read) + seen * per_token / bandwidth, 3),
        "gflops": round(flops / 1e9, 1),
        "gb_per_s": round(bandwidth / 1e9, 1),
    }


def _vllm_python() -> str | None:
    """Python of the environment with vLLM, where there is one."""
    try:
        from strop.rollout.vllm.environment import vllm_python

        return str(vllm_python(""))
    except (ImportError, ValueError):
        named = os.environ.get("STROP_VLLM")
        return named if named and Path(named).is_file() else None


if __name__ == "__main__":
    main()
