"""The curve of every algorithm preset on the quickstart's task, for the pages in docs/algorithms/.

    python benchmarks/algorithm_curves.py                   all of them, two at a time, into runs/curves
    python benchmarks/algorithm_curves.py --only gspo dapo  these
    python benchmarks/algorithm_curves.py --write           also put the curves into the pages

All start from the same fine-tuned model (seed 0), with the learning rate of the quickstart, and visit the same
prompts. So the curves show that an algorithm learns and what it does, not which is best: none was tuned. The last
line is a JSON object with the greedy pass rate on held-out prompts at the start and the end of each run. A run that
is already there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import machine

from strop.observability.reward_curve import run_series, text_curve
from strop.observability.trackers.setup import read_metrics

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "algorithms"
STEPS = 80
TWO_UPDATES = ["actor.samples_per_update=128"]
"""Two optimizer steps per batch: with one, ratios are 1 and losses that clip them are the same."""
LIMIT_S = 1800.0

CURVES: dict[str, list[str]] = {
    "ppo": ["algorithm.kl_ctrl.kl_coef=0.001", *TWO_UPDATES],
    "grpo": TWO_UPDATES,
    "dr_grpo": ["algorithm.loss_scale_factor=12", *TWO_UPDATES],
    "dapo": ["reward.overlong_buffer=4", *TWO_UPDATES],
    "dapo_loss": TWO_UPDATES,
    "gspo": TWO_UPDATES,
    "gmpo": TWO_UPDATES,
    "cispo": TWO_UPDATES,
    "sapo": TWO_UPDATES,
    "dppo_tv": TWO_UPDATES,
    "dppo_kl": TWO_UPDATES,
    "clip_cov": TWO_UPDATES,
    "kl_cov": TWO_UPDATES,
    "dro": TWO_UPDATES,
    "grpo_passk": TWO_UPDATES,
    "gdpo": ["algorithm.reward_keys=[score,acc]", *TWO_UPDATES],
    "rloo": [],
    "reinforce_pp": ["algorithm.kl_ctrl.kl_coef=0.001"],
    "reinforce_pp_baseline": ["algorithm.kl_loss_coef=0.001"],
    "remax": [
        "actor.optim.lr=1e-4"
    ],  # greedy answers are far better than sampled ones: larger steps undo the model
    "opo": [],
    "gpg": [],
    "maxrl": [],
    "otb": [],
    "prime": TWO_UPDATES,
    "tis": TWO_UPDATES,
    "icepop": TWO_UPDATES,
    "mis": TWO_UPDATES,
    "pf_ppo": TWO_UPDATES,
    "raft": ["algorithm.keep.min_score=1"],
    "raft_pp": TWO_UPDATES,
}
"""Presets, and what they leave to the user or what the quickstart's short answers need."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "curves", help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=sorted(CURVES), default=sorted(CURVES), metavar="NAME")
    parser.add_argument("--write", action="store_true", help="put the curves into docs/algorithms")
    args = parser.parse_args()
    where = machine()
    start = args.out / "start"
    if not (start / "train").exists():
        strop("quickstart", "--out", str(start), "trainer.max_steps=1", "eval.before_train=false")
    with ThreadPoolExecutor(2) as pool:
        rates = list(pool.map(lambda name: run(name, start, args.out / name), args.only))
    if args.write:
        for name in args.only:
            write_curve(name, args.out / name)
    rates_of = dict(zip(args.only, rates, strict=True))
    print(
        json.dumps(
            {"benchmark": "algorithm_curves", "steps": STEPS, "pass_rates": rates_of, "machine": where}
        )
    )


def run(name: str, start: Path, out: Path) -> tuple[float, float]:
    """Train with the preset, unless that was done before; pass rates at the start and the end."""
    if not is_complete(out):
        shutil.rmtree(out, ignore_errors=True)
        [model] = sorted((start / "sft" / "checkpoints").glob("*/model"))[-1:]
        strop(
            *("train", "--config", "quickstart", "--out", str(out), f"algorithm={name}"),
            f"model.path='{model}'",
            f"data.train_files=['{start / 'data' / 'train.parquet'}']",
            f"data.val_files=['{start / 'data' / 'val.parquet'}']",
            f"trainer.max_steps={STEPS}",
            "resources.num_threads=1",
            "run.save_every=0",
            *CURVES[name],
        )
    rates = [
        series for series in run_series(read_metrics(out / "metrics.jsonl")) if series.name == "pass rate"
    ]
    points = rates[0].points()
    print(f"{name}: {points[0][1]:.3f} -> {points[-1][1]:.3f}", flush=True)
    return points[0][1], points[-1][1]


def is_complete(out: Path) -> bool:
    """The run was trained to its end."""
    metrics = out / "metrics.jsonl"
    return metrics.is_file() and read_metrics(metrics)[-1]["step"] == STEPS


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


def write_curve(name: str, out: Path) -> None:
    """Replace the block after the comment `<!-- curve: NAME -->` in the page that has it."""
    mark = f"<!-- curve: {name} -->\n```text\n"
    for page in sorted(PAGES.glob("*.md")):
        before, found, rest = page.read_text().partition(mark)
        if found:
            _, _, after = rest.partition("```\n")
            page.write_text(f"{before}{mark}{curve(out)}\n```\n{after}")
            return
    raise SystemExit(f"no page in {PAGES} has the comment '<!-- curve: {name} -->' before a text block")


def curve(out: Path) -> str:
    """The curve of a run as text."""
    return text_curve(run_series(read_metrics(out / "metrics.jsonl")), width=64, height=9)


if __name__ == "__main__":
    main()
