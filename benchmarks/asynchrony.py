"""Generation ahead of training beside the synchronous trainer: steps per minute, and what equally many samples teach.

    python benchmarks/asynchrony.py --json
    python benchmarks/asynchrony.py --bounds 0 1 --seeds 0 --steps 20     # shorter
    python benchmarks/asynchrony.py --apart                               # generation in a process of its own, on Ray

All runs are the quickstart's task from the same fine-tuned model, with an agent whose environment takes its time after
each answer: log-normal latencies (median 0.2 s, 95th percentile 1.0 s, at most 4 s), a function of seed, prompt and
sample, so that all bounds wait for the same. A run of a bound differs from the others in rollout.max_staleness and in
the correction that this needs, which the synchronous run has too. Steps per minute are those of the run's own
`timing_s/step`, without start, validation and checkpoints; the pass rate is that of the last validation, after equally
many samples. The last line is a JSON object: `ratio_steps_per_minute` of the best bound to 0, `reward_gap` of that
bound (pass rate less that of bound 0, mean over seeds), and the numbers of each bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from strop.trainer.trackers import read_metrics

LIMIT_S = 1800.0
AGENT = '''
import asyncio
import math
import random

from strop.agents import register


@register("slow_world")
async def slow_world(prompt, trajectory, generate):
    """Answers, and waits for an environment that takes its time."""
    output = await generate(prompt.token_ids)
    answered = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
    latency = random.Random(f"{SEED} {prompt.uid} {trajectory.sample_index}").lognormvariate(math.log(0.2), 1.0)
    await asyncio.sleep(min(latency, 4.0))
    return answered.finish(output.stop_reason)
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bounds", nargs="+", type=float, default=[0, 1, 2, 4], help="rollout.max_staleness")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-4, help="actor.optim.lr")
    parser.add_argument("--apart", action="store_true", help="generation in a process of its own, on Ray")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    args = parser.parse_args()
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        strop("quickstart", "--out", str(start), "trainer.max_steps=1", "eval.before_train=false")
        found: dict[float, list[dict[str, float]]] = {bound: [] for bound in args.bounds}
        for seed in args.seeds:  # in turn, so that a slow hour is slow for all
            for bound in args.bounds:
                out = Path(folder) / f"bound-{bound:g}-seed-{seed}"
                found[bound].append(
                    run(start, out, bound=bound, seed=seed, steps=args.steps, lr=args.lr, apart=args.apart)
                )
                if not args.json:
                    print(f"bound {bound:g}, seed {seed}: {found[bound][-1]}", flush=True)
    print(
        json.dumps(
            {**compared(found), "steps": args.steps, "lr": args.lr, "apart": args.apart, "machine": where}
        )
    )


def run(
    start: Path, out: Path, *, bound: float, seed: int, steps: int, lr: float, apart: bool
) -> dict[str, float]:
    """One run; its numbers."""
    [model] = sorted((start / "sft" / "checkpoints").glob("*/model"))[-1:]
    agent = out.with_suffix(".py")
    agent.write_text(AGENT.replace("{SEED}", str(seed)))
    strop(
        *("train", "--config", "quickstart", "--out", str(out)),
        f"model.path='{model}'",
        f"data.train_files=['{start / 'data' / 'train.parquet'}']",
        f"data.val_files=['{start / 'data' / 'val.parquet'}']",
        f"agent.files=['{agent}']",
        "agent.default_agent=slow_world",
        f"rollout.max_staleness={bound:g}",
        "algorithm.correction.weights=token",
        f"actor.optim.lr={lr:g}",
        f"trainer.max_steps={steps}",
        f"trainer.seed={seed}",
        "trainer.trackers=[jsonl]",
        "trainer.preflight=false",
        "resources.num_threads=1",
        "run.save_every=0",
        f"eval.every={steps}",
        *(["resources.runtime=ray", "resources.apart={rollout: 1}"] if apart else []),
    )
    metrics = [numbers for numbers in read_metrics(out / "metrics.jsonl") if numbers["step"] > 0]
    seconds = sum(numbers["timing_s/step"] - numbers.get("timing_s/testing", 0.0) for numbers in metrics)
    rate = next(numbers[key] for numbers in metrics[::-1] for key in numbers if key.startswith("val-core/"))

    def mean(name: str) -> float:
        return statistics.fmean(numbers.get(name, 0.0) for numbers in metrics)

    return {
        "steps_per_minute": round(60 * len(metrics) / seconds, 2),
        "pass_rate": round(rate, 4),
        "staleness": round(mean("training/off_policy/trajectory_staleness_worst/mean"), 3),
        "trainer_idle": round(mean("timing_s/gen") * len(metrics) / seconds, 3),
        "rollout_idle": round(
            mean("fully_async/rollouter/idle_ratio")
            if bound
            else 1 - mean("timing_s/gen") * len(metrics) / seconds,
            3,
        ),
        "age_s": round(mean("training/off_policy/age_s/mean"), 2),
    }


def compared(found: dict[float, list[dict[str, float]]]) -> dict[str, Any]:
    """Every bound against 0."""
    bounds = {
        f"{bound:g}": {name: round(statistics.fmean(one[name] for one in runs), 4) for name in runs[0]}
        for bound, runs in found.items()
    }
    ahead = {bound: numbers for bound, numbers in bounds.items() if float(bound) > 0}
    best = max(ahead, key=lambda bound: ahead[bound]["steps_per_minute"])
    return {
        "ratio_steps_per_minute": round(ahead[best]["steps_per_minute"] / bounds["0"]["steps_per_minute"], 3),
        "reward_gap": round(ahead[best]["pass_rate"] - bounds["0"]["pass_rate"], 4),
        "best_bound": float(best),
        "bounds": bounds,
    }


def strop(*command: str) -> None:
    """A command of strop in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "strop.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"strop {' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
