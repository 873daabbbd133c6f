from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.compat.migrate import Migration, migrate_verl, migrate_verl_sft, read_verl, verl_command
from strop.compat.migrate.verl_algorithm import _SAME_ESTIMATORS, _SAME_LOSSES
from strop.config import config_of, load_config
from strop.trainer.checks import parallel
from strop.trainer.config import Config

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))


def migrate(tmp_path: Path, *settings: str, before: str = "", **variables: str) -> Migration:
    script = tmp_path / "run.sh"
    script.write_text(before + "\npython3 -m verl.trainer.main_ppo " + " \\\n    ".join(settings) + "\n")
    return migrate_verl(read_verl([script], variables).found)


MOE_LOSSES = (
    f"+{A}.megatron.override_transformer_config.moe_z_loss_coeff=0.001",
    f"+{A}.megatron.override_transformer_config.moe_aux_loss_coeff=0.01",
)


SIZES = (
    f"{A}.megatron.tensor_model_parallel_size=2",
    f"{A}.megatron.pipeline_model_parallel_size=4",
    f"{A}.megatron.virtual_pipeline_model_parallel_size=2",
)
STAGES = (f"+{A}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=2",)
FIELDS = "engine.megatron.transformer_config"


def ours(migration: Migration) -> dict[str, Any]:
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def status(migration: Migration, key: str) -> tuple[str, str]:
    (row,) = [row for row in migration.rows if row.key == key]
    return row.outcome.status, row.outcome.note


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Batches: 1024 prompts, 256 prompts per optimizer step, 5 samples of each.
        (
            ["data.train_batch_size=1024", f"{A}.ppo_mini_batch_size=256", f"{R}.n=5", f"{A}.ppo_epochs=2"],
            {
                "data.prompts_per_step": 1024,
                "actor.samples_per_update": 1280,
                "rollout.samples_per_prompt": 5,
                "actor.epochs": 2,
            },
        ),
        # 32 samples of at most 512 + 1024 tokens.
        (
            ["data.max_response_length=1024", f"{A}.ppo_micro_batch_size_per_gpu=32"],
            {"data.max_response_tokens": 1024, "actor.engine.max_tokens_per_device": 49152},
        ),
        (
            [f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=24000", f"{A}.use_kl_loss=True"],
            {"actor.engine.max_tokens_per_device": 24000, "reference.engine.max_tokens_per_device": 24000},
        ),
        (
            [f"{A}.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"],
            {
                "actor.engine.max_tokens_per_device": 8192,
                "resources.ranks": 8,
                "resources.nodes": 2,
                "resources.runtime": "ray",
            },
        ),
        ([f"+{M}.override_config.attn_implementation=eager"], {"model.attn_implementation": "eager"}),
        # 10 steps of 1024 / 256 = 4 mini-batches, each visited twice.
        (
            [f"{A}.optim.lr_warmup_steps=10", f"{A}.ppo_epochs=2", f"{A}.optim.warmup_style=cosine"],
            {"actor.optim.warmup_steps": 80, "actor.optim.schedule": "cosine"},
        ),
        (
            [f"{A}.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"],
            {"actor.optim.warmup_steps": 20, "trainer.max_steps": 50},
        ),
        ([f"{A}.optim.lr_warmup_steps_ratio=0.1"], {"actor.optim.warmup_share": 0.1}),
        (["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=False"],
         {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std": False}),
        (
            [f"{A}.policy_loss.loss_mode=clip_cov", f"{A}.policy_loss.clip_cov_ub=4.0"],
            {"algorithm.policy_loss": "clip_cov", "algorithm.loss_settings.clip_cov_ub": 4.0},
        ),
        ([f"{A}.policy_loss.loss_mode=dppo_tv"], {"algorithm.loss_settings.truncation": 3.0}),
        ([f"{A}.policy_loss.loss_mode=sapo", f"{A}.tau_neg=1.1"], {"algorithm.loss_settings.tau_neg": 1.1}),
        (
            [f"{A}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=700"],
            {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.loss_scale_factor": 700},
        ),
        (["trainer.logger=['console','file','wandb']"],
         {"trainer.trackers": ["console", "jsonl", "tensorboard"]}),
        (["trainer.save_freq=-1", "trainer.test_freq=5"], {"run.save_every": 0, "eval.every": 5}),
        (
            ["custom_reward_function.path=r.py", "custom_reward_function.name=score",
             "+custom_reward_function.reward_kwargs.strict=true"],
            {"reward.path": "r.py", "reward.name": "score", "reward.kwargs.strict": True},
        ),
        (
            ["reward_model.enable=True", "reward_model.model.path=/m/rm", "reward_model.max_length=900"],
            {"reward_model.path": "/m/rm", "reward_model.max_tokens": 900, "reward.weight": 0.0},
        ),
        (["algorithm.adv_estimator=gae", "critic.model.path=/m/c", "critic.optim.lr=1e-5"],
         {"critic.path": "/m/c", "critic.optim.lr": 1e-5, "critic.samples_per_update": 256}),
        # The policy's first step there is the one of this number, and here the one after it.
        (["algorithm.adv_estimator=gae", "trainer.critic_warmup=5"], {"trainer.critic_warmup": 4}),
        (["algorithm.adv_estimator=gae", "trainer.critic_warmup=0"], {"trainer.critic_warmup": 0}),
        (["+data.cache_dir=/tmp/rows", "+data.need_tools_kwargs=True"], {"data.cache_dir": "/tmp/rows"}),
        # A range masks; one number truncates.
        (
            ["algorithm.rollout_correction.rollout_is=token",
             "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0"],
            {"algorithm.correction.weights": "token", "algorithm.correction.mode": "mask",
             "algorithm.correction.lower": 0.5, "algorithm.correction.upper": 5.0},
        ),
        (
            ["algorithm.rollout_correction.rollout_is=sequence",
             "algorithm.rollout_correction.rollout_is_threshold=2.0",
             "algorithm.rollout_correction.rollout_is_batch_normalize=True"],
            {"algorithm.correction.weights": "sequence", "algorithm.correction.upper": 2.0,
             "algorithm.correction.normalize": True},
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=\"'seq_mean_k1,seq_mean_k3'\"",
             "algorithm.rollout_correction.rollout_rs_threshold=\"'0.999_1.001,0.01'\""],
            {"algorithm.correction.reject": {"seq_mean_k1": [0.999, 1.001], "seq_mean_k3": 0.01}},
        ),
        (["algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=3.0"],
         {"algorithm.resampling": "pow", "algorithm.resampling_power": 3.0}),
        (["algorithm.use_pf_ppo=False", "algorithm.pf_ppo.weight_pow=2.0"],
         {"algorithm.resampling": None, "algorithm.resampling_power": None}),
        (["algorithm.rollout_correction.bypass_mode=True",
          "algorithm.rollout_correction.loss_type=reinforce"],
         {"algorithm.old_log_probs": "rollout", "algorithm.policy_loss": "reinforce"}),
        ([f"{A}.tis_imp_ratio_cap=2.0"],
         {"algorithm.correction.weights": "token", "algorithm.correction.upper": 2.0}),
        ([f"{A}.fsdp_config.param_offload=True", f"{A}.fsdp_config.optimizer_offload=True"],
         {"resources.offload_idle": True, "actor.engine.offload": "optimizer"}),
        ([f"{A}.fsdp_config.fsdp_size=-1", f"{A}.ulysses_sequence_parallel_size=2"],
         {"actor.engine.shard_size": 0, "actor.engine.sequence_parallel": 2}),
        ([f"{A}.use_kl_loss=True", f"{A}.megatron.context_parallel_size=4", "critic.megatron.context_parallel_size=2",
          "actor_rollout_ref.ref.megatron.context_parallel_size=2"],
         {"actor.engine.context_parallel": 4, "critic.engine.context_parallel": 2,
          "reference.engine.context_parallel": 2}),
        ([f"{A}.use_kl_loss=True", f"{A}.strategy=megatron", "actor_rollout_ref.ref.strategy=megatron",
          "critic.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=2",
          f"{A}.megatron.pipeline_model_parallel_size=4", f"{A}.megatron.virtual_pipeline_model_parallel_size=2",
          f"{A}.megatron.expert_model_parallel_size=8", f"{A}.megatron.expert_tensor_parallel_size=1",
          f"{A}.megatron.sequence_parallel=True", f"{A}.megatron.use_distributed_optimizer=False",
          f"{A}.megatron.use_mbridge=True", f"{A}.megatron.grad_offload=True",
          f"{A}.megatron.param_offload=True", f"{A}.megatron.optimizer_offload=True",
          f"+{A}.megatron.override_transformer_config.recompute_granularity=full",
          f"+{A}.megatron.override_transformer_config.recompute_num_layers=1",
          f"+{A}.megatron.override_transformer_config.moe_permute_fusion=True",
          "critic.megatron.tensor_model_parallel_size=4", "critic.megatron.optimizer_offload=True",
          "reward_model.enable=True", "reward_model.model.path=r", "reward_model.strategy=megatron",
          "reward_model.megatron.tensor_model_parallel_size=2", "reward_model.megatron.use_mbridge=True"],
         {"actor.engine.kind": "megatron", "reference.engine.kind": "megatron", "critic.engine.kind": "megatron",
          "critic.engine.offload": "optimizer", "reward_model.engine.kind": "megatron",
          "reward_model.engine.tensor_parallel": 2,
          "actor.engine.tensor_parallel": 2, "actor.engine.pipeline_parallel": 4, "actor.engine.pipeline_chunks": 2,
          "actor.engine.expert_parallel": 8, "actor.engine.megatron.distributed_optimizer": False,
          "actor.engine.offload": "optimizer", "resources.offload_idle": True, "model.gradient_checkpointing": True,
          "actor.engine.megatron.transformer_config.moe_permute_fusion": True, "critic.engine.tensor_parallel": 4}),
        # The reference's default is the actor's engine, sizes and fields; the losses are no matter of its layers.
        ([f"{A}.use_kl_loss=True", f"{A}.strategy=megatron", *SIZES, *STAGES, *MOE_LOSSES],
         {"reference.engine.kind": "megatron", "reference.engine.pipeline_parallel": 4,
          "reference.engine.pipeline_chunks": 2, "reference.engine.tensor_parallel": 2,
          f"reference.{FIELDS}.num_layers_in_last_pipeline_stage": 2, f"reference.{FIELDS}.moe_z_loss_coeff": None}),
        ([f"{A}.use_kl_loss=True", "model_engine=megatron", *SIZES, *STAGES,
          f"{REF}.megatron.pipeline_model_parallel_size=8",
          f"+{REF}.megatron.override_transformer_config.moe_permute_fusion=True"],
         {"actor.engine.kind": "megatron", "reference.engine.kind": "megatron", "reference.engine.pipeline_parallel": 8,
          "reference.engine.pipeline_chunks": 2, f"reference.{FIELDS}.num_layers_in_last_pipeline_stage": None,
          f"reference.{FIELDS}.moe_permute_fusion": True}),
        ([f"{A}.use_kl_loss=True", f"{REF}.strategy=fsdp", f"{A}.strategy=megatron", *SIZES, *STAGES],
         {"reference.engine.kind": None, "reference.engine.pipeline_parallel": None}),
        # So have the critic and a reward model, in whose process groups of the actor's sizes are there already.
        ([f"{A}.strategy=megatron", "critic.strategy=megatron", *SIZES,
          "critic.megatron.pipeline_model_parallel_size=2"],
         {"critic.engine.tensor_parallel": 2, "critic.engine.pipeline_parallel": 2, "critic.engine.pipeline_chunks": 2,
          "reward_model.engine.tensor_parallel": None}),
        (["model_engine=megatron", *SIZES, "algorithm.adv_estimator=grpo", "reward_model.enable=True",
          "reward_model.model.path=r"],
         {"critic.engine.tensor_parallel": None, "reward_model.engine.kind": "megatron",
          "reward_model.engine.tensor_parallel": 2, "reward_model.engine.pipeline_parallel": 4}),
        ([f"{A}.strategy=megatron", *SIZES], {"critic.engine.tensor_parallel": None}),
        (["algorithm.adv_estimator=grpo", "--config-name=ppo_megatron_trainer", *SIZES],
         {"reference.engine.kind": None, "reference.engine.pipeline_parallel": None}),
        ([f"{A}.strategy=megatron", *MOE_LOSSES],
         {"actor.moe.z_loss_coef": 0.001, "actor.moe.balance_loss_coef": None}),
        ([f"{A}.strategy=megatron", *MOE_LOSSES,
          f"+{A}.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss",
          f"+{A}.megatron.override_transformer_config.moe_grouped_gemm=True",
          f"{A}.router_replay.mode=R3", f"{R}.enable_rollout_routing_replay=True"],
         {"actor.moe.z_loss_coef": 0.001, "actor.moe.balance_loss_coef": 0.01, "rollout.router_replay": True,
          "actor.engine.megatron.transformer_config.moe_grouped_gemm": None}),
        ([f"{A}.strategy=megatron", f"+{A}.megatron.override_transformer_config.hidden_size=64",
          f"+{A}.megatron.override_transformer_config.attention_dropout=0.0",
          f"+{A}.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall",
          f"+{A}.megatron.override_transformer_config.moe_permute_fusion=True"],
         {f"actor.{FIELDS}.hidden_size": None, f"actor.{FIELDS}.attention_dropout": None,
          f"actor.{FIELDS}.moe_token_dispatcher_type": None, f"actor.{FIELDS}.moe_permute_fusion": True}),
        ([f"{R}.top_k=-1", f"{R}.val_kwargs.n=4", f"{R}.val_kwargs.temperature=0.6"],
         {"rollout.top_k": 0, "eval.samples_per_prompt": 4, "eval.temperature": 0.6}),
        ([f"{R}.val_kwargs.temperature=0.6", f"{R}.val_kwargs.top_p=0.95", f"{R}.val_kwargs.top_k=-1"],
         {"eval.temperature": 0.6, "eval.top_p": 0.95, "eval.top_k": 0}),
    ],
)  # fmt: skip
def test_what_settings_become(tmp_path: Path, settings: list[str], expected: dict[str, Any]) -> None:
    found = ours(migrate(tmp_path, *settings))
    assert {key: found.get(key) for key in expected} == expected


def test_a_bound_that_acts_on_the_inverse_ratio_is_named(tmp_path: Path) -> None:
    migration = migrate(
        tmp_path,
        "algorithm.rollout_correction.rollout_rs=seq_sum_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_4.0",
    )
    assert ours(migration)["algorithm.correction.reject"] == {"seq_sum_k1": [0.5, 4.0]}
    assert (
        "to reject what it did: seq_sum_k1 [0.25, 2]"
        in status(migration, "algorithm.rollout_correction.rollout_rs")[1]
    )


def test_defaults_that_differ_from_ours_are_written_out(tmp_path: Path) -> None:
    migration = migrate(tmp_path, "trainer.nnodes=1")
    found = ours(migration)
    assert found["algorithm.adv_estimator"] == "gae"
    assert found["data.prompts_per_step"] == 1024
    assert found["rollout.samples_per_prompt"] == 1
    assert found["actor.samples_per_update"] == 256
    assert found["trainer.num_epochs"] == 30
    assert found["resources.ranks"] == 8
    assert found["data.filter_overlong_prompts"] is False
    assert {row.place for row in migration.rows if row.key == "trainer.total_epochs"} == {"default"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["algorithm.adv_estimator=gae"], {"critic.optim.lr": 1e-5, "critic.samples_per_update": 256}),
        ([f"{M}.lora_rank=8"], {"model.lora.rank": 8, "model.lora.alpha": 16}),
        (["critic.model.lora_rank=8"], {"critic.lora.rank": 8, "critic.lora.alpha": 16}),
        ([f"{A}.policy_loss.loss_mode=kl_cov"], {"algorithm.loss_settings.ppo_kl_coef": 0.1}),
        (["algorithm.filter_groups.enable=True"], {"algorithm.filter_groups.metric": "score"}),
    ],
)
def test_defaults_of_what_a_script_turns_on_are_written_out(
    tmp_path: Path, settings: list[str], expected: dict[str, Any]
) -> None:
    found = ours(migrate(tmp_path, *settings))
    assert {key: found.get(key) for key in expected} == expected


