from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import Migration, migrate_trl, read_calls

SCRIPT = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from my_rewards import accuracy

MODEL = "/models/qwen"
dataset = load_dataset("json", data_files="train.jsonl", split="train")

args = GRPOConfig({arguments})
trainer = GRPOTrainer({trainer})
trainer.train()
"""
TRAINER = "model=MODEL, reward_funcs=accuracy, args=args, train_dataset=dataset"


def migrate(tmp_path: Path, arguments: str, trainer: str = TRAINER, *, processes: int = 1) -> Migration:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(arguments=arguments, trainer=trainer))
    script = read_calls(path)
    return migrate_trl(script.found, script.kind, processes=processes)


def ours(migration: Migration) -> dict[str, Any]:
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def status(migration: Migration, key: str) -> tuple[str, str]:
    (row,) = [row for row in migration.rows if row.key == key]
    return row.outcome.status, row.outcome.note


@pytest.mark.parametrize(
    ("train", "held_out", "told_apart"),
    [
        (
            "dataset.train_test_split(0.1)['train']",
            "dataset.train_test_split(0.1)['test']",
            "train_test_split",
        ),
        ("dataset.select(range(9, 99))", "dataset.select(range(9))", "select"),
        ("dataset.map(str)", "dataset", ""),
    ],
)
def test_rows_that_a_script_holds_out_are_never_those_of_training(
    tmp_path: Path, train: str, held_out: str, told_apart: str
) -> None:
    """Where the same rows are named twice, that is the user's word."""
    trainer = TRAINER.replace("train_dataset=dataset", f"train_dataset={train}, eval_dataset={held_out}")
    migration = migrate(tmp_path, "eval_strategy='steps', eval_steps=5", trainer)
    found, note = status(migration, "GRPOTrainer.eval_dataset")
    assert ours(migration)["data.train_files"] == ["train.jsonl"]
    assert found == ("refused" if told_apart else "translated")
    assert f"has the rows of training too, which {told_apart} tells apart there" in note or not told_apart


@pytest.mark.parametrize(
    ("arguments", "processes", "expected"),
    [
        # 16 samples x 4 accumulated on 2 processes = 128 samples, 8 of each of 16 prompts, one optimizer step.
        (
            "per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=8",
            2,
            {"data.prompts_per_step": 16, "actor.samples_per_update": 128, "rollout.samples_per_prompt": 8,
             "resources.ranks": 2},
        ),
        # 8 samples x 4 generated at once, in optimizer steps of 8: four of them, twice over.
        (
            "steps_per_generation=4, num_generations=4, num_iterations=2, max_steps=80, save_steps=16",
            1,
            {"data.prompts_per_step": 8, "actor.samples_per_update": 8, "actor.epochs": 2,
             "trainer.max_steps": 10, "run.save_every": 2},
        ),
        ("learning_rate=2e-6, max_steps=100, warmup_ratio=0.1, lr_scheduler_type='cosine'", 1,
         {"actor.optim.lr": 2e-6, "actor.optim.warmup_steps": 10, "actor.optim.schedule": "cosine"}),
        ("warmup_ratio=0.1", 1, {"actor.optim.warmup_share": 0.1}),
        ("", 1, {"actor.optim.schedule": "linear", "actor.optim.weight_decay": 0.0, "trainer.num_epochs": 3,
                 "data.max_response_tokens": 256, "algorithm.clip_ratio_c": float("inf"), "eval.every": 0}),
        ("max_completion_length=32768, beta=0.1", 1,
         {"data.max_response_tokens": 32768, "actor.engine.max_tokens_per_device": 33280,
          "reference.engine.max_tokens_per_device": 33280}),
        ("max_completion_length=1024", 1, {"actor.engine.max_tokens_per_device": None}),
        ("loss_type='dr_grpo', max_completion_length=300, scale_rewards='none'", 1,
         {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.loss_scale_factor": 300,
          "algorithm.norm_adv_by_std": False}),
        # TRL bounds the weight by 5, which is 4 above 1, and not from below.
        ("loss_type='cispo', epsilon_high=5.0", 1,
         {"algorithm.policy_loss": "cispo", "algorithm.clip_ratio_low": 1.0, "algorithm.clip_ratio_high": 4.0}),
        ("importance_sampling_level='sequence', epsilon=3e-4, delta=4.0", 1,
         {"algorithm.policy_loss": "gspo", "algorithm.clip_ratio": 3e-4, "algorithm.clip_ratio_c": 4.0}),
        ("", 1, {"model.gradient_checkpointing": True, "algorithm.loss_agg_mode": "token-mean"}),
        # It validates as it trains: 8 sampled answers.
        ("eval_strategy='steps', eval_steps=5, temperature=0.9", 1,
         {"eval.samples_per_prompt": 8, "eval.temperature": 0.9, "eval.every": 5}),
        ("use_vllm=True", 1, {"algorithm.correction.weights": "sequence", "algorithm.correction.mode": "mask",
                              "algorithm.correction.upper": 3.0}),
        ("scale_rewards='mean'", 1, {"algorithm.adv_estimator": "maxrl"}),
        ("shuffle_dataset=False", 1, {"data.sampler": "in_order"}),
        ("beta=0.04", 1, {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.04}),
        ("bf16=True, seed=7, report_to=['wandb', 'tensorboard']", 1,
         {"model.dtype": "bfloat16", "trainer.seed": 7, "trainer.trackers": ["console", "jsonl", "tensorboard"]}),
    ],
)  # fmt: skip
def test_what_arguments_become(
    tmp_path: Path, arguments: str, processes: int, expected: dict[str, Any]
) -> None:
    found = ours(migrate(tmp_path, arguments, processes=processes))
    assert {key: found.get(key) for key in expected} == expected


