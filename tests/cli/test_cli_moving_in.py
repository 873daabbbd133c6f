"""Projects of verl, TRL and OpenRLHF move in: their scripts are migrated, and the result trains for a step."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cli_calls import Project, cli
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.agents import agents
from strop.compat.migrate import engines
from strop.run import RunFolder

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

# Every key of a long launch line, in the sizes of a toy.


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine takes over, whether or not this machine has vLLM, which has no attention for heads of 16."""
    monkeypatch.setattr(engines, "_is_installed", lambda name: False)


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


PPO_SCRIPT = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

training_args = PPOConfig(
    output_dir="out", learning_rate=3e-6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    num_mini_batches=1, num_ppo_epochs=2, total_episodes=4, response_length=4, stop_token="eos", temperature=0.7,
    missing_eos_penalty=1.0, kl_coef=0.1, kl_estimator="k3", cliprange=0.15, cliprange_value=0.25, vf_coef=0.1,
    gamma=1.0, lam=0.9, whiten_rewards=False, local_rollout_forward_batch_size=1, num_sample_generations=0,
    report_to="none", bf16=False, seed=3, sft_model_path="{folder}/model", reward_model_path="{here}/scores",
)
tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
rows = load_dataset("parquet", data_files="{folder}/data/train.parquet", split="train")
rows = rows.map(lambda row: {{"input_ids": tokenizer.apply_chat_template(row["prompt"])}})
trainer = PPOTrainer(
    args=training_args, processing_class=tokenizer, model=policy, ref_model=ref_policy, reward_model=reward_model,
    value_model=value_model, train_dataset=rows, eval_dataset=None,
)
trainer.train()
"""


def make_scores(model: Path, folder: Path) -> None:
    """The project's model with a head of one label, as a reward model and a start for the critic."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id or 0
    )
    with torch.no_grad():
        classifier.score.weight.normal_(generator=torch.Generator().manual_seed(5))
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_ppo_project_of_trl_moves_in_and_trains_policy_and_critic(tmp_path: Path, project: Project) -> None:
    make_scores(project.model, tmp_path / "scores")
    script, out, run = tmp_path / "train_ppo.py", tmp_path / "ppo.yaml", tmp_path / "run"
    script.write_text(PPO_SCRIPT.format(folder=project.folder, here=tmp_path))
    result = cli("migrate", "trl", script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0)
    small = [*MADE_SMALL, "data.max_prompt_tokens=32"]
    trained = cli("train", "--config", out, "--out", run, *small)
    assert trained.code == 0, trained.err
    with RunFolder.open(run, read_only=True) as folder:
        samples = folder.samples.read(1)
    assert len(samples) == 4
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (step,) = [
        line for line in lines if "critic/vf_loss" in line or "critic/vf_clipfrac" in line
    ]  # 4 episodes are one
    assert step["critic/rewards/mean"] != 0
    assert step["actor/grad_norm"] > 0


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


@pytest.mark.slow
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
    together = [line["reward/labels_seen/mean"] for line in metrics if "reward/labels_seen/mean" in line]
    assert len(together) == 2
    assert all(1 <= count <= 4 for count in together), "how many answers wait for a call hangs on the machine"