def test_defaults_of_what_is_off_are_left_alone(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, "algorithm.adv_estimator=grpo"))
    assert not any("lora" in key or key.startswith(("critic", "algorithm.filter_groups")) for key in found)


def test_keys_of_absent_roles_are_not_needed(tmp_path: Path) -> None:
    migration = migrate(
        tmp_path,
        "algorithm.adv_estimator=grpo",
        "critic.optim.lr=1e-5",
        f"{REF}.log_prob_micro_batch_size_per_gpu=8",
    )
    assert status(migration, "critic.optim.lr") == (
        "not needed", "no critic is loaded with this algorithm.adv_estimator",
    )  # fmt: skip
    assert status(migration, f"{REF}.log_prob_micro_batch_size_per_gpu")[0] == "not needed"
    assert not any(key.startswith(("critic.", "reference.")) for key in ours(migration))


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    migration = migrate(tmp_path, f"{A}.optim.lrr=1e-6", "zzz.qqq=1")
    assert status(migration, f"{A}.optim.lrr") == ("unknown", f"the nearest known key is {A}.optim.lr")
    assert status(migration, "zzz.qqq")[0] == "unknown"
    assert [row.key for row in migration.open_rows] == [f"{A}.optim.lrr", "zzz.qqq"]


def test_variables_arrays_and_signs_of_a_script(tmp_path: Path) -> None:
    before = (
        "bs=64\nmodel=${MODEL:-/m/qwen}\nDATA=(\n  data.train_batch_size=$bs\n"
        "  data.train_files=\"['a.parquet','b.parquet']\"\n)"
    )
    migration = migrate(
        tmp_path,
        '"${DATA[@]}"',
        f"{M}.path=$model",
        "++data.seed=3",
        "~data.val_files",
        '"$@"',
        before=before,
    )
    found = ours(migration)
    assert found["data.prompts_per_step"] == 64
    assert found["data.train_files"] == ["a.parquet", "b.parquet"]
    assert found["model.path"] == "/m/qwen"
    assert found["trainer.seed"] == 3
    assert status(migration, "data.val_files")[0] == "not needed"
    assert status(migration, "$@")[0] == "not needed"
    assert migration.open_rows == ()


