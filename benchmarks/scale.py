"""Growth of the cost of an update, of generation and of the controller with each size of the work.

    make bench BENCH=scale ARGS=--json
    make bench BENCH=scale ARGS="--picture benchmarks/scale.svg"

From one base, one size at a time grows to 8 or 64 times: rows that share nothing, prompts, samples per prompt, tokens
of prompts and responses, vocabulary; and for the same rows, data-parallel ranks over gloo. Of each point counts the
least processor time of a few repeats with one thread (of ranks, of all together). `exponent` is the slope of a straight
line through the logarithms of sizes and seconds: 1 is proportional, 0 is constant; `residual` the largest share by
which a point is off that line. The controller's processor time by workers is that of controller.py, followed on a
straight line to 64, beside a step of STEP_S seconds. Prints one JSON line; without `--json` a line per size before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from controller import MANY_WORKERS, by_workers
from machine import machine
from parallel import Job, Ranks
from scale_picture import picture
from torch import Tensor

from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

REPEATS = 2
RANKS = (1, 2, 4)
WORKERS = (1, 2, 4)
STEP_S = 10.0
MAX_TOKENS = 4096
"""Of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch, and the model's vocabulary."""

    prompts: int = 4
    samples: int = 4
    prompt_tokens: int = 64
    response_tokens: int = 64
    vocabulary: int = 1024


AXES: dict[str, tuple[Work, ...]] = {
    "rows apart": tuple(Work(prompts=rows, samples=1) for rows in (8, 16, 32, 64)),
    "prompts": tuple(Work(prompts=prompts) for prompts in (2, 4, 8, 16)),
    "samples per prompt": tuple(Work(samples=samples) for samples in (2, 4, 8, 16)),
    "prompt tokens": tuple(Work(prompt_tokens=tokens) for tokens in (64, 128, 256, 512)),
    "response tokens": tuple(Work(response_tokens=tokens) for tokens in (32, 64, 128, 256)),
    "vocabulary": tuple(Work(vocabulary=tokens) for tokens in (512, 2048, 8192, 32768)),
}
FIELDS = {
    "rows apart": "prompts", "prompts": "prompts", "samples per prompt": "samples",
    "prompt tokens": "prompt_tokens", "response tokens": "response_tokens", "vocabulary": "vocabulary",
}  # fmt: skip
Points = list[tuple[int, float]]
"""Sizes, and processor seconds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw points and lines")
    options = parser.parse_args()
    where, begun = machine(), time.perf_counter()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grown = {
            what: {axis: [(getattr(work, FIELDS[axis]), cost(folder, work)) for work in works]
                   for axis, works in AXES.items()}
            for what, cost in (("update", update_s), ("generation", generation_s))
        }  # fmt: skip
        grown["update"]["ranks"] = by_ranks(folder)
    fitted = {what: {axis: fit(points) for axis, points in axes.items()} for what, axes in grown.items()}
    if not options.json:
        for what, axes in fitted.items():
            for axis, facts in axes.items():
                print(f"{what:12}{axis:20}{json.dumps(facts)}", flush=True)
    if options.picture:
        options.picture.write_text(picture(grown, fitted), encoding="utf-8")
    controller = by_workers(list(WORKERS), steps=4)
    line = {
        "benchmark": "scale", **fitted, "controller": controller_share(controller),
        "seconds": round(time.perf_counter() - begun), "machine": where,
    }  # fmt: skip
    print(json.dumps(line))


def fit(points: Points) -> dict[str, Any]:
    """Exponent of a power law through the points, by least squares of logarithms, and how far it is off.

    Raises:
        ValueError: fewer than two sizes.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a growth needs two sizes, got {points}")
    xs, ys = ([math.log(pair[side]) for pair in points] for side in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    off = max(abs(math.expm1(b - y - slope * (a - x))) for a, b in zip(xs, ys, strict=True))
    return {
        "exponent": round(slope, 3),
        "residual": round(off, 3),
        "points": [[size, round(seconds, 4)] for size, seconds in points],
    }


def controller_share(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Share that the controller's processor time is of a step of STEP_S seconds, by workers."""
    many = measured[f"ms_at_{MANY_WORKERS}_workers"]
    counts = [1 << power for power in range(MANY_WORKERS.bit_length())]
    shares = {
        str(count): round((many - (MANY_WORKERS - count) * measured["ms_per_worker"]) / 1e3 / STEP_S, 4)
        for count in counts
    }
    return {"step_s": STEP_S, "share_by_workers": shares, "measured": measured}


def least_s(work: Callable[[], object]) -> float:
    """Processor seconds, the least of REPEATS after one that is not counted."""
    taken = []
    for repeat in range(REPEATS + 1):
        start = time.process_time()
        work()
        if repeat:
            taken.append(time.process_time() - start)
    return min(taken)


def update_s(folder: Path, work: Work) -> float:
    """Of an update: gradient of a policy loss, and an optimizer step."""
    engine = TrainEngine(
        _model(folder, work.vocabulary), EngineConfig(max_tokens_per_device=MAX_TOKENS),
        OptimizerConfig(lr=1e-6), total_steps=None,
    )  # fmt: skip
    prompts, responses = _ids(work)
    rows = make_rows(
        [prompt for prompt in prompts for _ in range(work.samples)],
        list(responses),
    )

    def update() -> None:
        engine.accumulate(rows, _loss)
        engine.step()

    return least_s(update)


def generation_s(folder: Path, work: Work) -> float:
    """Of all responses, in full length, by the native engine."""
    model = _model(folder, work.vocabulary)
    prompts, _ = _ids(work)
    requests = [prompt.tolist() for prompt in prompts for _ in range(work.samples)]

    async def all_of() -> None:
        engine = NativeEngine(model, max_running=256)
        await asyncio.gather(
            *(
                engine.generate(
                    f"{i}", prompt, Sampling(key=random_key(0, "scale", i), max_tokens=work.response_tokens)
                )
                for i, prompt in enumerate(requests)
            )
        )

    return least_s(lambda: asyncio.run(all_of()))


def by_ranks(folder: Path) -> Points:
    """Of an update of the same 16 rows in float64, all ranks together."""
    path = _write_model(folder, Work().vocabulary)
    points = []
    with Ranks(max(RANKS)) as ranks:
        for count in RANKS:
            job = Job(folder=str(path), values=False, axes={}, num_ranks=count)
            ranks.run(job)  # warms up
            taken = [sum(result.processor_s for result in ranks.run(job)) for _ in range(REPEATS)]
            points.append((count, min(taken)))
    return points


def _loss(tokens: Tokens) -> Tensor:
    log_probs, _ = tokens.log_probs(temperature=1.0)
    return torch.exp(log_probs - log_probs.detach()).sum() / 1000


def _ids(work: Work) -> tuple[Tensor, Tensor]:
    """Prompts and responses, [prompts, P] and [prompts * samples, R]."""
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (work.prompts, work.prompt_tokens),
        (work.prompts * work.samples, work.response_tokens),
    )
    prompts, responses = (torch.randint(2, 500, size, generator=generator) for size in sizes)
    return prompts, responses


def _model(folder: Path, vocabulary: int) -> Any:
    return load_model(ModelConfig(path=str(_write_model(folder, vocabulary)), dtype="float32"), device="cpu")


def _write_model(folder: Path, vocabulary: int) -> Path:
    """A model of Qwen3's form with 0.7 million parameters beside its embedding."""
    path = folder / f"model-{vocabulary}"
    if not path.exists():
        torch.manual_seed(0)
        shape = transformers.Qwen3Config(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
            max_position_embeddings=2048, pad_token_id=0,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