def test_the_trainers_own_arguments(tmp_path: Path) -> None:
    found = ours(
        migrate(
            tmp_path,
            "num_generations=8",
            TRAINER + ", peft_config=LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')",
        )
    )
    assert found["model.path"] == "/models/qwen"
    assert found["data.train_files"] == ["train.jsonl"]
    assert found["reward.path"] == str(tmp_path / "my_rewards.py")
    assert found["reward.name"] == "accuracy"
    assert found["data.ground_truth_key"] is None
    assert found["model.lora.rank"] == 16
    assert found["model.lora.target_modules"] == ["all-linear"]


def test_arguments_by_position(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, "", "MODEL, accuracy, args, dataset"))
    assert (found["model.path"], found["reward.name"]) == ("/models/qwen", "accuracy")


def test_a_dataset_that_is_changed_or_lies_on_a_hub_is_said(tmp_path: Path) -> None:
    changed = migrate(
        tmp_path, "", TRAINER.replace("train_dataset=dataset", "train_dataset=dataset.map(f).shuffle()")
    )
    assert "its rows go through map there" in status(changed, "GRPOTrainer.train_dataset")[1]
    hub = TRAINER.replace("dataset=dataset", "dataset=load_dataset('a/b', 'main', split='train')")
    assert ours(migrate(tmp_path, "", hub))["data.train_files"] == ["hub:a/b:main@train"]
    part = hub.replace("split='train'", "split='train[:9]'")
    assert status(migrate(tmp_path, "", part), "GRPOTrainer.train_dataset") == (
        "refused", "a/b, split train[:9]: write it to a file (.parquet) and set data.train_files",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("load_dataset('json', data_files='t.jsonl', split='train[:90%]')", "t.jsonl, split train[:90%]"),
        ("load_dataset('t.parquet', split='train[90%:]')", "t.parquet, split train[90%:]"),
    ],
)
def test_a_part_of_the_rows_of_a_file_is_not_the_whole_file(tmp_path: Path, call: str, place: str) -> None:
    migration = migrate(tmp_path, "", TRAINER.replace("train_dataset=dataset", f"train_dataset={call}"))
    said, note = status(migration, "GRPOTrainer.train_dataset")
    assert said == "refused"
    assert note.startswith(f"{place}: write it to a file")


def test_a_data_set_that_is_assigned_again_is_followed_to_where_it_is_loaded(tmp_path: Path) -> None:
    lines = "ds = load_dataset('openai/gsm8k', 'main', split='train')\nds = ds.map(f)\n"
    trainer = "GRPOTrainer(model='m', reward_funcs=accuracy, args=GRPOConfig(), train_dataset=ds)\n"
    path = tmp_path / "train.py"
    path.write_text(f"from my_rewards import accuracy\n{lines}{trainer}")
    migration = migrate_trl(read_calls(path).found, "GRPO")
    assert ours(migration)["data.train_files"] == ["hub:openai/gsm8k:main@train"]
    assert "go through map there" in status(migration, "GRPOTrainer.train_dataset")[1]
    path.write_text(f"from my_rewards import accuracy\nif small:\n    ds = f()\n{lines}{trainer}")
    (row,) = migrate_trl(read_calls(path).found, "GRPO").open_rows
    assert row.outcome.note == (
        "ds is no literal value, so what it says is left out: write load_dataset(...) with the values themselves, "
        "or set data.train_files"
    )