def test_an_unset_variable_is_left_out_and_said(tmp_path: Path) -> None:
    migration = migrate(tmp_path, f"{M}.path=$MODEL", "trainer.project_name=$PROJECT")
    assert status(migration, f"{M}.path") == (
        "unresolved",
        (
            "$MODEL is not set in what was given, so model.path is left out: give it with --set, for example "
            "--set MODEL=VALUE"
        ),
    )
    assert status(migration, "trainer.project_name")[0] == "not needed"
    assert "model.path" not in ours(migration)
    assert ours(migrate(tmp_path, f"{M}.path=$MODEL", MODEL="/m/q"))["model.path"] == "/m/q"


def test_what_depends_on_an_unset_variable_is_left_out_with_it(tmp_path: Path) -> None:
    migration = migrate(tmp_path, f"{R}.n=$N", f"{A}.ppo_mini_batch_size=64")
    assert status(migration, f"{A}.ppo_mini_batch_size") == (
        "unresolved",
        f"depends on {R}.n, which could not be read",
    )
    assert "rollout.samples_per_prompt is left out" in status(migration, f"{R}.n")[1]
    assert not {"actor.samples_per_update", "rollout.samples_per_prompt"} & set(ours(migration))


def test_a_configuration_file_that_a_script_names_must_be_given(tmp_path: Path) -> None:
    script, tree = tmp_path / "run.sh", tmp_path / "elsewhere" / "multiturn.yaml"
    tree.parent.mkdir()
    script.write_text("python -m verl.trainer.main_ppo --config-name=multiturn trainer.nnodes=1\n")
    tree.write_text("data: {train_batch_size: 7}\n")
    (alone,) = migrate_verl(read_verl([script], {}).found).open_rows
    assert "strop migrate verl multiturn.yaml SCRIPT" in alone.outcome.note
    together = migrate_verl(read_verl([tree, script], {}).found)
    assert together.open_rows == ()
    assert ours(together)["data.prompts_per_step"] == 7


