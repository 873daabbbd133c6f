"""Projects of verl, TRL and OpenRLHF move in: their scripts are migrated, and the result trains for a step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.run import RunFolder

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Every key of a long launch line, in the sizes of a toy.
LINE = """\
set -x
MODEL={folder}/model
python3 -m verl.trainer.main_ppo \\
  algorithm.adv_estimator=grpo \\
  data.train_files={folder}/data/train.parquet data.val_files={folder}/data/val.parquet \\
  data.train_batch_size=2 data.max_prompt_length=32 data.max_response_length=4 \\
  data.filter_overlong_prompts=True data.truncation=error \\
  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
  actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.ref.fsdp_config.param_offload=False \\
  actor_rollout_ref.actor.grad_clip=1.0 data.reward_fn_key=data_source \\
  actor_rollout_ref.rollout.multi_stage_wake_up=True \\
  algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \\
  trainer.project_name=demo trainer.experiment_name=run1 trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
  trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.total_training_steps=1 \\
  trainer.device=cpu trainer.val_before_train=False \\
  custom_reward_function.path={folder}/move_in_reward.py custom_reward_function.name=graded \\
  +custom_reward_function.reward_kwargs.bonus=0.25"""

# Keys that do nothing there, in the forms in which people write them.
NOTHING = [
    f"{A}.freeze_vision_tower=False", f"{A}.use_rollout_log_probs=True",
    f"{A}.router_replay.record_file=null", f"{A}.router_replay.replay_file=null",
    "actor_rollout_ref.nccl_timeout=600",
    f"{R}.do_sample=True", f"{R}.repetition_penalty=1.0", f"{R}.over_sample_rate=0", f"{R}.val_kwargs.do_sample=True",
    f"{R}.multi_turn.enable=False", f"{R}.multi_turn.use_inference_chat_template=True",
    f"{R}.multi_turn.tokenization_sanity_check_mode=disable", f"{R}.multi_turn.num_repeat_rollouts=2",
    "data.return_raw_chat=True", "data.return_raw_input_ids=False", "data.return_full_prompt=False",
    "data.return_multi_modal_inputs=False", "data.chat_template_func=null", "data.filter_prompts=True",
    "critic.forward_micro_batch_size=8",
    "critic.forward_micro_batch_size_per_gpu=8", "critic.forward_max_token_len_per_gpu=1024",
    "algorithm.filter_groups.max_num_gen_batches=10", "trainer.esi_redundant_time=0", "algorithm.use_pf_ppo=False",
]  # fmt: skip

VERL_REWARD = '''\
def graded(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """As it is written for verl: keywords, a dictionary with `score` in return, an argument from the settings."""
    spread = ord((solution_str or " ")[0]) % 7 / 10
    return {"score": spread + bonus, "acc": float(solution_str == ground_truth), "source_seen": data_source}
'''

TRL_SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl_reward import spread

args = GRPOConfig(
    output_dir="out", run_name="demo", per_device_train_batch_size=4, gradient_accumulation_steps=1, num_generations=2,
    learning_rate=5e-6, adam_beta2=0.99, warmup_steps=1, lr_scheduler_type="cosine", max_grad_norm=0.5, max_steps=1,
    max_completion_length=4, beta=0.04, epsilon=0.2, loss_type="grpo", scale_rewards="group", temperature=1.0,
    logging_steps=1, save_steps=1, report_to="none", bf16=False, gradient_checkpointing=False, use_vllm=True,
    vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, seed=3, remove_unused_columns=False, log_completions=True,
)
trainer = GRPOTrainer(
    model="{folder}/model", reward_funcs=spread, args=args,
    train_dataset=load_dataset("parquet", data_files="{folder}/data/train.parquet", split="train"),
)
trainer.train()
"""

TRL_REWARD = '''\
def spread(prompts, completions, data_source, **kwargs):
    """As it is written for TRL: lists by name, further columns of the data, one number each."""
    assert len(prompts) == len(completions) == len(data_source)
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [ord((text or " ")[0]) % 7 / 10 for text in texts]
'''

MADE_SMALL = ["resources.num_threads=1", "reward.num_workers=1", "trainer.preflight=false"]


@pytest.fixture
def verl_script(tmp_path: Path, project: Project) -> Path:
    (project.folder / "move_in_reward.py").write_text(VERL_REWARD)
    path = tmp_path / "run_grpo.sh"
    settings = " \\\n  ".join(NOTHING)
    path.write_text(f"{LINE.format(folder=project.folder)} \\\n  {settings} $@\n")
    return path


