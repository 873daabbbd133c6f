"""Generation ahead of training beside the synchronous trainer: steps per minute, and what equally many samples teach.

    python benchmarks/asynchrony.py --json
    python benchmarks/asynchrony.py --ways 0 1 --seeds 0 --steps 20       # shorter
    python benchmarks/asynchrony.py --ways 0 0.25 later:0.25 drop:0.25    # what becomes of the slowest of a step
    python benchmarks/asynchrony.py --lengths --ways 0 longest_first      # answers of very different length
    python benchmarks/asynchrony.py --apart                               # generation in a process of its own, on Ray
    python benchmarks/asynchrony.py --settings algorithm.correction.weights=token      # another correction
    python benchmarks/asynchrony.py --ways 0 1e-6 1 \
        --settings algorithm.filter_groups.enable=true                    # dynamic sampling in rounds and as a stream

All runs are the quickstart's task from the same fine-tuned model, with an agent whose environment takes its time after
each answer: log-normal latencies (median 0.2 s, 95th percentile 1.0 s, at most 4 s), a function of seed, prompt and
sample, so that all ways wait for the same. With --lengths it does not wait, and its answers have log-normal lengths by
prompt (median 12 tokens, at most 96), 64 sequences at a time, and four steps of prompts that are visited again and
again.

A way is a number (rollout.max_staleness), later:X or drop:X (rollout.over_issue=X with that rollout.slowest),
or longest_first. Runs differ in nothing else; samples of older policies are
corrected for as strop does where nothing is said. Steps per minute are those of the run's own `timing_s/step`, without
start, validation and checkpoints; the pass rate is that of the last validation, after equally many samples, and the
reward that of the last ten steps' samples.

The last line is a JSON object: `ratio_steps_per_minute` to the synchronous trainer (0) of the fastest way whose pass
rate is less than two standard errors below that of 0 (of the fastest, where there is none), its `reward_gap` (pass rate
less that of 0, mean over seeds) with `reward_gap_error` (the standard error, of seeds and held-out prompts), and every
way's numbers.

--latencies FILE and --lengths FILE take recorded ones in place of the log-normal ones: seconds, or tokens, one a line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import machine

from strop.observability.trackers.setup import read_metrics

LIMIT_S = 1800.0
HELD_OUT = 200
"""Prompts of a validation."""
AGENT = '''
import asyncio
import math
import random

from strop.agents import register

RECORDED = {RECORDED}


@register("slow_world")
async def slow_world(prompt, trajectory, generate):
    """Answers, and waits for an environment that takes its time."""
    output = await generate(prompt.token_ids)
    answered = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
    luck = random.Random(f"{SEED} {prompt.uid} {trajectory.sample_index}")
    await asyncio.sleep(luck.choice(RECORDED) if RECORDED else min(luck.lognormvariate(math.log(0.2), 1.0), 4.0))
    return answered.finish(output.stop_reason)


@register("long_tail")
async def long_tail(prompt, trajectory, generate):
    """Answers again and again, until it has as many tokens as its prompt wants."""
    luck = random.Random(f"{SEED} {prompt.row}")
    wanted = luck.choice(RECORDED) if RECORDED else min(luck.lognormvariate(math.log(12), 1.0), 96)
    ids, answered = list(prompt.token_ids), trajectory
    while len(ids) - len(prompt.token_ids) < wanted:
        output = await generate(ids)
        ids += output.token_ids
        answered = answered.with_sampled(output.token_ids, output.log_probs, output.versions)
    return answered.finish(output.stop_reason)
'''
LONG = [
    "rollout.max_running=16",
    "data.max_response_tokens=110",
    "data.max_train_prompts=32",
    "trainer.num_epochs=99",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=["0", "1", "2", "4"], help="as above; 0 is one of them")
    parser.add_argument("--latencies", type=Path, metavar="FILE", help="recorded ones, in seconds")
    parser.add_argument(
        "--lengths", nargs="?", const="", metavar="FILE", help="answers of different length, and no waiting"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=2e-4, help="actor.optim.lr")
    parser.add_argument("--settings", nargs="+", default=[], metavar="key=value", help="of all runs")
    parser.add_argument("--apart", action="store_true", help="generation in a process of its own, on Ray")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    args = parser.parse_args()
    file = args.latencies if args.lengths is None else args.lengths
    args.recorded = [float(line) for line in Path(file).read_text().split()] if file else []
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        strop("quickstart", "--out", str(start), "trainer.max_steps=1", "eval.before_train=false")
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for seed in args.seeds:  # in turn, so that a slow hour is slow for all
            for way in args.ways:
                out = Path(folder) / f"way-{way.replace(':', '-')}-seed-{seed}"
                found[way].append(run(start, out, args, way=way, seed=seed))
                if not args.json:
                    print(f"{way}, seed {seed}: {found[way][-1]}", flush=True)
    asked = {name: getattr(args, name) for name in ("steps", "lr", "apart", "settings")}
    asked["recorded"] = str(file or "")
    print(json.dumps({"benchmark": "asynchrony", **compared(found), **asked, "machine": where}))


def settings_of(way: str) -> list[str]:
    """What a way stands for."""
    slowest, colon, share = way.partition(":")
    if colon:
        return [f"rollout.over_issue={share}", f"rollout.slowest={slowest}"]
    return ["rollout.longest_first=true" if way == "longest_first" else f"rollout.max_staleness={way}"]


def run(start: Path, out: Path, args: argparse.Namespace, *, way: str, seed: int) -> dict[str, float]:
    """One run; its numbers."""
    [model] = sorted((start / "sft" / "checkpoints").glob("*/model"))[-1:]
    agent = out.with_suffix(".py")
    agent.write_text(AGENT.replace("{SEED}", str(seed)).replace("{RECORDED}", str(args.recorded)))
    agents = [
        f"agent.files=['{agent}']",
        f"agent.default_agent={'slow_world' if args.lengths is None else 'long_tail'}",
    ]
    strop(
        *("train", "--config", "quickstart", "--out", str(out)),
        f"model.path='{model}'",
        f"data.train_files=['{start / 'data' / 'train.parquet'}']",
        f"data.val_files=['{start / 'data' / 'val.parquet'}']",
        *agents,
        *settings_of(way),
        *([] if args.lengths is None else LONG),
        *args.settings,
        f"actor.optim.lr={args.lr:g}",
        f"trainer.max_steps={args.steps}",
        f"trainer.seed={seed}",
        "trainer.trackers=[jsonl]",
        "trainer.preflight=false",
        "resources.num_threads=1",
        "run.save_every=0",
        f"eval.every={args.steps}",
        *(["resources.runtime=ray", "resources.apart={rollout: 1}"] if args.apart else []),
    )
    metrics = [numbers for numbers in read_metrics(out / "metrics.jsonl") if numbers["step"] > 0]
    seconds = sum(numbers["timing_s/step"] - numbers.get("timing_s/testing", 0.0) for numbers in metrics)
    rate = next(numbers[key] for numbers in metrics[::-1] for key in numbers if key.startswith("val-core/"))

    def mean(name: str) -> float:
        return statistics.fmean(numbers.get(name, 0.0) for numbers in metrics)

    return {
        "steps_per_minute": round(60 * len(metrics) / seconds, 2),
        "pass_rate": round(rate, 4),
        "reward": round(statistics.fmean(numbers["critic/score/mean"] for numbers in metrics[-10:]), 4),
        "staleness": round(mean("training/off_policy/trajectory_staleness_worst/mean"), 3),
        "trainer_idle": round(mean("timing_s/gen") * len(metrics) / seconds, 3),
        "rollout_idle": round(
            mean("fully_async/rollouter/idle_ratio")
            if "fully_async/rollouter/idle_ratio" in metrics[0]
            else 1 - mean("timing_s/gen") * len(metrics) / seconds,
            3,
        ),
        "discarded_tokens": round(mean("training/over_issue/discarded_tokens"), 1),
        "rounds": round(mean("training/filter_groups/rounds"), 3),
        "surplus_samples": round(mean("training/filter_groups/discarded_surplus_samples"), 2),
        "age_s": round(mean("training/off_policy/age_s/mean"), 2),
    }


def compared(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Every way against the synchronous trainer."""
    ways = {
        way: {name: round(statistics.fmean(one[name] for one in runs), 4) for name in runs[0]}
        for way, runs in found.items()
    }
    others = {way: numbers for way, numbers in ways.items() if way != "0"}
    errors = {way: error_of(found[way], found["0"]) for way in others}
    equal = [
        way for way in others if ways[way]["pass_rate"] + 2 * errors[way] > ways["0"]["pass_rate"]
    ] or list(others)
    best = max(equal, key=lambda way: others[way]["steps_per_minute"])
    return {
        "ratio_steps_per_minute": round(ways[best]["steps_per_minute"] / ways["0"]["steps_per_minute"], 3),
        "reward_gap": round(ways[best]["pass_rate"] - ways["0"]["pass_rate"], 4),
        "reward_gap_error": round(errors[best], 4),
        "best": best,
        "ways": ways,
        "pass_rates": {way: [one["pass_rate"] for one in runs] for way, runs in found.items()},
    }


def error_of(one: list[dict[str, float]], other: list[dict[str, float]]) -> float:
    """Standard error of the difference of two mean pass rates: of the seeds, at least that of the held-out prompts."""
    total = 0.0
    for runs in (one, other):
        rates = [run["pass_rate"] for run in runs]
        mean = statistics.fmean(rates)
        spread = statistics.variance(rates) if len(rates) > 1 else 0.0
        total += max(spread, mean * (1 - mean) / HELD_OUT) / len(rates)
    return math.sqrt(total)


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
