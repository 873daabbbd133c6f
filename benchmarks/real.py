"""The example of a real model (examples/smollm2) beside TRL: seconds per step, and until 85 % of samples are right.

    make bench BENCH=real                          seconds to the rate as well, within 20 steps
    make bench BENCH=real ARGS="--max-steps 3"     seconds per step alone

SmolLM2-135M-Instruct on a CPU, weights in float32, both sides computing in `--precision`; 16 prompts and 8 samples a
step, at most 8 tokens, the same prompts in the same order, the same learning rate and reward. Sides run one after the
other: strop to the last step, TRL until a step reaches the rate. `ratio_trl` is TRL's median step over strop's, both
over `steps_compared`, as many as both made, after the first one, which warms up. Both learn, so answers may come to
differ in length: `mean_response_tokens` are those of the same steps, and where they differ by more than a tenth,
`is_equal_work` is false, and the ratio should not be quoted. `seconds_to_rate` is the time of all steps up to the first
whose samples are right at that rate, null where no step was. A step has all that it does by default on either side,
without validation. Prints one JSON line; without `--json` a line per side before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet
from grpo_vs_trl import is_equal_work
from machine import machine

from strop.observability.trackers.setup import read_metrics

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "smollm2"
LIMIT_S = 7200.0
"""Of a side."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    parser.add_argument("--max-steps", type=int, default=20, help="of each side, two at least")
    parser.add_argument("--rate", type=float, default=0.85, help="share of right samples that ends a side")
    parser.add_argument("--batch", type=int, default=32, help="samples of a forward pass of TRL")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".venv-trl/bin/python")
    options = parser.parse_args()
    if options.max_steps < 2:
        parser.error(
            f"--max-steps is {options.max_steps}, but the first step of a side only warms up: at least 2"
        )
    if not options.trl_python.is_file():
        sys.exit(f"{options.trl_python} is missing: `make bench BENCH=real` makes it")
    where = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(folder)])
        write_prompts(folder)
        sides = {}
        for side, measure in (("strop", strop_steps), ("trl", trl_steps)):
            sides[side] = measure(folder, options)
            if not options.json:
                print(side, json.dumps(sides[side]), flush=True)
    line = {
        "benchmark": "real",
        **comparison(sides["strop"], sides["trl"], options.rate),
        "rate": options.rate,
        "precision": options.precision,
        "machine": where,
    }
    print(json.dumps(line))


def comparison(strop: dict[str, Any], trl: dict[str, Any], rate: float) -> dict[str, Any]:
    """Figures of both sides, and their ratio over the steps that both made.

    Args:
        strop, trl: `seconds`, `rates` of right samples and `lengths` of answers, of each step; what else is there is
            kept.
        rate: that is to be reached.
    """
    num_steps = min(len(strop["seconds"]), len(trl["seconds"]))
    ours, theirs = (summary(steps, rate, num_steps) for steps in (strop, trl))
    return {
        "ratio_trl": round(theirs["step_s"] / ours["step_s"], 2),
        "is_equal_work": is_equal_work(ours["mean_response_tokens"], theirs["mean_response_tokens"]),
        "steps_compared": num_steps - 1,
        "strop": ours,
        "trl": theirs,
    }


def summary(steps: dict[str, Any], rate: float, num_steps: int) -> dict[str, Any]:
    """Figures of a side: of its first steps without the very first, and the time to the rate of all."""
    elapsed = accumulate(steps["seconds"])
    reached = [round(at, 1) for at, right in zip(elapsed, steps["rates"], strict=True) if right >= rate]
    return {
        "step_s": round(statistics.median(steps["seconds"][1:num_steps]), 3),
        "mean_response_tokens": round(statistics.mean(steps["lengths"][1:num_steps]), 2),
        "seconds_to_rate": reached[0] if reached else None,
        **steps,
    }


def write_prompts(folder: Path) -> None:
    """Training prompts as JSON lines that both libraries read."""
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    with (folder / "data.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            answer = row["reward_model"]["ground_truth"]
            file.write(
                json.dumps({"data_source": row["data_source"], "prompt": row["prompt"], "answer": answer})
                + "\n"
            )


def strop_steps(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of the example's configuration, to the last one."""
    out = folder / "run"
    run(
        [
            sys.executable, "-m", "strop.cli.main", "train", "--config", str(EXAMPLE / "config.yaml"),
            "--out", str(out), f"model.path={folder / 'model'}", f"data.train_files=[{folder / 'data.jsonl'}]",
            "data.val_files=[]", "data.ground_truth_key=answer", "data.sampler=in_order", "eval.every=0",
            "run.save_every=0", "trainer.trackers=[jsonl]", f"trainer.max_steps={options.max_steps}",
            f"model.dtype={options.precision}",
        ]
    )  # fmt: skip
    metrics = [row for row in read_metrics(out / "metrics.jsonl") if "timing_s/step" in row]
    return {
        "seconds": [round(row["timing_s/step"], 3) for row in metrics],
        "rates": [round(row["critic/score/mean"], 3) for row in metrics],
        "lengths": [round(row["response_length/mean"], 3) for row in metrics],
    }


def trl_steps(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of TRL, until one has reached the rate."""
    command = [
        str(options.trl_python),
        str(HERE / "real_trl.py"),
        str(folder / "model"),
        str(folder / "data.jsonl"),
    ]
    words = [str(options.max_steps), str(options.rate), str(options.batch), options.precision]
    result: dict[str, Any] = json.loads(run([*command, *words]).splitlines()[-1])
    return result


def run(command: list[str]) -> str:
    """Output of a command, without a network."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