def test_a_verl_project_moves_in_and_trains_with_its_own_reward(verl_script: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "grpo.yaml", tmp_path / "run"
    result = cli("migrate", "verl", verl_script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0)
    trained = cli("train", "--config", out, "--out", run, *MADE_SMALL)
    assert trained.code == 0, trained.err
    with RunFolder.open(run, read_only=True) as folder:
        scores = [row["score"] for row in folder.samples.read(1)]
    assert len(scores) == 4
    # `bonus` arrived: every score is a tenth between 0 and 0.6, and a quarter.
    assert all(round((score - 0.25) * 10, 6) in range(7) for score in scores)


def test_every_key_of_the_script_has_a_line_with_a_reason(verl_script: Path) -> None:
    result = cli("migrate", "verl", verl_script)
    keys = re.findall(r"(?:^|[\s+])([a-z_]+(?:\.[a-z_]+)+)=", verl_script.read_text())
    assert len(keys) > 65
    for key in keys:
        (line,) = [line for line in result.out.splitlines() if line.startswith(f"  {key}=")]
        assert len(line.split()) > 1, line
    for setting in NOTHING:
        key = setting.partition("=")[0]
        assert key in result.out.partition("not needed")[2], key


def test_a_trl_project_moves_in_and_trains_with_its_own_reward(tmp_path: Path, project: Project) -> None:
    (tmp_path / "trl_reward.py").write_text(TRL_REWARD)
    script, out, run = tmp_path / "train_grpo.py", tmp_path / "grpo.yaml", tmp_path / "run"
    script.write_text(TRL_SCRIPT.format(folder=project.folder))
    result = cli("migrate", "trl", script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert result.record["refused"] == 0, result.out
    trained = cli("train", "--config", out, "--out", run, *MADE_SMALL, "data.max_prompt_tokens=32")
    assert trained.code == 0, trained.err


OPENRLHF_SCRIPT = """\
#!/bin/bash
MODEL_PATH={folder}/model
ARGS=(
   --pretrain $MODEL_PATH
   --remote_rm_url {here}/reward_func.py
   --prompt_data {here}/train.jsonl
   --input_key question --label_key answer --apply_chat_template
   --prompt_max_len 32 --generate_max_len 4
   --rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 --micro_train_batch_size 4
   --advantage_estimator reinforce_baseline --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k2
   --actor_learning_rate 5e-6 --eps_clip_low_high 0.2 0.27 --num_episodes 1 --max_epochs 1
   --actor_num_nodes 1 --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --vllm_num_engines 1
   --colocate_all_models --vllm_enable_sleep --packing_samples --gradient_checkpointing --bf16 --zero_stage 3
   --save_path {here}/ckpt --load_checkpoint --save_steps -1 --logging_steps 1
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray ${{ARGS[@]}}
"""

OPENRLHF_REWARD = '''\
import torch


def reward_func(queries, prompts, labels, **kwargs):
    """As it is written for OpenRLHF: whole sequences as text, tensors in return."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        assert query.startswith(prompt) and prompt.startswith("<|user|>") and label.isdigit(), (query, prompt, label)
        rewards.append(len(query[len(prompt):]) % 7 / 10)
    rewards = torch.tensor(rewards, dtype=torch.float)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"labels_seen": rewards * 0 + len(labels)}}
'''


def test_an_openrlhf_project_moves_in_and_trains_with_its_own_reward(
    tmp_path: Path, project: Project
) -> None:
    (tmp_path / "reward_func.py").write_text(OPENRLHF_REWARD)
    rows = [{"question": f"{n} + 2 = ?", "answer": str(n + 2)} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script, out, run = tmp_path / "train.sh", tmp_path / "reinforce.yaml", tmp_path / "run"
    script.write_text(OPENRLHF_SCRIPT.format(folder=project.folder, here=tmp_path))
    result = cli("migrate", "openrlhf", script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0)
    trained = cli(
        "train",
        "--config",
        out,
        "--out",
        run,
        *MADE_SMALL,
        "model.dtype=float32",
        "reward.max_memory_gib=null",
    )
    assert trained.code == 0, trained.err
    with RunFolder.open(run, read_only=True) as folder:
        samples = [row for step in (1, 2) for row in folder.samples.read(step)]
    assert len(samples) == 8
    assert all(0 <= row["score"] <= 0.6 for row in samples)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["reward/labels_seen/mean"] for line in metrics if "reward/labels_seen/mean" in line} == {1}