def test_what_is_no_literal_is_reported_as_it_is_written(tmp_path: Path) -> None:
    migration = migrate(tmp_path, "learning_rate=compute(), bf16=torch.cuda.is_available(), **more")
    assert [(row.key, row.value) for row in migration.open_rows] == [
        ("GRPOConfig.learning_rate", "compute()"),
        ("GRPOConfig.bf16", "torch.cuda.is_available()"),
        ("GRPOConfig.**", "more"),
    ]


def test_an_unknown_argument_names_the_nearest_one(tmp_path: Path) -> None:
    migration = migrate(tmp_path, "learning_rat=1e-6")
    assert status(migration, "GRPOConfig.learning_rat") == (
        "unknown", "the nearest known key is GRPOConfig.learning_rate",
    )  # fmt: skip


def test_a_reward_in_the_script_itself_is_taken_only_where_loading_it_trains_nothing(tmp_path: Path) -> None:
    body = "def score(completions, **kwargs):\n    return [1.0]\n"
    train = "GRPOTrainer(model='m', reward_funcs=[score], args=GRPOConfig()).train()"
    for text, expected in (
        (f"{body}{train}\n", "refused"),
        (f"{body}if __name__ == '__main__':\n    {train}\n", "translated"),
        (f"{body}def main():\n    {train}\nmain()\n", "refused"),
        (f"{body}def main():\n    {train}\nif __name__ == '__main__':\n    main()\n", "translated"),
        (f"from trl import GRPOTrainer\n{body}if __name__ == '__main__':\n    {train}\n", "refused"),
    ):
        path = tmp_path / "own.py"
        path.write_text(text)
        script = read_calls(path)
        migration = migrate_trl(script.found, script.kind)
        assert status(migration, "GRPOTrainer.reward_funcs")[0] == expected, text


def several_rewards(tmp_path: Path, config: str, before: str = "") -> Migration:
    path = tmp_path / "several.py"
    path.write_text(
        f"{before}"
        "def short(completions, **kwargs):\n    return [0.5]\n"
        "def right(completions, **kwargs):\n    return [1.0]\n"
        "if __name__ == '__main__':\n"
        f"    GRPOTrainer(model='m', reward_funcs=[short, right], args=GRPOConfig({config})).train()\n"
    )
    script = read_calls(path)
    return migrate_trl(script.found, script.kind)


def test_several_rewards_keep_their_weights(tmp_path: Path) -> None:
    for config, weights in (("", [1.0, 1.0]), ("reward_weights=[0.25, 2.0]", [0.25, 2.0])):
        functions = ours(several_rewards(tmp_path, config))["reward.functions"]
        assert [(one["name"], one["weight"]) for one in functions] == [
            ("short", weights[0]), ("right", weights[1]),
        ]  # fmt: skip
        assert {Path(one["path"]).name for one in functions} == {"several.py"}


def test_rewards_of_a_script_that_needs_trl_are_moved_out_of_it(tmp_path: Path) -> None:
    before = "from trl import GRPOConfig, GRPOTrainer\n"
    state, note = status(
        several_rewards(tmp_path, "reward_weights=[0.5, 2]", before), "GRPOTrainer.reward_funcs"
    )
    assert state == "refused"
    assert (
        "several.py needs trl, which it imports: move short, right into another file and name them in" in note
    )
    assert "[{path: FILE, name: short, weight: 0.5}, {path: FILE, name: right, weight: 2}]" in note


def test_weights_that_do_not_match_the_rewards_are_not_guessed(tmp_path: Path) -> None:
    migration = several_rewards(tmp_path, "reward_weights=[1.0]")
    state, note = status(migration, "GRPOTrainer.reward_funcs")
    assert state != "translated"
    assert "2 rewards, and 1 reward_weights" in note


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    path = tmp_path / "train.py"
    path.write_text(
        f"open({str(witness)!r}, 'w')\nfrom trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer(model='m', args=SFTConfig(max_length=900, packing=True))\n"
    )
    script = read_calls(path)
    assert script.kind == "SFT"
    found = ours(migrate_trl(script.found, script.kind))
    assert (found["sft.data.max_tokens"], found["sft.data.truncation"]) == (900, "right")
    assert found["sft.examples_per_update"] == 8
    assert found["sft.optim.lr"] == 2e-5
    assert not witness.exists()


