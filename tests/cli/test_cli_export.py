"""`strop export`: a folder that others read, and a sentence where there is none."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import Project, cli
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from references.token_passes import of_log_probs, of_values
from strop.config import load_config
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.role_checkpoint import CONFIG_FOLDER, save_role
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model
from strop.run import RunFolder
from strop.trainer import role_export
from strop.trainer.config import Config
from strop.trainer.plan.baseline import Baseline


def after_one_step(model: Any, *, seed: int) -> TrainEngine:
    """An engine after one step on random tokens."""
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=1e-2), total_steps=None)
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(seed))
    rows = make_rows([ids[0, :4]], [ids[1]])
    if model.module.get_output_embeddings() is None:
        engine.accumulate(rows, of_values(lambda values, _: (values - 1).square().sum()))
    else:
        engine.accumulate(rows, of_log_probs(lambda log_probs, *_: -log_probs.sum(), temperature=1.0))
    assert not engine.step().skipped
    return engine


@pytest.fixture(scope="module")
def run_with_critic(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 1 and 2, actor and critic in shards, no Hugging Face folder."""
    path = tmp_path_factory.mktemp("export") / "run"
    config = load_config(Config, source=project.config)
    tokenizer = AutoTokenizer.from_pretrained(project.model)
    with RunFolder.create(path, config={}, command=["strop", "train"]) as run:
        shutil.copy(project.config, path / "config.yaml")
        for step in (1, 2):
            actor = after_one_step(load_model(config.model), seed=step)
            critic = after_one_step(load_value_model(config.model), seed=step)
            pending = run.checkpoints.begin(step, facts={})
            save_role(pending.folder / "actor", actor)
            tokenizer.save_pretrained(pending.folder / "actor" / CONFIG_FOLDER)
            save_role(pending.folder / "critic", critic)
            if step == 2:
                save_role(pending.folder / "prm", after_one_step(load_model(config.model), seed=7))
            pending.seal()
    return path


def weight(folder: Path) -> torch.Tensor:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found: torch.Tensor = module.model.norm.weight.detach()
    return found


def test_export_says_what_it_wrote_and_json_repeats_it(
    project: Project, run_with_critic: Path, tmp_path: Path
) -> None:
    result = cli("export", run_with_critic, tmp_path / "last", "--json")
    assert result.code == 0, result.err
    line, _ = result.out.splitlines()
    record = result.record
    assert line.startswith(f"export ok: {record['tensors']} tensors, 0.")
    assert line.endswith(f"probe log-prob diff {record['difference']:.4f}")
    assert (record["step"], record["role"], record["rounding"]) == (2, "actor", 0)
    assert f"checkpoint 2 of {run_with_critic}" in result.err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "last")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(project.model).get_vocab()
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(project.model).chat_template
    first = cli("export", run_with_critic, "--out", tmp_path / "first", "--step", 1, "--dtype", "bfloat16")
    assert "(rounding moves them by 0." in first.out
    assert weight(tmp_path / "first").dtype == torch.bfloat16
    assert not weight(tmp_path / "first").float().equal(weight(tmp_path / "last").bfloat16().float())


def test_a_finished_run_of_this_program_is_exported(trained: Path, tmp_path: Path) -> None:
    result = cli("export", trained, tmp_path / "out")
    assert result.code == 0, result.err
    assert weight(tmp_path / "out").dtype == torch.float32
    answered = cli("eval", tmp_path / "out", "--config", trained / "config.yaml", "--json")
    assert answered.code == 0, answered.err


def test_a_critic_is_exported_by_its_role(run_with_critic: Path, tmp_path: Path) -> None:
    result = cli("export", run_with_critic, tmp_path / "critic", "--role", "critic")
    assert result.code == 0, result.err
    assert "probe value diff 0.0000" in result.out
    assert '"Qwen3ForSequenceClassification"' in (tmp_path / "critic" / "config.json").read_text()


def test_a_process_reward_model_is_exported_by_its_role(
    project: Project, run_with_critic: Path, tmp_path: Path
) -> None:
    result = cli("export", run_with_critic, tmp_path / "prm", "--role", "prm", "--json")
    assert result.code == 0, result.err
    assert (result.record["role"], result.record["step"]) == ("prm", 2)
    assert "probe log-prob diff 0.0000" in result.out
    assert not weight(tmp_path / "prm").equal(weight(project.model)), "what it has learned"
    assert AutoTokenizer.from_pretrained(tmp_path / "prm").get_vocab()
    none = cli("export", run_with_critic, tmp_path / "none", "--role", "prm", "--step", 1)
    assert (
        "holds no prm (found: actor, critic, manifest.json); give a checkpoint of a run that" in none.sentence
    )


