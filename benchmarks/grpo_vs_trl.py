"""A whole GRPO step of strop beside TRL's, same model, prompts, reward and lengths, in one run.

    make bench BENCH=grpo_vs_trl          (makes TRL's own environment .venv-trl the first time)

prints one JSON line. `ratio_trl` is strop's samples per second over those of TRL at its faster batch setting;
both sides take the median over the steps after a warm-up, and their runs alternate. Everything a step does by
default counts: sampling, scoring, the update, and on strop's side sample store, ledger and fingerprint.
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
from transformers import AutoModelForCausalLM

from strop.data.tasks import ALPHABET, draw_words, question
from strop.data.tiny import make_tiny_model
from strop.trainer.trackers import read_metrics

HERE = Path(__file__).resolve().parent
PROMPTS, SAMPLES, MAX_TOKENS, LR = 8, 8, 32, 1e-4
WARM_UP = 3
"""Steps of each run that are not counted."""
SIZES = {
    "small": {"hidden_size": 256, "num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 768},
    "large": {"hidden_size": 768, "num_layers": 11, "num_heads": 24, "num_kv_heads": 8, "intermediate_size": 2304},
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
        make_tiny_model(folder / "model", seed=0, head_dim=32, **SIZES[arguments.size])
        _write_data(folder)
        ours: list[dict[str, Any]] = []
        theirs: dict[str, list[dict[str, Any]]] = {"64x1": [], "32x2": []}
        for number in range(arguments.rounds):
            ours.append(_strop(folder, number, arguments.steps + WARM_UP))
            for setting, runs in theirs.items():
                batch, accumulate = map(int, setting.split("x"))
                runs.append(_trl(arguments, folder, batch, accumulate))
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "model").parameters())
    samples = PROMPTS * SAMPLES
    strop_s = _median([run["seconds"] for run in ours])
    trl_s = {setting: _median([run["seconds"] for run in runs]) for setting, runs in theirs.items()}
    best = min(trl_s, key=lambda setting: trl_s[setting])
    result = {
        "name": "grpo_vs_trl",
        "ratio_trl": round(trl_s[best] / strop_s, 2),
        "samples_per_s": round(samples / strop_s, 1),
        "samples_per_s_trl": round(samples / trl_s[best], 1),
        "step_s": round(strop_s, 3),
        "step_s_trl": {setting: round(value, 3) for setting, value in trl_s.items()},
        "phases_s": ours[-1]["phases"],
        "mean_response_tokens": ours[-1]["length"],
        "mean_response_tokens_trl": theirs[best][-1]["mean_length"],
        "parameters": parameters,
        "samples_per_step": samples,
        "max_new_tokens": MAX_TOKENS,
        "versions_trl": theirs[best][-1]["versions"],
        **where,
    }
    print(json.dumps(result))


def _median(runs: list[list[float]]) -> float:
    return statistics.median(second for run in runs for second in run[WARM_UP:])


def _write_data(folder: Path) -> None:
    words = draw_words(0, 512, min_letters=8, max_letters=12, alphabet=ALPHABET)
    with (folder / "data.jsonl").open("w") as file:
        for word in words:
            messages = [{"role": "user", "content": question(word)}]
            row = {"data_source": "bench", "prompt": messages, "word": word, "reward_model": {"ground_truth": word}}
            file.write(json.dumps(row) + "\n")


def _strop(folder: Path, number: int, steps: int) -> dict[str, Any]:
    run = folder / f"run{number}"
    command = [
        sys.executable, "-m", "strop.cli.main", "train", "--out", str(run), f"model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'data.jsonl'}]", f"data.prompts_per_step={PROMPTS}", "data.max_prompt_tokens=64",
        f"data.max_response_tokens={MAX_TOKENS}", f"rollout.samples_per_prompt={SAMPLES}", f"actor.optim.lr={LR}",
        f"reward.path={HERE / 'overlap_reward.py'}", f"trainer.max_steps={steps}", "run.save_every=0",
        "trainer.trackers=[jsonl]",
    ]
    _run(command)
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "timing_s/step" in row]
    phases = ("gen", "adv", "update_actor")
    return {
        "seconds": [row["timing_s/step"] for row in metrics],
        "phases": {p: round(statistics.median(row[f"timing_s/{p}"] for row in metrics[WARM_UP:]), 3) for p in phases},
        "length": metrics[-1]["response_length/mean"],
    }


def _trl(arguments: argparse.Namespace, folder: Path, batch: int, accumulate: int) -> dict[str, Any]:
    command = [
        str(arguments.trl_python), str(HERE / "trl_grpo.py"), str(folder / "model"), str(folder / "data.jsonl"),
        "--steps", str(arguments.steps + WARM_UP), "--batch", str(batch), "--accumulate", str(accumulate),
        "--samples", str(SAMPLES), "--max-tokens", str(MAX_TOKENS), "--lr", str(LR),
    ]
    result: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return result


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
