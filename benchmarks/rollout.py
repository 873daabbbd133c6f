"""Generation of the native engine beside Hugging Face `generate`, and training tokens per second.

    make bench BENCH=rollout

prints one JSON line. The same requests for both: prompts of 64 tokens, several samples each, forced lengths drawn
from a log-normal distribution (mean about 62, at most 256), so that no side gains from stopping early. `generate`
gets its best batch size of the ones tried, its requests sorted by length; the native engine gets all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from machine import machine
from transformers import AutoModelForCausalLM

from strop.base.randomness import random_key
from strop.data.tiny import make_tiny_model
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

T = TypeVar("T")

SIZE = {"hidden_size": 256, "num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 768}
PROMPT_TOKENS, GROUP, MAX_TOKENS, MEAN_LOG, STD_LOG = 64, 8, 256, 3.8, 0.8
BATCHES = (32, 64, 128)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    where = machine()
    generator = np.random.default_rng(0)
    num_prompts = arguments.requests // GROUP
    lengths = np.clip(generator.lognormal(MEAN_LOG, STD_LOG, arguments.requests).astype(int), 1, MAX_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), seed=0, head_dim=32, **SIZE)
        model = load_model(ModelConfig(path=folder))
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = generator.integers(7, model.vocab_size, (num_prompts, PROMPT_TOKENS))
    tokens = int(lengths.sum())
    native_s, outputs = _best(arguments.repeats, lambda: asyncio.run(_native(model, prompts, lengths)))
    generate_s = {
        batch: _best(1, lambda batch=batch: _generate(plain, prompts, lengths, batch))[0] for batch in BATCHES
    }
    best = min(generate_s.values())
    train_s, train_tokens = _train(model, prompts, outputs, arguments.repeats)
    result = {
        "name": "rollout",
        "ratio_generate": round(best / native_s, 2),
        "tokens_per_s": round(tokens / native_s),
        "tokens_per_s_generate": {batch: round(tokens / seconds) for batch, seconds in generate_s.items()},
        "train_tokens_per_s": round(train_tokens / train_s),
        "requests": arguments.requests,
        "prompt_tokens": PROMPT_TOKENS,
        "samples_per_prompt": GROUP,
        "response_tokens": tokens,
        "parameters": sum(p.numel() for p in plain.parameters()),
        **where,
    }
    print(json.dumps(result))


def _best(repeats: int, work: Callable[[], T]) -> tuple[float, T]:
    """Shortest time of several tries, and the last result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


async def _native(model: CausalLM, prompts: np.ndarray, lengths: np.ndarray) -> list[TokenOutput]:
    engine = NativeEngine(model, max_running=256)
    return await asyncio.gather(
        *(
            engine.generate(
                str(i),
                prompts[i // GROUP].tolist(),
                Sampling(key=random_key(0, "bench", i), max_tokens=int(length)),
            )
            for i, length in enumerate(lengths)
        )
    )


def _generate(plain: torch.nn.Module, prompts: np.ndarray, lengths: np.ndarray, batch: int) -> None:
    order = np.argsort(lengths)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        ids = torch.from_numpy(prompts[rows // GROUP])
        longest = int(lengths[rows].max())
        plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )


def _train(
    model: CausalLM, prompts: np.ndarray, outputs: list[TokenOutput], repeats: int
) -> tuple[float, int]:
    """Seconds of one forward, backward and optimizer step over all samples, and their prompt + response tokens."""
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=1e-6), total_steps=None)
    rows = make_rows(
        [torch.from_numpy(prompts[i // GROUP]) for i in range(len(outputs))],
        [torch.tensor(output.token_ids) for output in outputs],
    )

    def step() -> None:
        engine.accumulate(rows, lambda tokens: -tokens.log_probs(temperature=1.0)[0].sum() / 1e4)
        engine.step()

    seconds, _ = _best(repeats, step)
    return seconds, sum(len(row.prompt) + len(row.response) for row in rows)


if __name__ == "__main__":
    main()
