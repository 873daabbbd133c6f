"""Runs that begin with a folder with quantised weights: as from a folder with their numbers, and saved unquantised."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Project, make_project, train_in
from transformers import AutoModelForCausalLM

from references.quantised_folders import numbers_of, write_fp8
from strop.cli.quickstart.task import TaskFiles
from strop.engines.config import ModelConfig
from strop.evaluation.evaluate import evaluate
from strop.rollout.replicas.subprocess_engine import shape_folder
from strop.run import RunFolder
from strop.trainer.role_export import export_role
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run


@pytest.fixture(scope="module")
def fp8(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of runs in FP8."""
    return write_fp8(tiny_model, tmp_path_factory.mktemp("quantised") / "fp8", block=(20, 24))


@pytest.fixture(scope="module")
def quantised(fp8: Path, tiny_task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Runs of it."""
    return make_project(tmp_path_factory.mktemp("runs"), fp8, tiny_task)


def saved(folder: Path) -> Path:
    """The last checkpoint of a run."""
    with RunFolder.open(folder, read_only=True) as run:
        return run.checkpoints.root / f"global_step_{run.checkpoints.steps()[-1]}"


def test_a_run_is_the_run_of_the_numbers_and_saves_them(
    quantised: Project, fp8: Path, tmp_path: Path
) -> None:
    settings = ["trainer.max_steps=1", "algorithm.use_kl_loss=true"]
    run = train_in(tmp_path / "run", quantised.config(*settings))
    numbers = train_in(tmp_path / "numbers", quantised.config(*settings, f"model.path={numbers_of(fp8)}"))
    assert [step.stages for step in run.chain] == [step.stages for step in numbers.chain]
    model = saved(run.folder) / "model"
    settings_of_saved = json.loads((model / "config.json").read_text())
    assert "quantization_config" not in settings_of_saved
    assert settings_of_saved["dtype"] == "float32"
    expected = load_file(saved(numbers.folder) / "model" / "model.safetensors")
    weights = load_file(model / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert (model / "generation_config.json").read_text() == (
        saved(numbers.folder) / "model" / "generation_config.json"
    ).read_text()
    exported = export_role(saved(run.folder), tmp_path / "exported", quantised.config().model)
    plain = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert not hasattr(plain.config, "quantization_config")
    assert torch.equal(plain.lm_head.weight, expected["model.embed_tokens.weight"])


def test_the_adapter_of_a_quantised_model_is_exported_and_merged(quantised: Project, tmp_path: Path) -> None:
    config = quantised.config("trainer.max_steps=1", "model.lora.rank=2")
    checkpoint = saved(train_in(tmp_path / "run", config).folder)
    adapter = export_role(checkpoint, tmp_path / "adapter", config.model, adapter_only=True)
    assert (adapter.folder / "adapter_config.json").is_file()
    merged = export_role(checkpoint, tmp_path / "merged", config.model, dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((merged.folder / "config.json").read_text())


def test_fine_tuning_and_evaluation(quantised: Project, fp8: Path, tmp_path: Path) -> None:
    config = quantised.config("sft.max_steps=1")
    with start_run(tmp_path / "run", config, command=["strop", "sft"]).run as run:
        fine_tune(config, run, say=lambda line: None)
    assert "quantization_config" not in json.loads(
        (saved(tmp_path / "run") / "model" / "config.json").read_text()
    )
    answers = evaluate(config, say=lambda line: None).answers
    plain = quantised.config(f"model.path={numbers_of(fp8)}")
    assert answers == evaluate(plain, say=lambda line: None).answers


def test_an_engine_in_a_process_of_its_own_begins_with_an_unquantised_shape(
    fp8: Path, tmp_path: Path
) -> None:
    (fp8 / "hf_quant_config.json").write_text("{}")
    for _ in range(2):  # a second engine begins anew
        folder = Path(shape_folder(ModelConfig(path=str(fp8)), tmp_path / "vllm-0-model"))
    assert folder == tmp_path / "vllm-0-model"
    written = json.loads((fp8 / "config.json").read_text())
    del written["quantization_config"]
    assert json.loads((folder / "config.json").read_text()) == written
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert kept <= {path.name for path in folder.iterdir()}
    assert not {path.name for path in folder.iterdir()} & {"model.safetensors", "hf_quant_config.json"}
    assert (folder / "tokenizer.json").read_text() == (fp8 / "tokenizer.json").read_text()
    plain = numbers_of(fp8)
    assert shape_folder(ModelConfig(path=str(plain)), tmp_path / "none") == str(plain)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_sglang_takes_the_weights_of_a_quantised_model(quantised: Project, tmp_path: Path) -> None:
    """By the server that speaks SGLang's protocol (tests/rollout/sglang_server), which reads the folder it is given."""
    rollout = Path(__file__).parents[1] / "rollout"
    python = tmp_path / "python"
    root = f"{rollout / 'sglang_server'}:{rollout.parents[1]}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = ("rollout.engine=sglang", f"rollout.sglang.python={python}", "trainer.max_steps=2")
    done = train_in(tmp_path / "run", quantised.config(*settings))
    assert max(step["training/rollout_probs_diff_max"] for step in done.steps) < 1e-4
    (folder,) = (done.folder / "logs").glob("sglang-0-model")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
