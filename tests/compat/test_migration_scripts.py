"""Scripts of TRL and OpenRLHF as people have them: data sets made by functions, placed models, launch files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.cli.main import main
from strop.compat.migrate import Migration, migrate_openrlhf, migrate_trl, read_calls, read_openrlhf, read_trl
from strop.config import config_of
from strop.trainer.config import Config

GRPO = """\
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "models/qwen"


def questions(split="train", config="main"):
    data = load_dataset("openai/gsm8k", config)[split]
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    return data


def length_reward(completions, **kwargs):
    return [-float(len(one)) for one in completions]


args = GRPOConfig(
    output_dir="out", learning_rate=5e-6, adam_beta2=0.99, warmup_ratio=0.1, per_device_train_batch_size=4,
    gradient_accumulation_steps=4, num_generations=16, max_completion_length=786, num_train_epochs=1, save_steps=100,
    beta=0.04, epsilon_high=0.28, loss_type="dr_grpo", scale_rewards=False, temperature=0.9, num_iterations=2,
    bf16=True,    lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-6},
)
model = AutoModelForCausalLM.from_pretrained(
    MODEL, torch_dtype=torch.bfloat16, attn_implementation="eager", device_map=None, revision="v2"
).to("cuda")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj"]))
trainer = GRPOTrainer(
    model=model, reward_funcs=[length_reward], args=args, train_dataset=questions(),
    eval_dataset=questions("test", config="socratic"), processing_class=AutoTokenizer.from_pretrained(MODEL),
)
trainer.train()
"""
DPO = """\
export CUDA_VISIBLE_DEVICES=0,1,2,3
accelerate launch --config_file zero3.yaml trl/scripts/dpo.py --dataset_name owner/pairs \\
    --model_name_or_path models/qwen --learning_rate 5.0e-7 --num_train_epochs 2 --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 50 --beta 0.05 --max_length 1024 \\
    --lr_scheduler_type cosine --no_remove_unused_columns --no_gradient_checkpointing --bf16 \\
    --push_to_hub --hub_token abcdefghijkl
"""
DOTLESS = """\
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/openrlhf", "env_vars": {"NCCL_DEBUG": "WARN"}}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray --pretrain models/qwen --reward_pretrain models/rm \\
   --prompt_data json@data/math --prompt_max_len 512 --generate_max_len 256 --micro_train_batch_size 2 \\
   --rollout_batch_size 128 --train_batch_size 64 --n_samples_per_prompt 1 --actor_num_gpus_per_node 2
