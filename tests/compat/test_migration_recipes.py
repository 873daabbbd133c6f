"""Programs beside verl's own: its recipe of PRIME, and verl-agent with environments and GiGPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import Migration, migrate_verl, read_verl
from strop.config import config_of
from strop.trainer.config import Config

PRIME = "python3 -m recipe.prime.main_prime data.train_files=t.parquet actor_rollout_ref.model.path=/m "
AGENT = (
    "python3 -m verl.trainer.main_ppo data.train_files=t.parquet actor_rollout_ref.model.path=/m "
    "algorithm.adv_estimator=gigpo env.env_name=Sokoban env.rollout.n=8 env.max_steps=15 "
)
LOADS = {"trainer.max_steps": 3}


def of(folder: Path, text: str) -> Migration:
    path = folder / "run.sh"
    path.write_text(text)
    return migrate_verl(read_verl([path], {}).found)


def ours(migration: Migration) -> dict[str, Any]:
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = value
    return tree


def test_the_recipe_of_prime_is_prime_and_its_reward_model_learns(tmp_path: Path) -> None:
    migration = of(
        tmp_path,
        PRIME + "data.max_prompt_length=100 data.max_response_length=200 reward_model.model.path=/p "
        "reward_model.micro_batch_size_per_gpu=2 reward_model.model.update=after reward_model.model.beta_train=0.1 "
        "reward_model.model.optim.lr=2e-6 reward_model.model.optim.grad_clip=10 reward_model.mini_batch_size=32 "
        "reward_model.model.fsdp_config.optimizer_offload=True reward_model.ulysses_sequence_parallel_size=2 "
        "reward_model.reward_manager=prime algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True "
        "trainer.n_gpus_per_node=2",
    )
    assert not migration.open_rows
    found = ours(migration)
    assert not [key for key in found if key.startswith("reward_model")], "nothing frozen scores"
    assert "algorithm.use_kl_in_reward" not in found, "its trainer takes no KL off the rewards"
    expected = {
        "algorithm.adv_estimator": "prime",
        "prm.path": "/p",
        "prm.update": "after",
        "prm.beta": 0.1,
        "prm.optim.lr": 2e-6,
        "prm.optim.max_grad_norm": 10,
        "prm.optim.weight_decay": 0.0,
        "prm.samples_per_update": 32,
        "prm.engine.max_tokens_per_device": 600,
        "prm.engine.sequence_parallel": 2,
        "prm.engine.offload": "optimizer",
        "rollout.samples_per_prompt": 4,  # of the recipe's own file
        "algorithm.entropy_coeff": 0.001,
        "eval.before_train": False,
    }
    assert {key: found.get(key) for key in expected} == expected
    config = config_of(Config, nested(found | LOADS))
    assert config.prm.update == "after"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"process_weight": 5.0, "outcome_weight": 5.0, "process_norm": True}),
        (
            "algorithm.reward_gt_coef=10 reward_model.prime_norm=none",
            {"process_weight": 5.0, "outcome_weight": 10.0, "process_norm": False},
        ),
        (
            "algorithm.reward_gt_coef=0 algorithm.reward_dpo_coef=3",
            {"process_weight": 3.0, "outcome_weight": 0.0, "process_norm": True},
        ),
    ],
)
def test_weights_of_both_rewards(tmp_path: Path, flags: str, expected: dict[str, float]) -> None:
    found = ours(of(tmp_path, PRIME + flags))
    assert {key: found[f"algorithm.adv_settings.{key}"] for key in expected} == expected


def test_prompts_of_middling_difficulty(tmp_path: Path) -> None:
    found = ours(of(tmp_path, PRIME + "data.train_batch_size=64 data.accuracy_upper_bound=0.9"))
    filters = {key.rpartition(".")[2]: value for key, value in found.items() if ".filter_groups." in key}
    assert filters == {
        "enable": True, "metric": "acc", "lowest_mean": 0.2, "highest_mean": 0.9, "max_rounds": 1,
        "prompts_per_round": 256,
    }  # fmt: skip
    plain = ours(of(tmp_path, PRIME + "data.filter_accuracy=False"))
    assert not [key for key in plain if ".filter_groups." in key]


def test_a_file_with_keys_of_prime_is_of_prime(tmp_path: Path) -> None:
    path = tmp_path / "prime.yaml"
    path.write_text(
        "actor_rollout_ref: {model: {path: /m}, actor: {ppo_mini_batch_size: 8}, rollout: {n: 4}}\n"
        "reward_model:\n  model: {path: '${actor_rollout_ref.model.path}', update: before, beta_train: 0.05}\n"
        "  mini_batch_size: ${actor_rollout_ref.actor.ppo_mini_batch_size}\n"
        "algorithm: {adv_estimator: rloo}\n"
    )
    migration = migrate_verl(read_verl([path], {}).found)
    assert not migration.open_rows
    found = ours(migration)
    assert (found["algorithm.adv_estimator"], found["prm.path"], found["prm.samples_per_update"]) == (
        "prime",
        "/m",
        8,
    )


def test_elsewhere_a_reward_model_scores_and_rloo_is_rloo(tmp_path: Path) -> None:
    text = PRIME.replace("recipe.prime.main_prime", "verl.trainer.main_ppo")
    found = ours(
        of(
            tmp_path,
            text + "algorithm.adv_estimator=rloo reward_model.enable=True reward_model.model.path=/r "
            "reward_model.micro_batch_size_per_gpu=2",
        )
    )
    assert found["reward_model.path"] == "/r"
    assert found["reward_model.engine.max_tokens_per_device"] == 2 * 1024
    assert found["algorithm.adv_estimator"] == "rloo"
    assert not [key for key in found if key.startswith("prm")]


def test_verl_agent_plays_an_environment_whose_answers_are_samples(tmp_path: Path) -> None:
    migration = of(
        tmp_path,
        AGENT + "data.max_response_length=64 actor_rollout_ref.actor.ppo_mini_batch_size=128 "
        "algorithm.gigpo.step_advantage_w=0.5 algorithm.gigpo.mode=mean_norm algorithm.gigpo.enable_similarity=True "
        "algorithm.gigpo.similarity_thresh=0.9 env.seed=0 env.resources_per_worker.num_cpus=0.1 "
        "actor_rollout_ref.actor.use_invalid_action_penalty=True trainer.n_gpus_per_node=1",
    )
    assert not migration.open_rows
    assert not migration.clashes()
    found = ours(migration)
    expected = {
        "algorithm.adv_estimator": "gigpo",
        "agent.default_agent": "env_agent",
        "agent.credit": "turn",
        "algorithm.adv_settings.step_weight": 0.5,
        "algorithm.norm_adv_by_std": False,
        "algorithm.anchor_similarity": 0.9,
        "rollout.samples_per_prompt": 8,
        "agent.max_assistant_turns": 15,
        "data.max_response_tokens": 15 * 64,
        "actor.samples_per_update": 128,  # answers in both
    }
    assert {key: found.get(key) for key in expected} == expected
    config = config_of(Config, nested(found | {"agent.environment.name": "world.py:Guess"}))
    assert config.agent.credit == "turn"  # type: ignore[attr-defined]


def test_an_estimator_that_strop_has_by_that_name_needs_no_registration(tmp_path: Path) -> None:
    rows = of(tmp_path, AGENT.replace("gigpo", "maxrl")).rows
    (note,) = [row.outcome.note for row in rows if row.key == "algorithm.adv_estimator"]
    assert note == "not an estimator of verl's own, but there is one here"


def test_a_sample_of_many_tokens_is_a_pass_of_its_own_where_nothing_says_how_many(tmp_path: Path) -> None:
    text = PRIME.replace("recipe.prime.main_prime", "verl.trainer.main_ppo")
    lengths = "data.max_prompt_length=1000 data.max_response_length=20000 algorithm.adv_estimator=grpo "
    found = ours(of(tmp_path, text + lengths + "actor_rollout_ref.actor.use_kl_loss=True"))
    assert found["actor.engine.max_tokens_per_device"] == 21000
    assert found["reference.engine.max_tokens_per_device"] == 21000
    short = ours(of(tmp_path, text + "algorithm.adv_estimator=grpo"))
    assert "actor.engine.max_tokens_per_device" not in short
