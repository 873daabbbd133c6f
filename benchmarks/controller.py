"""What a training step costs the controller: bytes that pass through it, and time beside the workers'.

    python benchmarks/controller.py --ranks 2
    python benchmarks/controller.py --workers 1 2 4 8      # processor time of the controller alone, by workers

One step has the same samples at two response lengths. If only reports pass through the controller, its bytes do
not grow with the tokens. The peer is the inline runtime, where nothing is sent: the same configuration, one rank.
Prints one JSON line.

With --workers, the processor time that the controller's process takes for a step, all its threads together, by number
of worker processes and, with two of them, of samples; the straight line through these numbers is followed to 64
workers, and says how long a step must be there for the controller to be 2 % of it. Processor time does not depend on
what else the machine does, but the line does not know what only 64 workers would show.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from machine import machine

from strop.cli.quickstart.task import write_task
from strop.config import load_config
from strop.data.tiny_model import make_tiny_model
from strop.trainer.config import Config
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.start import start_run
from strop.trainer.timing import Stages

LENGTHS = (16, 256)
PROMPTS, SAMPLES = 8, 8
MANY_WORKERS, SHARE = 64, 0.02


class CountingTrainer(Trainer):
    """Notes bytes and seconds of every step."""

    def step(self, step: int, stages: Stages) -> StepRecord:
        traffic = getattr(self.runtime, "traffic", None)
        before = (0, 0) if traffic is None else (traffic.sent_bytes, traffic.received_bytes)
        start, worked = time.perf_counter(), time.process_time()
        record = super().step(step, stages)
        after = (0, 0) if traffic is None else (traffic.sent_bytes, traffic.received_bytes)
        self.seen.append(  # type: ignore[has-type]
            {
                "seconds": time.perf_counter() - start,
                "processor_s": time.process_time() - worked,
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
            "trainer.preflight=false",
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
        for name in ("seconds", "processor_s", "bytes", "tokens", "samples")
    }


def by_workers(counts: list[int], steps: int) -> dict[str, object]:
    """Processor time of the controller, and the line that is followed to many workers."""
    where = machine()

    def processor_s(folder: Path, workers: int, prompts: int = PROMPTS) -> float:
        ray = ["resources.runtime=ray", f"resources.ranks={workers}", "resources.cpus_per_rank=0.1"]
        limit = ["data.max_response_tokens=16", f"data.prompts_per_step={prompts}", "resources.num_threads=1"]
        return measure(folder, *limit, *ray, steps=steps)["processor_s"]

    with tempfile.TemporaryDirectory() as name:
        found = {workers: processor_s(Path(name), workers) for workers in counts}
        more = processor_s(Path(name), 2, 4 * PROMPTS)
        few = found[2] if 2 in found else processor_s(Path(name), 2)
    slope, start = statistics.linear_regression(list(found), list(found.values()))
    per_sample = (more - few) / (3 * PROMPTS * SAMPLES)
    many = start + MANY_WORKERS * slope
    return {
        "benchmark": "controller_by_workers",
        "machine": where,
        "samples_per_step": PROMPTS * SAMPLES,
        "processor_ms": {str(workers): round(1e3 * seconds, 1) for workers, seconds in found.items()},
        "ms_per_worker": round(1e3 * slope, 2),
        "ms_per_sample": round(1e3 * per_sample, 3),
        f"ms_at_{MANY_WORKERS}_workers": round(1e3 * many, 1),
        "step_s_of_which_it_is_2_percent": round(many / SHARE, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", help="measure only this")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    if args.workers:
        print(json.dumps(by_workers(args.workers, args.steps)))
        return
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
