"""`strop migrate`: tables, written configurations, exit codes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.config import load_config
from strop.trainer.config import Config

COMMAND_LINE = """\
set -x
python -m verl.trainer.main_ppo \\
  algorithm.adv_estimator=grpo \\
  data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet \\
  data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \\
  data.filter_overlong_prompts=True data.truncation=error \\
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.model.enable_gradient_checkpointing=True \\
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \\
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
  actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 actor_rollout_ref.ref.fsdp_config.param_offload=True \\
  algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \\
  trainer.project_name=demo trainer.experiment_name=run1 trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
  trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""

TRL_SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from reward import compute_score

trainer = GRPOTrainer(
    model="models/qwen",
    reward_funcs=compute_score,
    train_dataset=load_dataset("parquet", data_files="train.parquet", split="train"),
    args=GRPOConfig(per_device_train_batch_size=8, num_generations=4, learning_rate=5e-6, max_steps=20,
                    max_completion_length=64, bf16=False, logging_steps=1, use_vllm=True),
)
trainer.train()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(COMMAND_LINE)
    return path


def test_the_command_line_people_type_becomes_a_configuration_that_loads(
    script: Path, tmp_path: Path, project: Project
) -> None:
    out = tmp_path / "grpo.yaml"
    result = cli("migrate", "verl", script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["unknown"], result.record["unresolved"], result.record["refused"]) == (0, 0, 0)
    config = load_config(
        Config,
        source=out,
        overrides=[
            f"model.path={project.model}",
            f"data.train_files=[{project.data('train')}]",
            f"data.val_files=[{project.data('val')}]",
        ],
    )
    assert config.arithmetic().startswith(
        "1024 prompts x 5 samples = 5120 samples/step -> 4 optimizer steps of 1280, at most 49152 tokens"
    )
    assert config.model.gradient_checkpointing
    assert config.algorithm.use_kl_loss
    assert (config.algorithm.kl_loss_coef, config.actor.optim.lr) == (0.001, 1e-6)
    assert (config.resources.ranks, config.resources.runtime) == (8, "ray")
    assert config.resources.offload_idle
    assert config.reference.engine.max_tokens_per_device == 40 * 1536
    assert (config.trainer.num_epochs, config.eval.every, config.run.save_every) == (15, 5, 20)


def test_every_key_of_the_command_line_stands_in_the_table(script: Path) -> None:
    result = cli("migrate", "verl", script)
    keys = [part.split("=")[0] for part in COMMAND_LINE.split() if "=" in part and part[0].isalpha()]
    assert len(keys) > 35
    for key in keys:
        assert f"  {key}=" in result.out, key


def test_an_unknown_key_ends_with_2_and_writes_nothing_unless_told(script: Path, tmp_path: Path) -> None:
    script.write_text(COMMAND_LINE.rstrip() + " \\\n  actor_rollout_ref.actor.optim.lrr=2\n")
    out = tmp_path / "grpo.yaml"
    result = cli("migrate", "verl", script, "-o", out)
    assert result.code == 2
    assert "optim.lrr: the nearest known key is actor_rollout_ref.actor.optim.lr" in result.err
    assert "is not written; --keep-going writes it all the same" in result.sentence
    assert not out.exists()
    assert cli("migrate", "verl", script, "-o", out, "--keep-going").code == 0
    assert out.exists()


def test_a_configuration_that_does_not_load_says_why(script: Path, tmp_path: Path) -> None:
    script.write_text(COMMAND_LINE.replace("rollout.n=5", "rollout.n=1"))
    result = cli("migrate", "verl", script)
    assert result.code == 2
    assert "the configuration does not load yet" in result.err
    assert "samples_per_prompt" in result.err