"""


def ours(migration: Migration) -> dict[str, Any]:
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def differs(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {
        key: found.get(key, "missing")
        for key, value in expected.items()
        if found.get(key, "missing") != value
    }


def test_a_script_of_grpo_with_functions_and_a_model_that_is_placed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GRPO)
    script = read_calls(tmp_path / "train.py", rewards=tmp_path / "rewards.py")
    migration = migrate_trl(script.found, script.kind)
    assert migration.open_rows == ()
    expected = {
        "model.path": "models/qwen",
        "model.dtype": "bfloat16",
        "model.attn_implementation": "eager",
        "model.revision": "v2",
        "model.lora.rank": 16,
        "data.train_files": ["hub:openai/gsm8k:main@train"],
        "data.val_files": ["hub:openai/gsm8k:socratic@test"],
        # 4 samples on one device x 4 = 16, of one prompt; one optimizer step, twice over.
        "data.prompts_per_step": 1,
        "actor.samples_per_update": 16,
        "actor.epochs": 2,
        "run.save_every": 50,
        "actor.optim.betas": [0.9, 0.99],
        "actor.optim.schedule": "cosine",
        "actor.optim.min_lr_ratio": 0.2,  # 1e-6 of 5e-6
        "algorithm.kl_loss_coef": 0.04,
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.loss_scale_factor": 786,
        "algorithm.norm_adv_by_std": False,
        "rollout.temperature": 0.9,
    }
    assert differs(ours(migration), expected) == {}
    config_of(Config, migration.values)


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        ("lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}", "translated",
         {"sft.optim.schedule": "cosine", "sft.optim.min_lr_ratio": 0.1}),
        ("lr_scheduler_type='warmup_stable_decay'", "translated", {"sft.optim.schedule": "wsd"}),
        ("lr_scheduler_type='cosine_with_min_lr'", "unresolved", {}),
        ("lr_scheduler_type='polynomial'", "refused", {}),
    ],
)  # fmt: skip
def test_schedules_of_transformers(
    tmp_path: Path, arguments: str, status: str, expected: dict[str, Any]
) -> None:
    text = f"from trl import SFTConfig, SFTTrainer\nSFTTrainer('m', SFTConfig(learning_rate=1e-5, {arguments}))\n"
    (tmp_path / "train.py").write_text(text)
    script = read_calls(tmp_path / "train.py")
    migration = migrate_trl(script.found, script.kind)
    (row,) = [row for row in migration.rows if row.key == "SFTConfig.lr_scheduler_type"]
    assert (row.outcome.status, dict(row.outcome.ours)) == (status, expected)


def test_a_launch_file_of_accelerate_says_how_many_processes(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    (tmp_path / "run.sh").write_text(DPO)
    script = read_trl(tmp_path / "run.sh", {}, rewards=tmp_path / "rewards.py")
    assert (script.processes, script.counted_in) == (4, "")
    migration = migrate_trl(script.found, script.kind, processes=script.processes or 1)
    assert migration.open_rows == ()
    expected = {
        "prefer.examples_per_update": 2 * 4 * 8,
        "prefer.optim.lr": 5e-7,
        "prefer.num_epochs": 2,
        "prefer.beta": 0.05,
        "prefer.data.max_tokens": 1024,
        "eval.every": 50,
        "model.gradient_checkpointing": False,
    }
    assert differs(ours(migration), expected) == {}
    config_of(Config, migration.values)


def test_a_launch_file_that_is_not_there_is_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(DPO)
    main(["migrate", "trl", str(tmp_path / "run.sh")])
    asked = capsys.readouterr()
    assert "how many processes are started stands in zero3.yaml" in asked.err
    assert "hub_token=[redacted]" in asked.out
    main(["migrate", "trl", str(tmp_path / "run.sh"), "--processes", "4"])
    told = capsys.readouterr()
    assert "zero3.yaml" not in told.err
    assert "prefer.examples_per_update=64" in told.out


def test_an_environment_of_ray_does_not_make_a_script_one_of_today(tmp_path: Path) -> None:
    """OpenRLHF's flags of today carry dots, and have other defaults."""
    (tmp_path / "run.sh").write_text(DOTLESS)
    migration = migrate_openrlhf(read_openrlhf(tmp_path / "run.sh", {}))
    assert migration.open_rows == ()
    assert [row.key for row in migration.rows if row.key in ("max_len", "critic.adam.betas")] == []
    expected = {
        "resources.env.NCCL_DEBUG": "WARN",
        "data.train_files": ["data/math"],
        "actor.engine.max_tokens_per_device": 2 * (512 + 256),
        "critic.optim.betas": [0.9, 0.95],
        "critic.samples_per_update": 64,
    }
    assert differs(ours(migration), expected) == {}
    config_of(Config, migration.values)


@pytest.mark.parametrize(
    ("launch", "processes"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 8", 16),
        ("deepspeed --num_gpus=4", 4),
        ("accelerate launch --num_machines 2 --num_processes 16", 16),
        ("python", None),
    ],
)
def test_processes_of_a_launcher_are_counted_over_machines(
    tmp_path: Path, launch: str, processes: int | None
) -> None:
    (tmp_path / "run.sh").write_text(
        f"{launch} trl/scripts/sft.py --model_name_or_path m --dataset_name o/d --load_in_4bit "
        "--bnb_4bit_quant_type nf4"
    )
    script = read_trl(tmp_path / "run.sh", {}, rewards=tmp_path / "rewards.py")
    assert script.processes == processes
    migration = migrate_trl(script.found, script.kind)
    assert migration.open_rows == ()
    (row,) = [row for row in migration.rows if row.key == "load_in_4bit"]
    assert row.outcome.status == "refused"