def test_a_key_that_is_set_twice_counts_once_and_both_are_listed(tmp_path: Path) -> None:
    migration = migrate(tmp_path, f"{R}.n=4", f"{R}.n=6")
    rows = [row for row in migration.rows if row.key == f"{R}.n"]
    assert [(row.value, row.outcome.status) for row in rows] == [(4, "not needed"), (6, "translated")]


def test_a_tree_of_yaml_is_read_with_its_interpolations_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "algorithm: {adv_estimator: grpo}\n"
        "data: {train_batch_size: 32, max_prompt_length: 100}\n"
        "actor_rollout_ref:\n"
        "  rollout: {n: 4, prompt_length: '${data.max_prompt_length}'}\n"
        "  actor: {ppo_epochs: '${oc.select:epochs,1}', policy_loss: {}}\n"
        "ray_kwargs: {ray_init: {num_cpus: 4}}\n"
    )
    migration = migrate_verl(read_verl([file], {}).found)
    assert ours(migration)["data.prompts_per_step"] == 32
    assert status(migration, f"{R}.prompt_length")[0] == "not needed"
    assert status(migration, f"{A}.ppo_epochs")[0] == "unresolved"
    assert status(migration, "ray_kwargs.ray_init.num_cpus")[0] == "not needed"


def test_later_files_win(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 4}}\ndata: {train_batch_size: 32}\n")
    script = tmp_path / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo {R}.n=6\n")
    found = ours(migrate_verl(read_verl([file, script], {}).found))
    assert (found["rollout.samples_per_prompt"], found["data.prompts_per_step"]) == (6, 32)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo hello\n", "has no command that starts a training of verl"),
        (
            "python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2\n",
            "starts 2 trainings, in lines 1, 2",
        ),
    ],
)
def test_a_script_without_one_training_is_an_error(tmp_path: Path, text: str, sentence: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_verl([script], {})


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m verl.trainer.main_ppo",
        "python -u -m recipe.dapo.main_dapo",
        "PYTHONUNBUFFERED=1 python3 verl/trainer/main_ppo.py",
        "ray job submit --address=x -- python3 -m verl.trainer.main_ppo",
    ],
)
def test_the_ways_to_start_a_training(tmp_path: Path, command: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"set -x\n{command} {R}.n=6 2>&1 | tee log\n")
    assert ours(migrate_verl(read_verl([script], {}).found))["rollout.samples_per_prompt"] == 6


def test_fine_tuning_has_its_own_keys(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(
        "torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer "
        "data.train_files=t.parquet data.train_batch_size=64 data.prompt_key=question data.response_key=answer "
        "optim.lr=2e-5 model.partial_pretrain=/m/q trainer.total_epochs=3 data.max_length=700\n"
    )
    source = read_verl([script], {})
    assert source.is_sft
    migration = migrate_verl_sft(source.found)
    assert migration.open_rows == ()
    found = ours(migration)
    assert found["sft.examples_per_update"] == 64
    assert found["sft.data.completion_key"] == "answer"
    assert found["sft.num_epochs"] == 3
    assert found["resources.ranks"] == 4
    # What fsdp_sft_trainer assumes.
    assert (found["sft.optim.betas"], found["sft.optim.schedule"]) == ([0.9, 0.95], "cosine")
    assert (found["run.save_every"], found["trainer.seed"]) == (0, 1)
    assert found["sft.data.truncation"] == "error"
    assert "eval.every" not in found, "strop sft does not read it"


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [("", 32768), ("data.max_token_len_per_gpu=65536", 65536), ("data.micro_batch_size_per_gpu=2", 65536),
     ("data.micro_batch_size_per_gpu=0", 32768), ("data.image_key=pictures data.shuffle=False", 32768)],
)  # fmt: skip
def test_a_pass_of_fine_tuning_has_room_for_the_longest_conversation(
    tmp_path: Path, settings: str, tokens: int
) -> None:
    script = tmp_path / "sft.sh"
    launch = "torchrun -m verl.trainer.sft_trainer data.train_files=t.parquet model.path=/m/q"
    script.write_text(f"{launch} data.max_length=32768 {settings}")
    migration = migrate_verl_sft(read_verl([script], {}).found)
    found = ours(migration)
    assert migration.open_rows == ()
    config_of(Config, migration.values)
    assert found["sft.engine.max_tokens_per_device"] == tokens
    assert found.get("sft.data.image_key") == ("pictures" if "image" in settings else None)


