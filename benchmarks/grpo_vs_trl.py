"""A whole GRPO step of strop beside TRL's: same model, prompts, reward and sampling, in one run.

    make bench BENCH=grpo_vs_trl          (makes TRL's own environment .venv-trl the first time)

prints one JSON line. `ratio_trl` is strop's samples per second over those of TRL at the fastest of its settings that
are tried; both sides compute in float32 (TRL is also tried in bfloat16), both take the median over the steps after a
warm-up, and their runs alternate. Everything a step does by default counts: sampling, scoring, the update, and on
strop's side sample store, ledger and fingerprint.

Work is equal: both visit the prompts in the order of the file, the learning rate leaves the policy as it is, and
lengths are means over the counted steps. Where they differ by more than a tenth, `is_equal_work` is false, and the
ratio should not be quoted.

Two workloads. `words` is the task: a model that was fine-tuned by `strop sft` writes words of 2 to 28 letters
backwards, so answers have different lengths. `full` (`ratio_trl_full`) is the worst case for strop: a model with
random weights, whose answers nearly all run into the limit, so that there is no padding to save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from machine import machine
from transformers import AutoModelForCausalLM

from strop.cli.quickstart.task import write_task
from strop.data.tiny_model import make_tiny_model
from strop.observability.trackers.setup import read_metrics

HERE = Path(__file__).resolve().parent
STROP = (sys.executable, "-m", "strop.cli.main")
TRL_SETTINGS = ("64x1", "32x2", "64x1-bf16")
PROMPTS, SAMPLES, MAX_TOKENS = 8, 8, 32
LR = 1e-8
"""So small that both sides sample from the model they began with: a policy that learns to write longer words has more
to do, and the two would learn different things."""
MAX_LENGTH_GAP = 0.1
"""Largest relative difference of the mean response lengths at which the work counts as equal."""
WARM_UP = 3
"""Steps of each run that are not counted."""
SIZES = {
    "small": {
        "hidden_size": 256,
        "num_layers": 5,
        "num_heads": 8,
        "num_kv_heads": 4,
        "intermediate_size": 768,
    },
    "large": {
        "hidden_size": 768,
        "num_layers": 11,
        "num_heads": 24,
        "num_kv_heads": 8,
        "intermediate_size": 2304,
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="about 4 or 75 million parameters")
    parser.add_argument("--steps", type=int, default=10, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="alternating runs of each side")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".venv-trl/bin/python")
    arguments = parser.parse_args()
    if not arguments.trl_python.is_file():
        sys.exit(f"{arguments.trl_python} is missing: `make bench BENCH=grpo_vs_trl` makes it")
    where = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "raw", seed=0, head_dim=32, **SIZES[arguments.size])
        write_task(folder, seed=0, num_train=512, num_val=1, num_sft=4096, min_letters=2, max_letters=28)
        _write_prompts(folder)
        model = _fine_tuned(folder)
        words = _measure(arguments, folder, model, TRL_SETTINGS)
        full = _measure(arguments, folder, folder / "raw", [words["trl_setting"]])
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "raw").parameters())
    result = {
        "name": "grpo_vs_trl",
        "ratio_trl": words["ratio"],
        "ratio_trl_full": full["ratio"],
        "words": words,
        "full": full,
        "parameters": parameters,
        "samples_per_step": PROMPTS * SAMPLES,
        "max_new_tokens": MAX_TOKENS,
        **where,
    }
    print(json.dumps(result))


def _measure(
    arguments: argparse.Namespace, folder: Path, model: Path, settings: Sequence[str]
) -> dict[str, Any]:
    """Alternating runs of both sides on one workload."""
    ours: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    steps = arguments.steps + WARM_UP
    for number in range(arguments.rounds):
        ours.append(_strop(folder, model, f"{model.parent.name}-{number}", steps))
        for setting, runs in theirs.items():
            runs.append(_trl(arguments.trl_python, folder, model, setting, steps))
    strop_s = _median([run["seconds"] for run in ours])
    trl_s = {setting: _median([run["seconds"] for run in runs]) for setting, runs in theirs.items()}
    best = min(trl_s, key=lambda setting: trl_s[setting])
    samples = PROMPTS * SAMPLES
    own_length, length = (
        statistics.mean(value for run in runs for value in run["lengths"][WARM_UP:])
        for runs in (ours, theirs[best])
    )
    return {
        "ratio": round(trl_s[best] / strop_s, 2),
        "samples_per_s": round(samples / strop_s, 1),
        "samples_per_s_trl": round(samples / trl_s[best], 1),
        "step_s": round(strop_s, 3),
        "step_s_trl": {setting: round(value, 3) for setting, value in trl_s.items()},
        "trl_setting": best,
        "phases_s": ours[-1]["phases"],
        "mean_response_tokens": round(own_length, 2),
        "mean_response_tokens_trl": round(length, 2),
        "is_equal_work": abs(own_length - length) <= MAX_LENGTH_GAP * min(own_length, length),
        "versions_trl": theirs[best][-1]["versions"],
    }


def _median(runs: list[list[float]]) -> float:
    return statistics.median(second for run in runs for second in run[WARM_UP:])


def _write_prompts(folder: Path) -> None:
    """The training prompts as JSON lines that both libraries read: TRL passes plain columns to the reward."""
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    with (folder / "data.jsonl").open("w") as file:
        for row in rows:
            answer = row["reward_model"]["ground_truth"]
            file.write(json.dumps({"data_source": "bench", "prompt": row["prompt"], "answer": answer}) + "\n")


def _fine_tuned(folder: Path) -> Path:
    """The model after a short `strop sft`: it has learned when an answer ends, and not yet to be right."""
    run = folder / "sft"
    _run(
        [
            *STROP,
            "sft",
            "--out",
            str(run),
            f"model.path={folder / 'raw'}",
            "sft.max_steps=60",
            "sft.optim.lr=1e-3",
            f"sft.data.train_files=[{folder / 'sft.parquet'}]",
            "sft.examples_per_update=64",
            "trainer.trackers=[]",
            "sft.optim.warmup_steps=10",
        ]
    )
    return run / "checkpoints" / "global_step_60" / "model"


def _strop(folder: Path, model: Path, name: str, steps: int) -> dict[str, Any]:
    run = folder / f"run-{name}"
    shutil.rmtree(run, ignore_errors=True)
    _run(
        [
            *STROP,
            "train",
            "--out",
            str(run),
            f"model.path={model}",
            f"data.train_files=[{folder / 'data.jsonl'}]",
            "data.ground_truth_key=answer",
            "data.sampler=in_order",
            f"data.prompts_per_step={PROMPTS}",
            "data.max_prompt_tokens=64",
            f"data.max_response_tokens={MAX_TOKENS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            f"actor.optim.lr={LR}",
            f"reward.path={HERE / 'position_reward.py'}",
            f"trainer.max_steps={steps}",
            "run.save_every=0",
            "trainer.trackers=[jsonl]",
        ]
    )
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "timing_s/step" in row]
    phases = ("gen", "adv", "update_actor")
    return {
        "seconds": [row["timing_s/step"] for row in metrics],
        "phases": {
            p: round(statistics.median(row[f"timing_s/{p}"] for row in metrics[WARM_UP:]), 3) for p in phases
        },
        "lengths": [row["response_length/mean"] for row in metrics],
    }


def _trl(python: Path, folder: Path, model: Path, setting: str, steps: int) -> dict[str, Any]:
    """`setting` is samples per forward pass x gradient accumulation, and bf16 where that is meant."""
    batch, accumulate, *precision = setting.replace("-", "x").split("x")
    command = [
        str(python), str(HERE / "trl_grpo.py"), str(model), str(folder / "data.jsonl"),
        "--steps", str(steps), "--batch", batch, "--accumulate", accumulate,
        "--samples", str(SAMPLES), "--max-tokens", str(MAX_TOKENS), "--lr", str(LR),
        *(["--bf16"] if precision else []),
    ]  # fmt: skip
    result: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return {**result, "lengths": result["mean_lengths"]}


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