OLDER = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTTrainer

dataset = load_dataset("json", data_files={"train": "train.jsonl", "test": "test.jsonl"})
model = AutoModelForCausalLM.from_pretrained("models/llama", device_map="auto", token="hf_AbCdEfGhIjKlMnOpQrStUv")
args = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2)
SFTTrainer(
    model, args=args, train_dataset=dataset["train"], eval_dataset=dataset["test"], max_seq_length=512, packing=False
).train()
"""
UNSLOTH = """from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="models/qwen", max_seq_length=length, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(
    model, r=64, lora_alpha=32, target_modules=["q_proj"], use_gradient_checkpointing="unsloth", random_state=3407
)
dataset = load_dataset("json", data_files="train.jsonl", split="train")


def reward(completions, **kwargs):
    return [0.0] * len(completions)


args = GRPOConfig(num_generations=6, per_device_train_batch_size=6, max_completion_length=length - 256)
GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[reward], args=args, train_dataset=dataset).train()
"""


def test_a_fine_tuning_of_2024_with_training_arguments(tmp_path: Path) -> None:
    """Its learning rate and gradient checkpointing are those that transformers assumes, not TRL."""
    (tmp_path / "train.py").write_text(OLDER)
    script = read_calls(tmp_path / "train.py")
    migration = migrate_trl(script.found, script.kind)
    assert migration.open_rows == ()
    expected = {
        "model.path": "models/llama",
        "model.gradient_checkpointing": False,
        "sft.optim.lr": 5e-5,
        "sft.num_epochs": 2,
        "sft.examples_per_update": 8,
        "sft.data.max_tokens": 512,
        "sft.data.train_files": ["train.jsonl"],
        "sft.data.val_files": ["test.jsonl"],
    }
    assert differs(ours(migration), expected) == {}
    assert "hf_Ab" not in str([row.value for row in migration.rows])
    config_of(Config, migration.values)


def test_a_model_and_an_adapter_of_unsloth(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNSLOTH)
    script = read_calls(tmp_path / "train.py", rewards=tmp_path / "rewards.py")
    migration = migrate_trl(script.found, script.kind)
    assert migration.open_rows == ()
    expected = {
        "model.path": "models/qwen",
        "model.lora.rank": 64,
        "model.lora.alpha": 32,
        "model.lora.target_modules": ["q_proj"],
        "model.gradient_checkpointing": True,
        "data.max_response_tokens": 1792,
        "rollout.samples_per_prompt": 6,
    }
    assert differs(ours(migration), expected) == {}
    config_of(Config, migration.values)


@pytest.mark.parametrize("tower", [True, False])
def test_a_vision_language_model_of_unsloth(tmp_path: Path, tower: bool) -> None:
    adapter = (
        f"r=16, finetune_vision_layers={tower}, finetune_language_layers=True, finetune_mlp_modules=True"
    )
    text = (
        "from unsloth import FastVisionModel\nfrom datasets import load_dataset\nfrom trl import SFTTrainer\n"
        'model, tokenizer = FastVisionModel.from_pretrained("models/vl")\n'
        f"model = FastVisionModel.get_peft_model(model, {adapter})\n"
        'rows = load_dataset("json", data_files="train.jsonl", split="train")\n'
        'SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(dataset_text_field="")).train()\n'
    )
    (tmp_path / "train.py").write_text(text)
    script = read_calls(tmp_path / "train.py")
    migration = migrate_trl(script.found, script.kind)
    assert migration.open_rows == ()
    assert ours(migration).get("model.freeze_vision_tower", False) is not tower
    assert "SFTConfig.dataset_text_field" not in [
        row.key for row in migration.rows if row.outcome.status == "refused"
    ]