def test_what_a_template_of_fine_tuning_is_given(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    launch = "torchrun -m verl.trainer.sft_trainer data.train_files=t.parquet model.path=/m/q"
    given = "data.enable_thinking_default=False +data.apply_chat_template_kwargs.tone=dry data.tools_key=functions"
    script.write_text(f"{launch} {given}")
    migration = migrate_verl_sft(read_verl([script], {}).found)
    assert migration.open_rows == ()
    config = config_of(Config, migration.values)
    assert config.sft.data.chat_template_kwargs == {"enable_thinking": False, "tone": "dry"}
    (row,) = (row for row in migration.rows if row.key == "data.tools_key")
    assert (row.outcome.status, row.outcome.note) == ("refused", "rename the column to `tools`")


def test_todays_fine_tuning_has_other_defaults(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text("torchrun -m verl.trainer.sft_trainer data.train_files=t.parquet model.path=/m/q\n")
    migration = migrate_verl_sft(read_verl([script], {}).found)
    found = ours(migration)
    assert migration.open_rows == ()
    assert (found["sft.optim.lr"], found["model.gradient_checkpointing"]) == (1e-3, True)
    assert "sft.optim.schedule" not in found
    assert "sft.data.prompt_key" not in found


def test_keys_of_2025_that_strop_has_are_translated(tmp_path: Path) -> None:
    migration = migrate(
        tmp_path,
        "data.filter_overlong_prompts=False",
        "data.truncation=left",
        f"{A}.freeze_vision_tower=True",
        f"{R}.multi_turn.interaction_config_path=users.yaml",
        f"{R}.multi_turn.max_user_turns=3",
    )
    found = ours(migration)
    assert (found["data.filter_overlong_prompts"], found["data.truncation"]) == (False, "left")
    assert found["model.freeze_vision_tower"] is True
    assert (found["agent.interactions"], found["agent.default_agent"]) == ("users.yaml", "interaction_agent")
    assert found["agent.max_user_turns"] == 3


@pytest.mark.parametrize(
    ("more", "agent"),
    [
        ([], "tool_agent"),
        ([f"{R}.agent.default_agent_loop=mine"], "mine"),
        ([f"{R}.multi_turn.interaction_config_path=users.yaml"], "interaction_agent"),
        ([f"{R}.multi_turn.enable=False"], None),
        ([f"{R}.multi_turn.tool_config_path=null"], None),
        ([f"{R}.multi_turn.tool_config_path=null", f"{R}.multi_turn.function_tool_path=t.py"], "tool_agent"),
    ],
)
def test_several_turns_with_tools_are_played_by_the_tool_agent(
    tmp_path: Path, more: list[str], agent: str | None
) -> None:
    tools = [f"{R}.multi_turn.enable=True", f"{R}.multi_turn.tool_config_path=tools.yaml"]
    assert ours(migrate(tmp_path, *tools, *more)).get("agent.default_agent") == agent


def test_prompts_that_are_dropped_are_not_cut(tmp_path: Path) -> None:
    migration = migrate(tmp_path, "data.filter_overlong_prompts=True", "data.truncation=left")
    assert "data.truncation" not in ours(migration)
    assert "are dropped before" in status(migration, "data.truncation")[1]


def test_interactions_take_the_place_of_the_tool_agent(tmp_path: Path) -> None:
    file, agent = f"{R}.multi_turn.interaction_config_path=users.yaml", f"{R}.agent.default_agent_loop"
    assert ours(migrate(tmp_path, file, f"{agent}=tool_agent"))["agent.default_agent"] == "interaction_agent"
    assert ours(migrate(tmp_path, file, f"{agent}=mine"))["agent.default_agent"] == "mine"


@pytest.mark.parametrize(
    ("setting", "kind", "note"),
    [
        ("+data.mm_processor_kwargs.min_pixels=4", "refused", "preprocessor_config.json"),
        ("trainer.esi_redundant_time=0", "not needed", "empty there too"),
        ("trainer.esi_redundant_time=60", "translated", "the run is saved and ends"),
        (f"{A}.freeze_vision_tower=False", "not needed", "off there too"),
        (f"{R}.name=vllm", "not there", "then rollout.engine=vllm"),
        (f"{R}.tensor_model_parallel_size=2", "not there", "has processes of its own here"),
        (f"{A}.grad_clip=1.0", "translated", "as in verl's versions of 2025"),
        (f"{R}.repetition_penalty=1.1", "refused", "those of the plain distribution"),
        (f"{R}.repetition_penalty=1.0", "not needed", "off"),
        (f"{R}.over_sample_rate=0.1", "translated", "gives up the slowest requests of a step"),
        ("algorithm.filter_groups.max_num_gen_batches=10", "not needed", "filter_groups.enable=true alone"),
        (f"{A}.policy_loss.loss_mode=bypass_mode", "not needed", "algorithm.correction say it"),
    ],
)
def test_the_reason_is_the_right_one(tmp_path: Path, setting: str, kind: str, note: str) -> None:
    found, reason = status(migrate(tmp_path, setting), setting.partition("=")[0].lstrip("+"))
    assert found == kind
    assert note in reason


def test_every_name_that_the_tables_give_an_algorithm_exists() -> None:
    known = {
        "algorithm.adv_estimator": (ADV_ESTIMATOR_REGISTRY, _SAME_ESTIMATORS),
        "algorithm.policy_loss": (POLICY_LOSS_REGISTRY, _SAME_LOSSES),
    }
    for key, (registry, names) in known.items():
        assert set(names) <= set(registry), key


def test_a_command_in_a_value_matters_only_where_the_value_does(tmp_path: Path) -> None:
    before = "name=run_$(date +%m%d_%H%M)\ndir=`mktemp -d`"
    migration = migrate(
        tmp_path, "trainer.experiment_name=$name", "trainer.default_local_dir=$dir", before=before
    )
    assert migration.open_rows == ()
    assert status(migration, "trainer.experiment_name")[0] == "not needed"
    needed = migrate(tmp_path, f"{M}.path=$name", before=before)
    assert (
        "so model.path is left out: give it with --set, for example --set name=VALUE"
        in (status(needed, f"{M}.path")[1])
    )
    direct = migrate(tmp_path, f"{M}.path=$(make_model)")
    assert "left out: write the value itself into the script" in status(direct, f"{M}.path")[1]


def test_the_current_folder_is_known(tmp_path: Path) -> None:
    before = 'PROJECT_DIR="$(pwd)"'
    migration = migrate(tmp_path, f"{M}.path=$PROJECT_DIR/m", before=before, PWD="/work/p")
    assert ours(migration)["model.path"] == "/work/p/m"


def test_tool_settings_stay_where_the_tools_could_not_be_read(tmp_path: Path) -> None:
    migration = migrate(
        tmp_path,
        f"{R}.multi_turn.tool_config_path=$TOOLS",
        f"{R}.multi_turn.max_assistant_turns=5",
        f"{R}.multi_turn.format=hermes",
    )
    found = ours(migration)
    assert (found["agent.max_assistant_turns"], found["agent.tool_format"]) == (5, "hermes")
    assert [row.key for row in migration.open_rows] == [f"{R}.multi_turn.tool_config_path"]


EVERYTHING_ELSE = f"""
data.prompt_key=prompt
data.reward_fn_key=data_source
data.image_key=images
data.filter_overlong_prompts=False
reward.custom_reward_function.path=reward.py
reward.custom_reward_function.name=compute_score
reward.custom_reward_function.reward_kwargs.alpha=0.5
reward.num_workers=4
reward.reward_manager.name=naive
reward.sandbox_fusion.url=null
reward.sandbox_fusion.max_concurrent=64
reward.reward_model.enable=False
reward.reward_model.model_path=null
{R}.multi_turn.tool_config_path=tools.yaml
{R}.multi_turn.function_tool_path=tools.py
{R}.multi_turn.interaction_config_path=null
{R}.multi_turn.max_assistant_turns=4
{R}.multi_turn.max_user_turns=4
{R}.multi_turn.max_parallel_calls=1
{R}.multi_turn.max_tool_response_length=256
{R}.multi_turn.tool_response_truncate_side=middle
{R}.multi_turn.format=hermes
{R}.agent.default_agent_loop=tool_agent
{R}.agent.agent_loop_config_path=loops.yaml
{R}.agent.num_workers=8
{R}.calculate_log_probs=True
{R}.ignore_eos=False
algorithm.gamma=1.0
algorithm.lam=0.95
algorithm.norm_adv_by_std_in_grpo=True
algorithm.kl_ctrl.type=adaptive
algorithm.kl_ctrl.kl_coef=0.001
algorithm.kl_ctrl.horizon=10000
algorithm.kl_ctrl.target_kl=0.1
algorithm.use_pf_ppo=False
algorithm.pf_ppo.reweight_method=pow
algorithm.pf_ppo.weight_pow=2.0
algorithm.filter_groups.enable=True
algorithm.filter_groups.metric=acc
algorithm.gdpo_reward_keys=[acc,format]
algorithm.gdpo_reward_weights=[1.0,0.5]
algorithm.rollout_correction.rollout_is=null
algorithm.rollout_correction.rollout_is_threshold=2.0
algorithm.rollout_correction.rollout_rs=null
algorithm.rollout_correction.rollout_rs_threshold=null
algorithm.rollout_correction.rollout_is_batch_normalize=False
algorithm.rollout_correction.bypass_mode=False
algorithm.rollout_correction.loss_type=ppo_clip
{A}.clip_ratio=0.2
{A}.clip_ratio_c=3.0
{A}.entropy_coeff=0.01
{A}.loss_scale_factor=null
{A}.optim.weight_decay=0.01
{A}.optim.betas=[0.9,0.999]
{A}.optim.clip_grad=1.0
{A}.optim.lr_warmup_steps=-1
{A}.policy_loss.ppo_kl_coef=0.1
{A}.dro_beta=0.1
critic.cliprange_value=0.5
critic.optim.lr=1e-5
critic.ppo_max_token_len_per_gpu=32768
trainer.resume_mode=auto
trainer.val_before_train=True
trainer.default_local_dir=ckpt
"""


def test_every_key_that_users_know_is_accounted_for(tmp_path: Path) -> None:
    settings = EVERYTHING_ELSE.split()
    migration = migrate(tmp_path, *settings)
    assert {row.key for row in migration.rows if row.place != "default"} == {
        text.split("=")[0] for text in settings
    }
    assert migration.open_rows == ()
    assert [row.key for row in migration.rows if row.outcome.status == "refused"] == []
    found = ours(migration)
    assert (found["agent.tools"], found["agent.function_tools"]) == ("tools.yaml", "tools.py")
    assert (found["agent.loops"], found["agent.default_agent"]) == ("loops.yaml", "tool_agent")
    assert (found["agent.max_assistant_turns"], found["agent.tool_format"]) == (4, "hermes")


def test_tool_settings_without_tools_are_not_needed(tmp_path: Path) -> None:
    migration = migrate(tmp_path, f"{R}.multi_turn.max_parallel_calls=2", f"{R}.multi_turn.format=hermes")
    assert not any(key.startswith("agent.") for key in ours(migration))
    assert status(migration, f"{R}.multi_turn.format") == (
        "not needed", "read with tools or agent loops alone",
    )  # fmt: skip


def test_a_sandbox_server_is_taken_over(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, "reward.sandbox_fusion.url=http://h:8080/run_code",
                         "reward.sandbox_fusion.memory_limit_mb=256"))  # fmt: skip
    assert {key: value for key, value in found.items() if key.startswith("reward.")} == {
        "reward.sandbox.backend": "sandbox_fusion",
        "reward.sandbox.url": "http://h:8080/run_code",
        "reward.sandbox.limits.memory_mib": 256,
    }


T = "distillation.teacher_model.model_path=teacher"
D = "distillation.distillation_loss"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            [f"{D}.loss_mode=forward_kl_topk", f"{D}.topk=128", f"{D}.use_task_rewards=false"],
            {"algorithm.distillation.kind": "forward_kl", "algorithm.distillation.top_k": 128}
            | {"algorithm.policy_coef": 0.0},
        ),
        (
            [
                *(f"{D}.loss_mode=k1", f"{D}.use_policy_gradient=true", f"{D}.topk=128"),
                *(f"{D}.use_task_rewards=true", f"{D}.distillation_loss_coef=0.5"),
            ],
            {"algorithm.distillation.kind": "reverse_kl", "algorithm.distillation.kl_kind": "k1+"}
            | {"algorithm.distillation.coef": 0.5},
        ),
    ],
)
def test_learning_from_a_teacher(tmp_path: Path, settings: list[str], expected: dict[str, Any]) -> None:
    found = ours(migrate(tmp_path, "distillation.enabled=true", T, *settings))
    kept = {
        key: value
        for key, value in found.items()
        if "distillation" in key or key in ("teacher.path", "algorithm.policy_coef")
    }
    assert kept == {"teacher.path": "teacher", **expected}