OPENRLHF_AGENT = """\
from typing import Any, Dict

import torch
from strop.agents import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        self.step_idx = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = self.step_idx == 2
        reward = torch.tensor(len(states["action_text"]) / 10 if done else 0.0)
        feedback = "" if done else "\\n<|user|>more\\n<|assistant|>"
        return {
            "rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"label_is_digit": torch.tensor(float(states["label"].isdigit()))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_an_agent_of_openrlhf_moves_in_and_scores_its_episodes(tmp_path: Path, project: Project) -> None:
    """With the flags that have dots."""
    (tmp_path / "agent_func.py").write_text(OPENRLHF_AGENT)
    rows = [{"question": f"{n} + 2 = ?", "answer": str(n + 2)} for n in range(2)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script, out, run = tmp_path / "train.sh", tmp_path / "agent.yaml", tmp_path / "run"
    script.write_text(
        f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {project.model} "
        f"--data.prompt_dataset {tmp_path}/train.jsonl --data.input_key question --data.label_key answer "
        f"--train.agent_func_path {tmp_path}/agent_func.py --data.apply_chat_template --data.max_len 64 "
        f"--rollout.max_new_tokens 24 --rollout.batch_size 2 --rollout.n_samples_per_prompt 2 --train.batch_size 4 "
        f"--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0 --actor.num_gpus_per_node 1"
    )
    result = cli("migrate", "openrlhf", script, "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0)
    trained = cli("train", "--config", out, "--out", run, *MADE_SMALL, "model.dtype=float32")
    assert trained.code == 0, trained.err
    with RunFolder.open(run, read_only=True) as folder:
        samples = folder.samples.read(1)
    assert len(samples) == 4
    for sample in samples:
        assert sample["reward_parts"]["label_is_digit"] == 1.0
        assert sample["score"] >= 0
        assert "<|user|>more" in sample["response"] or sample["stop_reason"] == "length"
    assert {sample["num_turns"] for sample in samples} <= {2, 4}


# A project of mid-2025 with everything of its own: a tool, a file of tools, a loop, a file of loops, a reward function.
# What it imports from verl comes from strop.agents here; nothing else is changed.
OWN_TOOL = '''\
from typing import Any, Optional
from uuid import uuid4

from strop.agents import BaseTool, OpenAIFunctionToolSchema


class LetterTool(BaseTool):
    """Gives a letter of the word that the row brings."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._words = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs) -> str:
        assert ground_truth, kwargs
        instance_id = instance_id or str(uuid4())
        self._words[instance_id] = ground_truth
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[str, float, dict]:
        word, place = self._words[instance_id], int(parameters["place"])
        return word[place % len(word)] * self.config["times"], 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._words[instance_id]
'''

OWN_TOOLS = """\
tools:
  - class_name: {module}.LetterTool
    config: {{times: 2, type: native}}
    tool_schema:
      type: function
      function:
        name: letter
        description: A letter of the word.
        parameters:
          type: object
          properties: {{place: {{type: integer, description: "which one, from 0"}}}}
          required: [place]
"""

OWN_LOOP = '''\
from strop.agents import AgentLoopBase, AgentLoopOutput, initialize_tools_from_config, register, simple_timer


@register("hinted")
class HintedLoop(AgentLoopBase):
    """Answers, is given a letter, and answers again."""

    @classmethod
    def init_class(cls, config, tokenizer):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        rollout = config.actor_rollout_ref.rollout
        cls.limit = rollout.response_length
        cls.turns = rollout.multi_turn.max_assistant_turns
        cls.tools = {tool.name: tool for tool in initialize_tools_from_config(rollout.multi_turn.tool_config_path)}

    def __init__(self, config, server_manager, tokenizer):
        super().__init__(config, server_manager, tokenizer)

    async def run(self, messages, sampling_params):
        metrics = {}
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        token_ids, mask = list(prompt_ids), []
        for turn in range(self.turns):
            with simple_timer("generate_sequences", metrics):
                answer = await self.server_manager.generate(
                    request_id="one", prompt_ids=token_ids, sampling_params={**sampling_params, "max_tokens": 4}
                )
            token_ids += answer
            mask += [1] * len(answer)
            if turn + 1 == self.turns:
                break
            tool = self.tools["letter"]
            instance = await tool.create(ground_truth="xyz")
            text, _, _ = await tool.execute(instance, {"place": turn})
            await tool.release(instance)
            hint = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            token_ids += hint
            mask += [0] * len(hint)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=token_ids[len(prompt_ids) :][: self.limit],
            response_mask=mask[: self.limit],
            num_turns=2 * self.turns,
            metrics=metrics,
        )