def test_rloo_takes_its_kl_off_the_reward(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from trl import RLOOConfig, RLOOTrainer\nfrom r import f\n"
        "RLOOTrainer(model='m', reward_funcs=f, args=RLOOConfig(num_generations=4))\n"
    )
    script = read_calls(path)
    found = ours(migrate_trl(script.found, script.kind))
    assert found["algorithm.adv_estimator"] == "rloo"
    assert found["algorithm.use_kl_in_reward"] is True
    assert found["algorithm.kl_ctrl.kl_coef"] == 0.05
    assert found["data.prompts_per_step"] == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(:\n", "line 1 is not Python"),
        ("print(1)\n", "makes no trainer that strop knows: known are GRPOTrainer"),
        (
            "from trl import ORPOTrainer\nORPOTrainer()\n",
            "it uses ORPOTrainer, which is not translated: write `strop dpo` with prefer.loss=orpo",
        ),
        (
            "from trl.experimental.gkd import GKDConfig, GKDTrainer\nGKDTrainer(args=GKDConfig(lmbda=0.0))\n",
            "with lmbda=0 and beta=0, on fixed answers, `strop generate --top-logprobs` and `strop sft`",
        ),
        (
            "BCOTrainer()\n",
            "it uses BCOTrainer, which is not translated: there is no counterpart here; known are",
        ),
        ("SFTConfig()\nGRPOConfig()\n", "trains in several ways (GRPO, SFT)"),
    ],
)
def test_a_script_that_cannot_be_migrated_has_its_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_calls(path)
    assert sentence in str(error.value)


def fine_tuning(folder: Path, arguments: str) -> tuple[dict[str, Any], Migration]:
    path = folder / "train.py"
    path.write_text(
        f"from trl import SFTConfig, SFTTrainer\nSFTTrainer(model='m', args=SFTConfig({arguments}))\n"
    )
    script = read_calls(path)
    migration = migrate_trl(script.found, script.kind)
    return ours(migration), migration


def test_fine_tuning_takes_templates_and_revisions_over(tmp_path: Path) -> None:
    found, _ = fine_tuning(
        tmp_path, "chat_template_path='chat.jinja', use_liger=True, model_init_kwargs={'revision': 'v2'}"
    )
    assert (found["model.chat_template"], found["model.use_liger"], found["model.revision"]) == (
        "chat.jinja", True, "v2",
    )  # fmt: skip
    for name, outcome in {
        "eager": ("translated", ""), "flash_attention_2": ("not needed", "FlashAttention's kernel"),
        "flex_attention": ("refused", "sdpa or eager"),
    }.items():  # fmt: skip
        given, migration = fine_tuning(tmp_path, f"model_init_kwargs={{'attn_implementation': '{name}'}}")
        assert given.get("model.attn_implementation") == ("eager" if name == "eager" else None)
        what, why = status(migration, "SFTConfig.model_init_kwargs")
        assert what == outcome[0]
        assert outcome[1] in why
    assert found["eval.every"] == 0, "SFTConfig validates when it is told to, strop whenever there is data"
    _, migration = fine_tuning(tmp_path, "chat_template_path='org/model', load_best_model_at_end=True")
    assert (
        "write the template of org/model into a file" in status(migration, "SFTConfig.chat_template_path")[1]
    )
    assert status(migration, "SFTConfig.load_best_model_at_end")[0] == "not there"


PPO = """
from trl import PPOConfig, PPOTrainer
args = PPOConfig({arguments})
policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)
PPOTrainer(args, tokenizer, policy, {trainer})
"""


