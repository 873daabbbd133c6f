"""The golden run: twenty steps of GRPO of a tiny model, whose hashes and numbers are committed.

    python tests/trainer/golden_run.py      runs it and writes golden/grpo.json, with the platform it was made on

A change that is meant to change numbers brings the new file, and says in its message why they changed.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tiny_runs import make_project, train_in

from strop.cli.quickstart.task import write_task
from strop.data.tiny_model import make_tiny_model

FILE = Path(__file__).parent / "golden" / "grpo.json"
NUM_STEPS = 20
VALUES = (
    "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/ratio",
    "critic/rewards/mean", "critic/advantages/max", "response_length/mean", "training/rollout_log_probs_diff_max",
)  # fmt: skip
"""What is compared within a tolerance on other platforms."""


def this_platform() -> dict[str, str]:
    """What the bits of a run depend on beside our code: libraries, and the kernels they choose for a processor."""
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "transformers")}
    return {
        **versions,
        "machine": platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "compiler": _compiler(),
    }


def _compiler() -> str:
    """What compiles decode attention here; empty where nothing does."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return ""
    return subprocess.run([gcc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[
        0
    ]


def _processor() -> str:
    """Maker, family and model; empty where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    facts = dict(
        line.replace("\t", "").split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line
    )
    return " ".join(facts.get(name, "").strip() for name in ("vendor_id", "cpu family", "model"))


def play(folder: Path) -> dict[str, Any]:
    """Carry out the run in an empty folder; what is committed of it."""
    make_tiny_model(
        folder / "model", seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    task = write_task(
        folder / "task", seed=0, num_train=24, num_val=4, num_sft=4, min_letters=3, max_letters=3
    )
    config = make_project(folder, folder / "model", task).config(
        "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.01", "actor.samples_per_update=8",
        f"trainer.max_steps={NUM_STEPS}", "data.val_files=[]", "run.save_samples=false",
    )  # fmt: skip
    done = train_in(folder / "run", config)
    steps = [
        {
            "step": one.step,
            "chain": one.chain,
            "stages": dict(one.stages),
            "values": {name: numbers[name] for name in VALUES},
        }
        for one, numbers in zip(done.chain, done.steps, strict=True)
    ]
    return {"platform": this_platform(), "steps": steps}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = play(Path(folder))
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}: {NUM_STEPS} steps, platform {made['platform']}")
