"""One side of benchmarks/rollout.py, in a process of its own, so that its peak memory is its own.

    python rollout_sides.py SIDE MODEL_FOLDER WORKLOAD.npz DTYPE REPEATS LIMIT_S

generates the workload and prints one JSON line: `seconds` of the shortest of its `tries` (REPEATS, or those that end
within LIMIT_S, at least one), `peak_mib` of the process, and for `generate` the `batch` it chose. Nothing of strop is
imported but for the native side: vLLM has another environment.

The workload has `prompts` [P, T] and `lengths` [R] of the responses, R / P for each prompt in turn. Lengths are forced;
every token is sampled at temperature 1 from the whole vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP = 16
"""Requests generated before the time is taken: compilation and first touches are not counted."""
BATCHES = (16, 32, 64, 128)
ENDING_S = 10.0
"""A process starts and ends within this time, beside what it measures."""
TRIED = 4
"""`generate` finds its best batch size on one request in this many."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, list[int]], None]


def native(folder: str, dtype: str) -> Generate:
    """strop's own engine: all requests at once, 256 of them running."""
    from strop.engines.config import ModelConfig
    from strop.engines.model import load_model
    from strop.rollout.native.engine import NativeEngine
    from strop.rollout.types import Sampling
    from strop.utils.rng import random_key

    model = load_model(ModelConfig(path=folder, dtype=dtype))

    async def all_of(prompts: Prompts, lengths: list[int]) -> None:
        engine = NativeEngine(model, max_running=256)
        await asyncio.gather(
            *(
                engine.generate(f"{i}", prompt, Sampling(key=random_key(0, "bench", i), max_tokens=length))
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        await engine.close()  # else its memory stays until a collection, and the next try takes other pages

    return lambda prompts, lengths: asyncio.run(all_of(prompts, lengths))


def _plain(folder: str, dtype: str, attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()


def generate(folder: str, dtype: str) -> dict[int, Generate]:
    """Hugging Face `generate`, in batches of the order of arrival, each as long as its longest; by batch size."""
    import torch

    model = _plain(folder, dtype)

    def in_batches(batch: int) -> Generate:
        def work(prompts: Prompts, lengths: list[int]) -> None:
            for start in range(0, len(prompts), batch):
                ids = torch.tensor(prompts[start : start + batch])
                longest = max(lengths[start : start + batch])
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    pad_token_id=0,
                )

        return work

    return {batch: in_batches(batch) for batch in BATCHES}


def continuous_batching(folder: str, dtype: str) -> Generate:
    """Continuous batching of transformers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _plain(folder, dtype)
    how = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)

    def work(prompts: Prompts, lengths: list[int]) -> None:
        left = len(prompts)
        # Pages of 256 tokens: by itself it takes a share of all free memory.
        room = ContinuousBatchingConfig(num_blocks=min(1024, 2 * left), max_batch_tokens=4096)
        with model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=room, block=True, timeout=5
        ) as manager:
            for prompt, length in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert not result.error, result.error
                    left -= 1
                assert result is not None or manager.is_running(), (
                    "continuous batching ended before its requests"
                )

    return work


def vllm(folder: str, dtype: str) -> Generate:
    """vLLM, in-process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=256, seed=0)

    def work(prompts: Prompts, lengths: list[int]) -> None:
        options = [
            SamplingParams(
                max_tokens=n, min_tokens=n, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
            )
            for n in lengths
        ]
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)

    return work


def main() -> None:
    """Generate and print."""
    begun = time.perf_counter()
    side, folder, workload, dtype, repeats, limit = sys.argv[1:]
    with np.load(workload) as arrays:
        lengths = arrays["lengths"].tolist()
        prompts = arrays["prompts"].repeat(len(lengths) // len(arrays["prompts"]), axis=0).tolist()
    made: Any = {"native": native, "generate": generate, "cb": continuous_batching, "vllm": vllm}[side](
        folder, dtype
    )
    facts = {}
    if side == "generate":
        part = max(1, len(prompts) // TRIED)
        made[min(BATCHES)](prompts[:WARM_UP], [8] * len(prompts[:WARM_UP]))
        trials = {
            batch: _seconds(work, prompts[:part], lengths[:part])
            for batch, work in made.items()
            if batch <= max(part, min(BATCHES))
        }
        facts["batch"] = min(trials, key=lambda batch: trials[batch])
        made = made[facts["batch"]]
    else:
        made(prompts[:WARM_UP], [8] * len(prompts[:WARM_UP]))
    tries = [_seconds(made, prompts, lengths)]
    # Another try is taken for as long as the longest one, with a tenth to spare.
    while len(tries) < int(repeats) and time.perf_counter() - begun + 1.1 * max(tries) + ENDING_S < float(
        limit
    ):
        tries.append(_seconds(made, prompts, lengths))
    print(json.dumps({"seconds": min(tries), "tries": len(tries), "peak_mib": _peak_mib(), **facts}))


def _peak_mib() -> int:
    """Most memory of this process so far. (What getrusage says begins with that of the process which started it.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:"))


def _seconds(work: Generate, prompts: Prompts, lengths: list[int]) -> float:
    start = time.perf_counter()
    work(prompts, lengths)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