def test_values_of_variables_come_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(COMMAND_LINE.replace("Qwen/Qwen2.5-0.5B-Instruct", "$MODEL"))
    assert cli("migrate", "verl", script).code == 2
    result = cli("migrate", "verl", script, "--set", "MODEL=models/qwen", "--json")
    assert result.code == 0
    assert result.record["config"]["model"]["path"] == "models/qwen"
    assert "--set 'MODEL' is no NAME=VALUE" in cli("migrate", "verl", script, "--set", "MODEL").sentence


def test_a_trl_script_becomes_a_configuration_that_loads(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "grpo.yaml"
    script.write_text(TRL_SCRIPT)
    result = cli("migrate", "trl", script, "-o", out, "--processes", 2, "--json")
    assert result.code == 0, result.err
    config = load_config(Config, source=out)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (4, 4)
    assert config.actor.optim.lr == 5e-6
    assert config.reward.path == str(tmp_path / "reward.py")
    assert config.resources.ranks == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["verl", "missing.sh"], "there is no file missing.sh: name the script"),
        (["trl", __file__, __file__], "a TRL training is one script; 2 files were given"),
        (["ours", "a.py"], "invalid choice: 'ours'"),
    ],
)
def test_what_cannot_be_migrated_has_its_sentence(words: list[str], sentence: str) -> None:
    assert sentence in cli("migrate", *words).sentence


@pytest.mark.slow
def test_a_script_that_validates_alone_becomes_a_command_that_does(project: Project, tmp_path: Path) -> None:
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    script = tmp_path / "validate.sh"
    script.write_text(
        f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files={project.data('train')} "
        f"data.val_files={project.data('val')} data.max_prompt_length=32 data.max_response_length=6 "
        f"data.train_batch_size=8 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=8 "
        f"actor_rollout_ref.model.path={project.model} {kwargs}.do_sample=True {kwargs}.temperature=1.0 {kwargs}.n=2 "
        f"{kwargs}.top_k=1 custom_reward_function.path={project.folder / 'reward.py'} trainer.n_gpus_per_node=1 "
        f"trainer.nnodes=1 trainer.total_epochs=1 trainer.val_only=True trainer.logger=console\n"
    )
    made = cli("migrate", "verl", script, "-o", tmp_path / "made.yaml")
    assert made.code == 0, made.err
    command = made.out.splitlines()[-1].partition("validate with: strop ")[2]
    assert command == f"eval --config {tmp_path / 'made.yaml'}"

    def answers(*words: str) -> dict[str, list[str]]:
        out = tmp_path / "answers.jsonl"
        result = cli(*shlex.split(command), *words, "--out", out, "resources.num_threads=1")
        assert result.code == 0, result.err
        found: dict[str, list[str]] = {}
        for line in out.read_text().splitlines():
            one = json.loads(line)
            found.setdefault(json.dumps(one["prompt"]), []).append(one["response"])
        return found

    # Of the one most likely token, samples at a temperature of 1 are the greedy answer; of all tokens, they are not.
    greedy = answers("eval.temperature=0", "eval.samples_per_prompt=1")
    assert answers() == {prompt: one * 2 for prompt, one in greedy.items()}
    assert answers("eval.top_k=0", "eval.top_p=1e-6") == {prompt: one * 2 for prompt, one in greedy.items()}
    assert answers("eval.top_k=0") != {prompt: one * 2 for prompt, one in greedy.items()}
    assert "is a file of settings: say --config" in cli("eval", tmp_path / "made.yaml").sentence
    assert (
        "--step best chooses a checkpoint of a run: name the run"
        in cli(*command.split(), "--step", "best").sentence
    )


def test_the_command_takes_the_engine_behind_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=models/qwen data.train_files=d.parquet "
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.7"
    )
    made = cli("migrate", "verl", tmp_path / "run.sh", "--out", tmp_path / "run.yaml", "rollout.engine=vllm")
    assert made.code == 0, made.err
    shown = cli("config", "show", "--config", tmp_path / "run.yaml")
    assert "engine: vllm" in shown.out
    assert "gpu_memory_utilization: 0.7" in shown.out
