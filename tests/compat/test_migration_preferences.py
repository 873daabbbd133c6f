"""Trainings on preferences of TRL and OpenRLHF: what their arguments become, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import migrate_openrlhf, migrate_trl, read_calls, read_openrlhf
from strop.compat.migrate.tables import Migration
from strop.config import config_of
from strop.trainer.config import Config


def trl(folder: Path, kind: str, arguments: str, trainer: str = "model='/models/m', args=args") -> Migration:
    path = folder / "train.py"
    path.write_text(f"args = {kind}Config({arguments})\n{kind}Trainer({trainer}).train()\n")
    script = read_calls(path)
    assert script.kind == kind
    return migrate_trl(script.found, script.kind)


def ours(migration: Migration) -> dict[str, Any]:
    """Our full keys; the configuration loads."""
    config_of(Config, migration.values)
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def said(migration: Migration, key: str) -> tuple[str, str]:
    (row,) = (row for row in migration.rows if row.key == key)
    return row.outcome.status, row.outcome.note


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("DPO", "per_device_train_batch_size=2, gradient_accumulation_steps=4, beta=0.2, max_length=512",
         {"prefer.examples_per_update": 8, "prefer.beta": 0.2, "prefer.data.max_tokens": 512, "prefer.num_epochs": 3,
          "prefer.optim.schedule": "linear", "prefer.optim.weight_decay": 0.0, "prefer.loss": None}),
        ("DPO", "loss_type='ipo'", {"prefer.loss": "ipo"}),
        ("DPO", "loss_type=['hinge'], label_smoothing=0.0", {"prefer.loss": "hinge"}),
        ("DPO", "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.2]", {"prefer.loss": "sigmoid",
                                                                          "prefer.nll_coef": 0.2}),
        ("DPO", "rpo_alpha=1.0, label_smoothing=0.1", {"prefer.nll_coef": 1.0, "prefer.label_smoothing": 0.1}),
        ("DPO", "max_steps=20, warmup_ratio=0.1, activation_offloading=True",
         {"prefer.max_steps": 20, "prefer.optim.warmup_steps": 2, "prefer.engine.offload_activations": True}),
        ("KTO", "desirable_weight=1.5, undesirable_weight=0.5",
         {"prefer.loss": "kto", "prefer.desirable_weight": 1.5, "prefer.undesirable_weight": 0.5}),
        ("DPO", "max_length=32768", {"prefer.data.max_tokens": 32768, "prefer.engine.max_tokens_per_device": 32769}),
        ("DPO", "evaluation_strategy='steps', eval_steps=5", {"eval.every": 5, "eval.before_train": None}),
        ("Reward", "center_rewards_coefficient=0.01",
         {"prefer.loss": "reward", "prefer.center_coef": 0.01, "prefer.optim.lr": 1e-4, "eval.every": 0}),
        ("Reward", "eval_strategy='steps', eval_steps=5, learning_rate=1e-5",
         {"eval.every": 5, "prefer.optim.lr": 1e-5}),
    ],
)  # fmt: skip
def test_what_arguments_of_trl_become(
    tmp_path: Path, kind: str, arguments: str, expected: dict[str, Any]
) -> None:
    found = ours(trl(tmp_path, kind, arguments))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "key", "sentence"),
    [
        ("loss_type=['sigmoid', 'bco_pair']", "loss_type", "prefer.loss is one of sigmoid, hinge, ipo, with weight 1"),
        ("loss_type='sigmoid', loss_weights=[2.0]", "loss_type", "with weight 1; prefer.nll_coef weighs `sft`"),
        ("reference_free=True", "reference_free", "the policy stays near the model that it begins with"),
        ("f_divergence_type='js_divergence'", "f_divergence_type", "prefer.loss measures by reverse KL"),
        ("sync_ref_model=True", "sync_ref_model", "the policy stays near the model that it begins with"),
    ],
)  # fmt: skip
def test_what_dpo_does_otherwise_is_refused(tmp_path: Path, arguments: str, key: str, sentence: str) -> None:
    status, note = said(trl(tmp_path, "DPO", arguments), f"DPOConfig.{key}")
    assert status == "refused"
    assert sentence in note


def test_an_argument_of_a_model_that_is_refused_keeps_no_other_one_from_being_set(tmp_path: Path) -> None:
    loading = "'load_in_4bit': True, 'revision': 'v1', 'attn_implementation': 'kernels-community/flash-attn2'"
    migration = trl(tmp_path, "DPO", f"model_init_kwargs={{'dtype': 'bfloat16', {loading}}}")
    assert said(migration, "DPOConfig.model_init_kwargs")[0] == "refused"
    found = ours(migration)
    assert (found["model.dtype"], found["model.revision"]) == ("bfloat16", "v1")


def test_models_and_rows_of_a_trainer_of_trl(tmp_path: Path) -> None:
    load = "AutoModelForCausalLM.from_pretrained('/models/m')"
    data = "load_dataset('a/b', split='train')"
    same = f"{load}, ref_model={load}, args=args, train_dataset={data}"
    migration = trl(tmp_path, "DPO", "", same)
    assert ours(migration)["model.path"] == "/models/m"
    assert ours(migration)["prefer.data.train_files"] == ["hub:a/b@train"]
    assert "rows have chosen and rejected" in said(migration, "DPOTrainer.train_dataset")[1]
    assert said(migration, "DPOTrainer.ref_model")[0] == "not needed"
    other = same.replace(
        "ref_model=AutoModelForCausalLM.from_pretrained('/models/m')", "ref_model='/models/n'"
    )
    assert said(trl(tmp_path, "DPO", "", other), "DPOTrainer.ref_model")[0] == "refused"
    kto = trl(tmp_path, "KTO", "", f"'/models/m', None, args, train_dataset={data}")
    assert said(kto, "KTOTrainer.train_dataset")[1] == "rows have prompt, completion and label"
    unread = trl(tmp_path, "DPO", "", "'/models/m', args=args, train_dataset=rows_of(1)")
    assert "set prefer.data.train_files" in said(unread, "DPOTrainer.train_dataset")[1]


def openrlhf(folder: Path, program: str, flags: str) -> Migration:
    path = folder / "run.sh"
    path.write_text(f"deepspeed --module openrlhf.cli.{program} {flags}\n")
    return migrate_openrlhf(read_openrlhf(path, {}))


@pytest.mark.parametrize(
    ("program", "flags", "expected"),
    [
        ("train_dpo", "--pretrain m --dataset a/b --chosen_key good --ipo --micro_train_batch_size 2 --max_len 256",
         {"prefer.loss": "ipo", "prefer.data.chosen_key": "good", "prefer.data.train_files": ["hub:a/b@train"],
          "prefer.engine.max_tokens_per_device": 1024, "prefer.data.max_tokens": 256, "prefer.optim.lr": 1e-5,
          "prefer.examples_per_update": 128, "prefer.optim.betas": [0.9, 0.95], "prefer.optim.schedule": "cosine",
          "prefer.optim.min_lr_ratio": 0.1, "prefer.optim.warmup_share": 0.03}),
        ("train_dpo", "--nll_loss_coef 0.2 --label_smoothing 0.1 --beta 0.3 --dataset_split part --dataset a/b",
         {"prefer.nll_coef": 0.2, "prefer.label_smoothing": 0.1, "prefer.beta": 0.3,
          "prefer.data.train_files": ["hub:a/b@part"]}),
        ("train_kto", "--input_key q --output_key a --undesirable_loss_weight 2",
         {"prefer.loss": "kto", "prefer.data.prompt_key": "q", "prefer.data.completion_key": "a", "prefer.beta": 0.01,
          "prefer.undesirable_weight": 2.0, "prefer.data.max_tokens": 2048}),
        ("train_rm", "--max_len 32768", {"prefer.engine.max_tokens_per_device": 32769}),
        ("train_rm", "--max_len 32768 --micro_train_batch_size 1", {"prefer.engine.max_tokens_per_device": 65536}),
        ("train_rm", "--adam_offload", {"prefer.loss": "reward", "prefer.optim.lr": 9e-6,
                                        "prefer.engine.offload": "optimizer"}),
        # Today's names, and what is assumed with them.
        ("train_dpo", "--model.model_name_or_path m --model.ipo_enable --adam.lr 2e-6 --ds.lora.rank 8",
         {"model.path": "m", "prefer.loss": "ipo", "prefer.optim.lr": 2e-6, "model.lora.rank": 8,
          "model.dtype": "bfloat16"}),
        ("train_rm", "--train.batch_size 8 --min_lr_ratio 0.2",
         {"prefer.examples_per_update": 8, "prefer.optim.min_lr_ratio": 0.2}),
    ],
)  # fmt: skip
def test_what_flags_of_openrlhf_become(
    tmp_path: Path, program: str, flags: str, expected: dict[str, Any]
) -> None:
    found = ours(openrlhf(tmp_path, program, flags))
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("program", "flags", "key", "status", "sentence"),
    [
        ("train_dpo", "--pretrain m --ref_pretrain n", "ref_pretrain", "refused", "near the model that it begins"),
        ("train_dpo", "--pretrain m --ref_pretrain m", "ref_pretrain", "not needed", "in both"),
        ("train_kto", "--input_key messages", "input_key", "refused", "of its own: prefer.data.completion_key"),
        ("train_rm", "--loss logexp", "loss", "refused", "the loss is sigmoid"),
        ("train_rm", "--model.loss_type logexp", "model.loss_type", "refused", "the loss is sigmoid"),
        ("train_dpo", "--optim muon", "optim", "refused", "set prefer.optim.name=muon and prefer.optim.lr"),
    ],
)  # fmt: skip
def test_what_openrlhf_does_otherwise_is_said(
    tmp_path: Path, program: str, flags: str, key: str, status: str, sentence: str
) -> None:
    found = said(openrlhf(tmp_path, program, flags), key)
    assert found[0] == status
    assert sentence in found[1]