def test_a_teacher_that_is_off_leaves_nothing_behind(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, "distillation.enabled=false", T, f"{D}.loss_mode=k3", f"{D}.topk=128"))
    assert not [key for key in found if "distillation" in key or key.startswith("teacher")]


def test_a_divergence_that_is_not_here_is_refused(tmp_path: Path) -> None:
    for mode in (f"{D}.loss_mode=k3", f"{D}.loss_mode=jsd"):
        migration = migrate(tmp_path, "distillation.enabled=true", T, mode, f"{D}.use_policy_gradient=true")
        assert status(migration, f"{D}.loss_mode")[0] == "refused"


def test_a_reward_manager_of_the_users_own_keeps_its_class(tmp_path: Path) -> None:
    module = ["reward.reward_manager.name=Mine", "reward.reward_manager.module.path=mine.py"]
    for settings, name in (
        (module, "Mine"),
        ([*module, "reward.reward_manager.module.name=Other"], "Other"),
        (
            ["reward_model.reward_loop_module_path=mine.py", "reward_model.reward_loop_class_name=Mine"],
            "Mine",
        ),
    ):
        found = ours(migrate(tmp_path, *settings))
        assert (found["reward.path"], found["reward.manager"]) == ("mine.py", name)


def test_a_manager_without_a_file_or_beside_a_function_elsewhere_is_refused(tmp_path: Path) -> None:
    key = "reward.reward_manager.name"
    assert status(migrate(tmp_path, f"{key}=Mine"), key)[0] == "refused"
    assert status(migrate(tmp_path, f"{key}=dapo"), key)[0] != "refused"
    file = "reward.reward_manager.module.path"
    both = migrate(tmp_path, f"{key}=Mine", f"{file}=mine.py", "custom_reward_function.path=score.py")
    assert status(both, file)[0] == "refused"


