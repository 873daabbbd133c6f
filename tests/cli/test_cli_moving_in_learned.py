"""Projects of trainings without rewards move in and train: conversations and preferences of verl, TRL and OpenRLHF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import Project, cli

TRL = """\
from datasets import load_dataset
from trl import {kind}Config, {kind}Trainer

MODEL = "{folder}/model"
args = {kind}Config(
    output_dir="out", {settings}, learning_rate=3e-3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    num_train_epochs=2, max_length=64, report_to="none", bf16=False, seed=3, logging_steps=1,
)
rows = load_dataset("json", data_files="{here}/{rows}.jsonl", split="train")
trainer = {kind}Trainer(model=MODEL, args=args, train_dataset=rows)
trainer.train()
"""
OPENRLHF = """\
deepspeed --module openrlhf.cli.{kind} --model.model_name_or_path {folder}/model --data.dataset {here}/{rows}.jsonl \\
   {settings} --data.apply_chat_template --data.max_len 64 --train.batch_size 4 --adam.lr 3e-3 \\
   --train.max_epochs 2 --ckpt.output_dir {here}/ckpt --ds.zero_stage 3 --ds.packing_samples --logger.logging_steps 1
"""
VERL = """\
torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.{kind} \\
    data.train_files={here}/{rows}.parquet data.val_files={here}/{rows}.parquet {settings} \\
    data.train_batch_size=4 data.max_length=64 data.micro_batch_size_per_gpu=2 optim.lr=3e-3 \\
    model.partial_pretrain={folder}/model trainer.default_local_dir={here}/ckpt trainer.project_name=a \\
    trainer.experiment_name=b trainer.total_epochs=2 trainer.logger=['console'] trainer.default_hdfs_dir=null
"""
WORDS = ("ab", "cd", "ef", "gh")
ROWS = {
    "pairs": [{"prompt": word, "chosen": word.upper(), "rejected": word} for word in WORDS],
    "rated": [{"prompt": word, "completion": word.upper(), "label": word < "e"} for word in WORDS],
    "solved": [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]}
        for word in WORDS
    ],
}


@pytest.mark.parametrize(
    ("library", "text", "kind", "rows", "settings", "loss"),
    [
        ("trl", TRL, "SFT", "solved", "packing=True, assistant_only_loss=True", "train/loss"),
        ("trl", TRL, "DPO", "pairs", "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.1], beta=0.2", "prefer/loss"),
        ("trl", TRL, "KTO", "rated", "desirable_weight=1.5, precompute_ref_log_probs=True", "prefer/loss"),
        ("trl", TRL, "Reward", "pairs", "center_rewards_coefficient=0.01", "prefer/loss"),
        ("openrlhf", OPENRLHF, "train_sft", "solved", "--data.input_key messages --data.multiturn", "train/loss"),
        ("openrlhf", OPENRLHF, "train_dpo", "pairs", "--data.prompt_key prompt --model.ipo_enable", "prefer/loss"),
        ("openrlhf", OPENRLHF, "train_rm", "pairs", "--data.prompt_key prompt", "prefer/loss"),
        ("verl", VERL, "fsdp_sft_trainer", "solved",
         "data.multiturn.enable=true data.multiturn.messages_key=messages", "train/loss"),
    ],
)  # fmt: skip
def test_a_project_without_rewards_moves_in_and_learns(
    library: str, text: str, kind: str, rows: str, settings: str, loss: str, tmp_path: Path, project: Project
) -> None:
    if library == "verl":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(ROWS[rows]).to_parquet(tmp_path / f"{rows}.parquet")
    (tmp_path / f"{rows}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[rows]))
    script, out, run = (
        tmp_path / ("run.py" if library == "trl" else "run.sh"),
        tmp_path / "made.yaml",
        tmp_path / "run",
    )
    script.write_text(
        text.format(folder=project.folder, here=tmp_path, kind=kind, rows=rows, settings=settings)
    )
    result = cli("migrate", library, script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0), (
        result.out
    )
    command = "sft" if loss == "train/loss" else "prefer"
    assert f"strop {command} --config {out}" in result.out
    trained = cli(
        command, "--config", out, "--out", run, "model.dtype=float32", "resources.num_threads=1", "--json"
    )
    assert trained.code == 0, trained.err
    assert trained.record["steps"] == 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (line[loss] for line in steps if loss in line)
    assert last < first
