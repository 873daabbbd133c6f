"""What a training step costs the controller: bytes that pass through it, and time beside the workers'.

    python benchmarks/controller.py --ranks 2

One step has the same samples at two response lengths. If only reports pass through the controller, its bytes do
not grow with the tokens. The peer is the inline runtime, where nothing is sent: the same configuration, one rank.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from machine import machine

from strop.config import load_config
from strop.data.tiny import make_tiny_model
from strop.quickstart.task import write_task
from strop.trainer.config import Config
from strop.trainer.launch import start_run
from strop.trainer.loop import Trainer
from strop.trainer.phases import Stages
from strop.trainer.records import StepRecord

LENGTHS = (16, 256)
PROMPTS, SAMPLES = 8, 8


class CountingTrainer(Trainer):
    """Notes bytes and seconds of every step."""

    def step(self, step: int, stages: Stages) -> StepRecord:
        traffic = getattr(self.runtime, "traffic", None)
        before = (0, 0) if traffic is None else (traffic.sent_bytes, traffic.received_bytes)
        start = time.perf_counter()
        record = super().step(step, stages)
        after = (0, 0) if traffic is None else (traffic.sent_bytes, traffic.received_bytes)
        self.seen.append(  # type: ignore[has-type]
            {
                "seconds": time.perf_counter() - start,
                "bytes": sum(after) - sum(before),
                "tokens": sum(report.num_tokens for report in record.reports),
                "samples": len(record.reports),
            }
        )
        return record


def measure(folder: Path, *overrides: str, steps: int) -> dict[str, float]:
    """Medians over the steps after the first."""
    model, data = folder / "model", folder / "data"
    if not model.exists():
        make_tiny_model(model, seed=0, max_position_embeddings=512)
        write_task(data, seed=0, num_train=64, num_val=8, num_sft=8)
    config = load_config(
        Config,
        overrides=[
            f"model.path='{model}'",
            f"data.train_files=['{data / 'train.parquet'}']",
            f"data.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            "data.max_prompt_tokens=32",
            "trainer.num_epochs=50",
            f"trainer.max_steps={steps}",
            "trainer.trackers=[jsonl]",
            "eval.before_train=false",
            "run.save_every=0",
            "reward.num_workers=1",
            *overrides,
        ],
    )
    target = Path(tempfile.mkdtemp(dir=folder))
    start = start_run(target / "run", config, command=["benchmark"])
    with start.run as run:
        trainer = CountingTrainer(config, run, checkpoint=None, say=lambda line: None)
        trainer.seen = []
        trainer.fit()
    return {
        name: statistics.median(one[name] for one in trainer.seen[1:])
        for name in ("seconds", "bytes", "tokens", "samples")
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    results: dict[str, object] = {
        "benchmark": "controller",
        "ranks": args.ranks,
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ray = ["resources.runtime=ray", f"resources.ranks={args.ranks}", "resources.cpus_per_rank=0.5"]
        for length in LENGTHS:
            limit = f"data.max_response_tokens={length}"
            light = measure(folder, limit, *ray, "run.save_samples=false", steps=args.steps)
            heavy = measure(folder, limit, *ray, "run.save_samples=true", steps=args.steps)
            results[f"length_{length}"] = {
                "tokens_per_step": light["tokens"],
                "samples_per_step": light["samples"],
                "controller_bytes_per_sample": round(light["bytes"] / light["samples"]),
                "controller_bytes_per_token": round(light["bytes"] / light["tokens"], 2),
                "controller_bytes_per_sample_with_sample_store": round(heavy["bytes"] / heavy["samples"]),
                "step_s": round(light["seconds"], 3),
            }
        one = measure(folder, limit, *ray[:1], "run.save_samples=false", steps=args.steps)
        inline = measure(folder, limit, "run.save_samples=false", steps=args.steps)
    results["overhead"] = {
        "ray_one_rank_step_s": round(one["seconds"], 3),
        "inline_step_s": round(inline["seconds"], 3),
        "ratio": round(one["seconds"] / inline["seconds"], 3),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