'''

OWN_SCRIPT = """\
set -x
PROJECT={folder}
python3 -m verl.trainer.main_ppo \\
  --config-path="$PROJECT/config" --config-name='ppo_trainer' \\
  algorithm.adv_estimator=grpo data.train_batch_size=2 data.max_prompt_length=32 data.max_response_length=12 \\
  data.filter_overlong_prompts=True data.truncation='error' data.return_raw_chat=True \\
  data.train_files=$PROJECT/train.parquet data.val_files=$PROJECT/train.parquet \\
  actor_rollout_ref.model.path={model} actor_rollout_ref.model.use_remove_padding=True \\
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.grad_clip=0.5 \\
  actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.format=hermes \\
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 \\
  actor_rollout_ref.rollout.multi_turn.tool_config_path=$PROJECT/config/tools.yaml \\
  actor_rollout_ref.rollout.agent.agent_loop_config_path=$PROJECT/config/loops.yaml \\
  custom_reward_function.path=$PROJECT/reward.py custom_reward_function.name=graded \\
  trainer.logger=['console'] trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.device=cpu trainer.save_freq=-1 \\
  trainer.test_freq=-1 trainer.val_before_train=False trainer.total_training_steps=2 trainer.total_epochs=1 $@
"""

OWN_REWARD = """\
def graded(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "own/letters" and extra_info["index"] >= 0
    return 1.0 if ground_truth in solution_str else ord((solution_str or " ")[0]) % 7 / 10
"""


def own_row(index: int) -> dict[str, Any]:
    """As of mid-2025: who plays the row, and what its tools are made with."""
    kwargs = {"letter": {"create_kwargs": {"ground_truth": "abc"}}}
    return {
        "data_source": "own/letters",
        "prompt": [{"role": "user", "content": f"word {index}"}],
        "ability": "letters",
        "reward_model": {"style": "rule", "ground_truth": "q"},
        "agent_name": "hinted" if index % 2 else "tool_agent",
        "extra_info": {"index": index, "need_tools_kwargs": True, "tools_kwargs": kwargs},
    }


@pytest.fixture
def registered() -> Iterator[None]:
    """The registry of agents, as it was before at the end."""
    before = dict(agents)
    yield
    agents.clear()
    agents.update(before)


@pytest.mark.usefixtures("registered")
def test_a_verl_project_with_its_own_tool_and_loop_moves_in(
    tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "own_letters"
    folder, out, run = tmp_path / "project", tmp_path / "own.yaml", tmp_path / "run"
    (folder / "config").mkdir(parents=True)
    (folder / f"{module}.py").write_text(OWN_TOOL)
    (folder / f"{module}_loop.py").write_text(OWN_LOOP)
    (folder / "reward.py").write_text(OWN_REWARD)
    (folder / "config" / "tools.yaml").write_text(OWN_TOOLS.format(module=module))
    loops = f"- name: hinted\n  _target_: {module}_loop.HintedLoop\n"
    (folder / "config" / "loops.yaml").write_text(loops)
    pq.write_table(pa.Table.from_pylist([own_row(index) for index in range(4)]), folder / "train.parquet")
    (folder / "run.sh").write_text(OWN_SCRIPT.format(folder=folder, model=project.model))
    monkeypatch.syspath_prepend(str(folder))
    result = cli("migrate", "verl", folder / "run.sh", "-o", out, "--json")
    assert result.code == 0, result.err
    assert (result.record["refused"], result.record["unknown"], result.record["unresolved"]) == (0, 0, 0)
    trained = cli("train", "--config", out, "--out", run, *MADE_SMALL)
    assert trained.code == 0, trained.err
    with RunFolder.open(run, read_only=True) as opened:
        samples = [row for step in (1, 2) for row in opened.samples.read(step)]
    by_player = Counter(row["agent_name"] for row in samples)
    assert by_player == {"hinted": 4, "tool_agent": 4}
    for row in samples:
        given = [
            token
            for token, is_sampled in zip(row["response_ids"], row["response_mask"], strict=True)
            if not is_sampled
        ]
        # The loop made the tool, whose answer is two letters that nobody trains.
        assert len(given) == (2 if row["agent_name"] == "hinted" else 0)
        assert row["agent_name"] != "hinted" or "xx" in row["response"]
        assert row["data_source"] == "own/letters"
    settings = result.record["config"]
    assert settings["actor"]["optim"]["max_grad_norm"] == 0.5
    assert (settings["agent"]["tool_format"], settings["agent"]["max_assistant_turns"]) == ("hermes", 2)