def test_what_only_versions_of_2025_read_is_translated(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, f"{A}.grad_clip=0.5", "data.reward_fn_key=task"))
    assert (found["actor.optim.max_grad_norm"], found["data.data_source_key"]) == (0.5, "task")
    both = migrate(tmp_path, f"{A}.grad_clip=0.5", f"{A}.optim.clip_grad=2.0")
    assert ours(both)["actor.optim.max_grad_norm"] == 2.0
    assert status(both, f"{A}.grad_clip") == (
        "not needed",
        "actor.optim.clip_grad is set, which verl's versions of 2026 read",
    )


def test_rounds_of_sampling_end_the_run_as_the_recipe_does(tmp_path: Path) -> None:
    key = "algorithm.filter_groups"
    found = ours(migrate(tmp_path, f"{key}.enable=True", f"{key}.max_num_gen_batches=3"))
    assert (found[f"{key}.max_rounds"], found[f"{key}.at_limit"]) == (3, "stop")
    unbounded = migrate(tmp_path, f"{key}.enable=True", f"{key}.max_num_gen_batches=0")
    assert f"{key}.max_rounds" not in ours(unbounded)


def test_a_generation_batch_that_is_larger_is_a_round(tmp_path: Path) -> None:
    larger = ["data.gen_batch_size=1536", "data.train_batch_size=512"]
    found = ours(migrate(tmp_path, *larger, "algorithm.filter_groups.enable=True"))
    assert (found["data.prompts_per_step"], found["algorithm.filter_groups.prompts_per_round"]) == (512, 1536)
    kind, reason = status(migrate(tmp_path, *larger), "data.gen_batch_size")
    assert kind == "refused"
    assert "set data.train_batch_size=1536" in reason


def test_validation_without_sampling_is_greedy_and_said(tmp_path: Path) -> None:
    keys = f"{R}.val_kwargs"
    rest = (f"{keys}.temperature=0.6", f"{keys}.top_p=0.9", f"{keys}.top_k=20", f"{keys}.n=4")
    greedy = migrate(tmp_path, f"{keys}.do_sample=False", *rest)
    found = ours(greedy)
    assert found["eval.temperature"] == 0
    assert not {"eval.top_p", "eval.top_k", "eval.samples_per_prompt"} & set(found)
    assert "those of 2026 do not read it" in status(greedy, f"{keys}.do_sample")[1]
    assert greedy.clashes() == {}
    sampled = migrate(tmp_path, f"{keys}.do_sample=True", *rest)
    assert status(sampled, f"{keys}.do_sample")[0] == "not needed"
    assert {key: ours(sampled)[key] for key in ours(sampled) if key.startswith("eval.s") or "top" in key} == {
        "eval.samples_per_prompt": 4, "eval.top_p": 0.9, "eval.top_k": 20,
    }  # fmt: skip
    assert ours(sampled)["eval.temperature"] == 0.6
    unsaid = migrate(tmp_path, *rest)
    assert ours(unsaid)["eval.temperature"] == 0.6
    assert "are greedy without val_kwargs.do_sample=true" in status(unsaid, f"{keys}.temperature")[1]
    alone = migrate(tmp_path, f"{keys}.n=4")
    assert status(alone, f"{keys}.n") == (
        "not needed",
        "greedy answers to a prompt are all the same, so there is one",
    )


@pytest.mark.parametrize(
    ("settings", "command", "said"),
    [
        (["trainer.val_only=True"], "eval", "validation alone: strop eval --config"),
        (
            ["trainer.val_only=True", "trainer.val_before_train=False"],
            "train",
            "read with trainer.val_before_train",
        ),
        (["trainer.val_only=False"], "train", "off there too"),
    ],
)
def test_validation_alone_is_another_command(
    settings: list[str], command: str, said: str, tmp_path: Path
) -> None:
    migration = migrate(tmp_path, *settings)
    assert said in status(migration, "trainer.val_only")[1]
    assert verl_command(read_verl([tmp_path / "run.sh"], {}).found) == command