def test_a_critic_with_adapters_of_its_own_is_merged(project: Project, tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = load_config(Config, source=project.config, overrides=["critic.lora.rank=2"])
    model = dataclasses.replace(config.model, lora=config.critic.lora)
    with RunFolder.create(path, config={}, command=["strop", "train"]) as run:
        text = project.config.read_text() + "critic: {lora: {rank: 2}}\n"
        (path / "config.yaml").write_text(text)
        pending = run.checkpoints.begin(1, facts={})
        save_role(pending.folder / "critic", after_one_step(load_value_model(model), seed=0))
        pending.seal()
    result = cli("export", path, tmp_path / "critic", "--role", "critic")
    assert result.code == 0, result.err
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype="auto")
    assert not any("lora" in name for name, _ in module.named_parameters())
    assert float(module.score.weight.abs().max()) > 0, "the head was trained too"


def test_what_cannot_be_exported_is_said_in_a_sentence(run_with_critic: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, sentence in (
        ((run_with_critic, out, "--step", 3), "no checkpoint of step 3 of .*: ckpt 3 is not in .*; checkpoints: 1, 2"),
        ((tmp_path / "none", out), "none does not exist; give the folder that --out named"),
        ((tmp_path, out), "is no run folder; give the folder that --out named"),
        (
            (run_with_critic / "checkpoints/global_step_1/actor", out),
            f"actor is part of a run: strop export {run_with_critic} --step 1 --out OUT",
        ),
        ((run_with_critic, run_with_critic), "is not empty .it holds checkpoints, config.yaml, events.jsonl.; give"),
        ((run_with_critic, out, "--adapter"), "was trained without adapters .model.lora.rank is 0."),
        ((run_with_critic, out, "--adapter", "--dtype", "float32"), "--dtype has no place beside --adapter"),
        ((run_with_critic, out, "--out", out), "name one folder for the model: strop export RUN --out OUT"),
        ((run_with_critic,), "name one folder for the model: strop export RUN --out OUT"),
        ((run_with_critic, "--out", "/proc/strop/model"), "cannot write --out /proc/strop/model: No such file"),
        ((run_with_critic, out, "--role", "reference"), "invalid choice: 'reference'"),
    ):  # fmt: skip
        assert re.search(sentence, cli("export", *words).sentence)
    assert not out.exists()


def test_a_damaged_checkpoint_is_passed_over_and_said(run_with_critic: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_with_critic, run)
    shard = run / "checkpoints" / "global_step_2" / "actor" / "shard-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result = cli("export", run, tmp_path / "out", "--json")
    assert result.code == 0
    assert "ckpt 2 is damaged: actor/shard-00001-of-00001.safetensors has" in result.err
    assert result.record["step"] == 1
    assert "ckpt 2 is damaged" in cli("export", run, tmp_path / "x", "--step", 2).sentence
    for step in (1, 2):
        (run / "checkpoints" / f"global_step_{step}" / "manifest.json").unlink()
    assert "has no valid checkpoint to export" in cli("export", run, tmp_path / "x").sentence


def test_a_wrong_export_ends_with_2_and_leaves_nothing(
    run_with_critic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_export, "PROBE_TOLERANCE", -1.0)
    result = cli("export", run_with_critic, tmp_path / "out")
    assert "gives other log-probs in plain transformers than in training" in result.sentence
    assert "export ok" not in result.out
    assert list(tmp_path.iterdir()) == []


CONFIGURATION = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own_model"
"""
MODELING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_planned_saved_and_exported_with_it(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a process takes is measured in test_plan_baseline.py.
    monkeypatch.setattr("strop.trainer.plan.plan.baseline_of", lambda _: Baseline(num_bytes=500 << 20))
    folder, run, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    shutil.copytree(project.model, folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    settings = json.loads((folder / "config.json").read_text())
    code = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    changes = {"model_type": "own_model", "architectures": ["OwnForCausalLM"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(settings | changes))
    words = [f"model.path={folder}", "model.trust_remote_code=true", "trainer.max_steps=1"]
    planned = cli("plan", "--config", project.config, *words[:2])
    assert planned.code == 0, planned.err
    done = cli("train", "--config", project.config, "--out", run, *words)
    assert done.code == 0, done.err
    assert cli("eval", run, "data.max_val_prompts=1").code == 0
    shutil.rmtree(folder)
    exported = cli("export", run, out)
    assert exported.code == 0, exported.err
    for saved in (run / "model", out):
        assert {"configuration_own.py", "modeling_own.py"} <= {path.name for path in saved.iterdir()}
    assert (
        type(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).__name__ == "OwnForCausalLM"
    )