def ppo(
    folder: Path, arguments: str, trainer: str = "None, None, None, None", *, processes: int = 1
) -> Migration:
    path = folder / "ppo.py"
    path.write_text(PPO.format(arguments=f"sft_model_path='m', {arguments}", trainer=trainer))
    script = read_calls(path)
    assert script.kind == "PPO"
    return migrate_trl(script.found, script.kind, processes=processes)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 4 x 2 accumulated x 2 processes are 16 episodes; both accumulated passes of an epoch make one optimizer step,
        # into however many mini-batches they are cut; warm-up counts steps of the loop, four optimizer steps each.
        (("per_device_train_batch_size=4, gradient_accumulation_steps=2, num_mini_batches=2, total_episodes=100, "
         "warmup_steps=3, save_steps=5"),
         {"data.prompts_per_step": 16, "actor.samples_per_update": 16, "critic.samples_per_update": 16,
          "actor.epochs": 4, "critic.epochs": 4, "trainer.max_steps": 7, "trainer.num_epochs": 7,
          "actor.optim.warmup_steps": 12, "critic.optim.warmup_steps": 12, "run.save_every": 5}),
        # Four mini-batches of a batch that is not accumulated are four optimizer steps.
        ("per_device_train_batch_size=16, num_mini_batches=4, num_ppo_epochs=1, num_train_epochs=2, max_steps=9",
         {"data.prompts_per_step": 32, "actor.samples_per_update": 8, "critic.samples_per_update": 8,
          "actor.epochs": 1, "trainer.num_epochs": 2, "trainer.max_steps": None}),
        ("", {"algorithm.adv_estimator": "gae", "rollout.samples_per_prompt": 1, "rollout.temperature": 0.7,
              "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05, "algorithm.kl_penalty": "kl",
              "algorithm.lam": 0.95, "algorithm.cliprange_value": 0.2, "data.max_response_tokens": 53,
              "actor.optim.lr": 5e-5, "critic.optim.lr": 5e-5, "critic.optim.max_grad_norm": float("inf"),
              "algorithm.clip_ratio_c": float("inf"), "model.path": "m"}),
        ("kl_coef=0.0, missing_eos_penalty=2.0, stop_token_id=7",
         {"algorithm.use_kl_in_reward": None, "reward.overlong_buffer": 1, "reward.overlong_penalty": 2.0,
          "rollout.stop_token_ids": [7]}),
        ("total_episodes=320, num_sample_generations=4, num_train_epochs=0.5",
         {"trainer.max_steps": 20, "eval.every": 5, "eval.temperature": 0.01}),
    ],
)  # fmt: skip
def test_what_arguments_of_ppo_become(tmp_path: Path, arguments: str, expected: dict[str, Any]) -> None:
    found = ours(ppo(tmp_path, arguments, processes=2))
    assert {key: found.get(key) for key in expected} == expected


def test_models_of_ppo_are_followed_to_where_they_are_loaded(tmp_path: Path) -> None:
    load = "AutoModelForSequenceClassification.from_pretrained"
    found = ours(ppo(tmp_path, "", f"None, {load}('rm', num_labels=1), None, {load}('values', num_labels=1)"))
    assert (found["model.path"], found["reward_model.path"], found["critic.path"]) == ("m", "rm", "values")
    assert found["reward.weight"] == 0.0, "the reward is the model's alone"
    assert "reference.path" not in found
    same = ppo(tmp_path, "", "policy, None, None, None")
    assert status(same, "PPOTrainer.ref_model")[0] == "not needed", "the policy itself, as it begins"
    assert ours(ppo(tmp_path, "", "'other', None, None, None"))["reference.path"] == "other"


@pytest.mark.parametrize(
    ("arguments", "key", "answer", "sentence"),
    [
        ("stop_token=None", "stop_token", "refused", "TRL samples on to response_length"),
        ("stop_token='eos'", "stop_token", "not needed", "ends a response here too"),
        ("whiten_rewards=True", "whiten_rewards", "refused", "rewards stay as they are"),
        ("kl_estimator='k2'", "kl_estimator", "refused", "use k1 or k3"),
        ("num_sample_generations=10", "num_sample_generations", "refused", "set eval.every"),
        ("num_mini_batches=3", "per_device_train_batch_size", "unresolved", "cannot be cut into 3 mini-batches"),
        ("gradient_accumulation_steps=3, num_mini_batches=2, per_device_train_batch_size=2",
         "per_device_train_batch_size", "unresolved", "4 passes of an epoch are no multiple of 3"),
    ],
)  # fmt: skip
def test_what_ppo_does_otherwise_is_said(
    tmp_path: Path, arguments: str, key: str, answer: str, sentence: str
) -> None:
    what, why = status(ppo(tmp_path, arguments), f"PPOConfig.{key}")
    assert what == answer
    assert sentence in why


def test_max_steps_ends_a_run_after_as_many_epochs_as_it_takes(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, "max_steps=50, num_train_epochs=1"))
    assert (found["trainer.max_steps"], found["trainer.num_epochs"]) == (50, 50)


def test_a_prompt_over_the_limit_loses_its_beginning_as_in_trl(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("GRPOTrainer(model='m', args=GRPOConfig(max_prompt_length=64))")
    found = read_calls(path).found
    values = migrate_trl(found, "GRPO").values["data"]
    assert values["max_prompt_tokens"] == 64
    assert (values["truncation"], values["filter_overlong_prompts"]) == ("left", False)
    path.write_text("GRPOTrainer(model='m', args=GRPOConfig(max_prompt_length=None))")
    assert "truncation" not in migrate_trl(read_calls(path).found, "GRPO").values.get("data", {})