def test_parameters_on_the_host_are_a_setting_of_fine_tuning(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text("torchrun -m verl.trainer.sft_trainer model.path=/m/q engine.param_offload=True\n")
    found = ours(migrate_verl_sft(read_verl([script], {}).found))
    assert found["sft.engine.offload"] == "all"
    assert "resources.offload_idle" not in found


FULLY_ASYNC = (
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    f"{R}.n=16",
    f"{A}.ppo_mini_batch_size=32",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=2",
    "rollout.n_gpus_per_node=8",
    "rollout.total_rollout_steps=51200",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.require_batches=1",
    "async_training.partial_rollout=True",
)


def test_fully_asynchronous_training_is_a_bound_on_staleness(tmp_path: Path) -> None:
    """128 prompts between two updates of the weights, half as many ahead of them; 400 of these windows."""
    script = tmp_path / "run.sh"
    program = "verl.experimental.fully_async_policy.fully_async_main"
    script.write_text(f"python3 -m {program} " + " \\\n    ".join(FULLY_ASYNC) + "\n")
    migration = migrate_verl(read_verl([script], {}).found)
    found = ours(migration)
    assert found["data.prompts_per_step"] == 128
    assert found["actor.samples_per_update"] == 512
    assert found["rollout.max_staleness"] == 0.5
    assert found["trainer.max_steps"] == 400
    assert found["resources.apart"] == {"rollout": 16}
    assert found["algorithm.old_log_probs"] == "rollout"
    assert [row.key for row in migration.rows if row.outcome.status in ("refused", "unknown")] == []
    assert status(migration, "actor_rollout_ref.hybrid_engine")[1].startswith("rollout.n_gpus_per_node says")


def test_an_older_policy_is_weighed_where_verl_weighs_it(tmp_path: Path) -> None:
    found = ours(migrate(tmp_path, *FULLY_ASYNC, "async_training.compute_prox_log_prob=True"))
    assert found["algorithm.correction.weights"] == "token"
    assert "algorithm.old_log_probs" not in found
    found = ours(migrate(tmp_path, *FULLY_ASYNC, "algorithm.rollout_correction.rollout_is=sequence"))
    assert found["algorithm.correction.weights"] == "sequence"
    assert "algorithm.old_log_probs" not in found


def test_one_step_off_is_one_version_ahead(tmp_path: Path) -> None:
    found = ours(
        migrate(
            tmp_path,
            "actor_rollout_ref.hybrid_engine=False",
            "rollout.nnodes=1",
            "rollout.n_gpus_per_node=2",
            "data.train_batch_size=64",
        )
    )
    assert found["rollout.max_staleness"] == 1
    assert found["resources.apart"] == {"rollout": 2}
    assert found["data.prompts_per_step"] == 64
    assert status(
        migrate(tmp_path, "actor_rollout_ref.hybrid_engine=False"), "actor_rollout_ref.hybrid_engine"
    ) == (
        "refused",
        "say where generation is: resources.apart={rollout: N}",
    )


def test_what_a_reference_takes_from_the_actor_is_marked_as_default(tmp_path: Path) -> None:
    found = migrate(tmp_path, f"{A}.use_kl_loss=True", f"{A}.strategy=megatron", *SIZES, *STAGES, *MOE_LOSSES)
    places = {row.key.removeprefix(f"{REF}."): row.place for row in found.rows if row.key.startswith(REF)}
    assert places == dict.fromkeys(
        (
            "strategy",
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.virtual_pipeline_model_parallel_size",
            "megatron.override_transformer_config.num_layers_in_last_pipeline_stage",
        ),
        "default",
    )
    alone = migrate(tmp_path, f"{A}.strategy=megatron", *SIZES, *STAGES)
    assert not [row for row in alone.rows if row.key.startswith(REF)]  # nor is one loaded


def test_a_critic_without_sizes_of_its_own_loads_beside_the_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.trainer.checks.parallel.check_installed", lambda section: None)
    settings = ("model_engine=megatron", f"{M}.path=m", "trainer.n_gpus_per_node=16", *SIZES)
    found = ours(migrate(tmp_path, *settings))
    config = load_config(Config, overrides=[f"{key}={json.dumps(value)}" for key, value in found.items()])
    assert "critic" in config.roles
    parallel.check(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["global_profiler.tool=torch", "global_profiler.steps=[5,2]"], {"trainer.profile_steps": [2, 5]}),
        (
            [
                "global_profiler.tool=torch_memory",
                "global_profiler.steps=[3]",
                f"{A}.profiler.all_ranks=true",
            ],
            {"trainer.profile_steps": [3], "trainer.profile_memory": True},
        ),
        (["global_profiler.tool=nsys", "global_profiler.steps=[1]"], {"trainer.profile_steps": [1]}),
        (["global_profiler.tool=torch_memory", "global_profiler.steps=[0]"], {}),  # no step has this number
        (["trainer.profile_steps=[0,-1]"], {}),
        (["global_profiler.steps=[1]"], {}),  # no tool is started there
        (["global_profiler.tool=torch_memory"], {}),
        (
            ["trainer.profile_steps=[4]", "trainer.npu_profile.options.level=level1"],
            {"trainer.profile_steps": [4]},
        ),
        (["trainer.profile_steps=null", "global_profiler.tool=null", "global_profiler.steps=null"], {}),
    ],
)
def test_profiled_steps(tmp_path: Path, settings: list[str], expected: dict[str, Any]) -> None:
    migration = migrate(tmp_path, *settings)
    assert {key: value for key, value in ours(migration).items() if "profile" in key} == expected
    assert all(row.outcome.status != "not there" for row in migration.rows if "profile" in row.key)


def test_ranges_of_other_profilers_are_named(tmp_path: Path) -> None:
    migration = migrate(tmp_path, "global_profiler.tool=nsys", "global_profiler.steps=[1]")
    assert "NVTX ranges" in status(migration, "global_profiler.tool")[1]
    migration = migrate(tmp_path, "global_profiler.tool=rocprof", "global_profiler.steps=[1]")
    assert status(migration, "global_profiler.tool")[0] == "not there"


@pytest.mark.parametrize(("interval", "expected"), [("[2,4]", [2, 3, 4]), ("[-1,-1]", None)])
def test_the_interval_of_fine_tuning(tmp_path: Path, interval: str, expected: list[int] | None) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun -m verl.trainer.fsdp_sft_trainer trainer.profile_interval={interval}\n")
    migration = migrate_verl_sft(read_verl([script], {}).found)
    assert ours(migration).get("trainer.profile_steps") == expected
