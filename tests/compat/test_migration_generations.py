"""Scripts of verl from February 2025 to 2026, as people have them: the rows in which the versions differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import Migration, migrate_verl, migrate_verl_sft, read_verl
from strop.config import config_of
from strop.trainer.config import Config

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

PPO_OF_V02 = f"""\
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
 data.train_files=train.parquet data.val_files=test.parquet \\
 data.train_batch_size=256 data.val_batch_size=1312 data.max_prompt_length=512 data.max_response_length=256 \\
 {M}.path=models/qwen {A}.optim.lr=1e-6 {A}.ppo_mini_batch_size=64 {A}.ppo_micro_batch_size=4 \\
 {R}.log_prob_micro_batch_size=8 {R}.tensor_model_parallel_size=1 {R}.gpu_memory_utilization=0.4 \\
 {REF}.log_prob_micro_batch_size=4 critic.optim.lr=1e-5 critic.model.path=models/qwen critic.ppo_micro_batch_size=4 \\
 algorithm.kl_ctrl.kl_coef=0.002 +trainer.val_before_train=False trainer.default_hdfs_dir=null \\
 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15 \\
 2>&1 | tee verl_demo.log
"""
DAPO_OF_V04 = f"""\
set -xeuo pipefail
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
RUNTIME_ENV=${{RUNTIME_ENV:-"runtime_env.yaml"}}
ray job submit --no-wait --runtime-env="${{RUNTIME_ENV}}" --working-dir . \\
    -- python3 -m recipe.dapo.main_dapo \\
    data.gen_batch_size=${{gen_prompt_bsz}} data.train_batch_size=${{train_prompt_bsz}} \\
    data.max_prompt_length=${{max_prompt_length}} data.max_response_length=${{max_response_length}} \\
    {M}.path=models/qwen {R}.n=16 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    algorithm.kl_ctrl.kl_coef=0.0 {A}.use_kl_loss=False {A}.clip_ratio_low=0.2 {A}.clip_ratio_high=0.28 \\
    {A}.clip_ratio_c=10.0 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
    algorithm.filter_groups.max_num_gen_batches=10 {A}.ppo_mini_batch_size=32 {A}.optim.lr_warmup_steps=10 \\
    {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=2560 {A}.ulysses_sequence_parallel_size=4 \\
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \\
    reward_model.overlong_buffer.len=4096 trainer.nnodes=4 trainer.n_gpus_per_node=8 trainer.total_epochs=1
"""
GSPO_OF_V06 = f"""\
rollout_is=True
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {A}.policy_loss.loss_mode=gspo {M}.path=models/qwen \\
    data.train_batch_size=512 {R}.n=16 {A}.ppo_mini_batch_size=128 {A}.clip_ratio_low=0.0003 \\
    algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.0 \\
    algorithm.rollout_is=${{rollout_is}} algorithm.rollout_is_threshold=2.0 algorithm.rollout_is_threshold_lower=null \\
    algorithm.rollout_is_level=token algorithm.rollout_is_mode=mask algorithm.rollout_is_veto_threshold=1e-4 \\
    {R}.calculate_log_probs=True {R}.mode=async {R}.agent.num_workers=8 ray_kwargs.ray_init.num_cpus=64 \\
    +ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=WARN "+ray_init.runtime_env.env_vars.NCCL_IB_HCA='mlx5_0'" \\
    trainer.use_legacy_worker_impl=auto trainer.default_hdfs_dir=hdfs://nn:9000/runs trainer.total_training_steps=500 \\
    {A}.optim.lr_warmup_steps_ratio=0.05
"""
ASYNC_OF_2026 = f"""\
ROLLOUT=(
    {R}.nnodes=2
    {R}.n_gpus_per_node=4
    {R}.n=8
)
python3 -m verl.trainer.main_ppo "${{ROLLOUT[@]}}" algorithm.adv_estimator=grpo {M}.path=models/qwen \\
    data.train_batch_size=64 {A}.ppo_mini_batch_size=16 trainer.use_v1=True trainer.v1.trainer_mode=separate_async \\
    trainer.v1.separate_async.parameter_sync_step=1 trainer.v1.sampler.max_off_policy_threshold=2 \\
    trainer.v1.sampler.max_off_policy_strategy=drop algorithm.rollout_correction.rollout_is=token \\
    algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.bypass_mode=False \\
    trainer.n_gpus_per_node=4 trainer.nnodes=1
"""


def migrated(folder: Path, text: str) -> Migration:
    (folder / "run.sh").write_text(text)
    return migrate_verl(read_verl([folder / "run.sh"], {"PWD": str(folder)}).found)


def settings(folder: Path, text: str) -> Migration:
    """Of one command with these settings."""
    return migrated(folder, f"python3 -m verl.trainer.main_ppo {text}")


def ours(migration: Migration) -> dict[str, Any]:
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def row(migration: Migration, key: str) -> tuple[str, str]:
    (found,) = [one for one in migration.rows if one.key == key]
    return found.outcome.status, found.outcome.note


def differs(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {
        key: found.get(key, "missing")
        for key, value in expected.items()
        if found.get(key, "missing") != value
    }


def test_ppo_of_february_2025(tmp_path: Path) -> None:
    """At that time the rewards had a KL term wherever the loss has none, the entropy a coefficient of 0.001, the clip
    no second bound, and prompts over the limit were dropped."""
    migration = migrated(tmp_path, PPO_OF_V02)
    assert migration.open_rows == ()
    expected = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.002,
        "algorithm.entropy_coeff": 0.001,
        "algorithm.clip_ratio_c": math.inf,
        "data.filter_overlong_prompts": True,
        "data.prompts_per_step": 256,
        "actor.samples_per_update": 64,
        "critic.samples_per_update": 64,
        "actor.engine.max_tokens_per_device": 4 * (512 + 256),
        "reference.engine.max_tokens_per_device": 4 * (512 + 256),
        "actor.optim.lr": 1e-6,
        "critic.optim.lr": 1e-5,
        "trainer.num_epochs": 15,
        "run.save_every": 10,
        "eval.every": 10,
        "eval.before_train": False,
    }
    assert differs(ours(migration), expected) == {}
    config = config_of(Config, migration.values)
    assert config.reference.engine.max_tokens_per_device == 3072
    assert "as in verl before March 2025" in row(migration, "algorithm.use_kl_in_reward")[1]


def test_a_kl_loss_of_february_2025_stays_alone(tmp_path: Path) -> None:
    found = ours(
        settings(tmp_path, f"algorithm.adv_estimator=grpo data.val_batch_size=9 {A}.use_kl_loss=True {R}.n=5")
    )
    assert "algorithm.use_kl_in_reward" not in found
    assert found["algorithm.entropy_coeff"] == 0.001


def test_a_coefficient_without_its_switch_is_told_of_in_later_scripts(tmp_path: Path) -> None:
    migration = settings(tmp_path, f"algorithm.kl_ctrl.kl_coef=0.001 {A}.ppo_micro_batch_size_per_gpu=4")
    assert "algorithm.use_kl_in_reward" not in ours(migration)
    assert "algorithm.entropy_coeff" not in ours(migration)
    assert "read with algorithm.use_kl_in_reward=true alone" in row(migration, "algorithm.kl_ctrl.kl_coef")[1]
    quiet = settings(tmp_path, "algorithm.kl_ctrl.kl_coef=0.001 algorithm.use_kl_in_reward=False")
    assert row(quiet, "algorithm.kl_ctrl.kl_coef") == ("translated", "")


def test_dapo_of_june_2025(tmp_path: Path) -> None:
    (tmp_path / "runtime_env.yaml").write_text(
        'working_dir: ./\nexcludes: ["/.git/"]\nenv_vars:\n  TORCH_NCCL_AVOID_RECORD_STREAMS: "1"\n'
        '  VLLM_USE_V1: "1"\n  CUDA_VISIBLE_DEVICES: "0,1"\n  HF_TOKEN: hf_AbCdEfGhIjKlMnOpQrStUv\n'
    )
    migration = migrated(tmp_path, DAPO_OF_V04)
    assert migration.open_rows == ()
    expected = {
        "resources.env.TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "resources.env.VLLM_USE_V1": "1",
        "resources.env.HF_TOKEN": None,
        "data.prompts_per_step": 512,
        "algorithm.filter_groups.prompts_per_round": 1536,
        "algorithm.filter_groups.max_rounds": 10,
        "actor.samples_per_update": 32 * 16,
        "actor.optim.warmup_steps": 10 * 512 // 32,
        "algorithm.clip_ratio_c": 10.0,
        "algorithm.use_kl_in_reward": False,
        "reward.overlong_buffer": 4096,
        "resources.ranks": 32,
    }
    assert differs(ours(migration), expected) == {}
    status, note = row(migration, "runtime_env.env_vars")
    assert status == "translated"
    assert "CUDA_VISIBLE_DEVICES: each process gets a device of its own" in note
    assert "export HF_TOKEN before the command" in note
    assert row(migration, "export")[0] == "not needed"
    shown = str([one.value for one in migration.rows])
    assert "hf_Ab" not in shown
    assert "0123456789abcdef" not in shown


def test_an_environment_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    migration = migrated(tmp_path, DAPO_OF_V04)
    assert migration.open_rows == ()
    assert row(migration, "runtime_env") == (
        "not there", "no such file is here: its variables go into resources.env"
    )  # fmt: skip


def test_gspo_of_october_2025(tmp_path: Path) -> None:
    migration = migrated(tmp_path, GSPO_OF_V06)
    assert migration.open_rows == ()
    expected = {
        "algorithm.policy_loss": "gspo",
        "actor.samples_per_update": 128 * 16,
        "algorithm.correction.weights": "token",
        "algorithm.correction.mode": "mask",
        "algorithm.correction.lower": 0.5,
        "algorithm.correction.upper": 2.0,
        # k2 of the ratio 1e-4: (ln 1e-4)^2 / 2 = 9.21034^2 / 2
        "algorithm.correction.reject.seq_max_k2": 42.4152,
        "resources.env.NCCL_DEBUG": "WARN",
        "resources.env.NCCL_IB_HCA": "mlx5_0",
        "run.copy_to": "hdfs://nn:9000/runs",
        # 25 of 500 steps, of 512 / 128 = 4 optimizer steps each
        "actor.optim.warmup_steps": 100,
        "trainer.max_steps": 500,
    }
    assert differs(ours(migration), expected) == {}
    config_of(Config, migration.values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Without the switch they were measured alone; without a bound nothing was done.
        (
            "algorithm.rollout_is=False algorithm.rollout_is_threshold=2.0 algorithm.rollout_is_veto_threshold=1e-4",
            {},
        ),
        ("algorithm.rollout_is_threshold=2.0", {}),
        ("algorithm.rollout_is=True", {}),
        (
            "algorithm.rollout_is=True algorithm.rollout_is_threshold=5.0 algorithm.rollout_is_level=geometric",
            {"weights": "geometric", "upper": 5.0},
        ),
        (
            (
                "algorithm.rollout_is=True algorithm.rollout_is_threshold=4.0 algorithm.rollout_is_level=sequence "
                "algorithm.rollout_is_mode=mask algorithm.rollout_is_threshold_lower=0.2"
            ),
            {"weights": "sequence", "mode": "mask", "lower": 0.2, "upper": 4.0},
        ),
        # The same in its section, one month later.
        (
            (
                "algorithm.rollout_rs=geometric algorithm.rollout_rs_threshold=1.001 "
                "algorithm.rollout_rs_threshold_lower=0.999"
            ),
            {"reject": {"seq_mean_k1": [0.999, 1.001]}},
        ),
        (
            (
                "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 "
                "algorithm.rollout_correction.rollout_token_veto_threshold=1e-2"
            ),
            {"weights": "token", "upper": 2.0, "reject.seq_max_k2": 10.6038},
        ),
    ],
)
def test_the_correction_under_its_names_of_late_2025(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    migration = settings(tmp_path, f"algorithm.adv_estimator=grpo {R}.n=4 {M}.path=m {text}")
    assert migration.open_rows == ()
    prefix = "algorithm.correction."
    found = {
        key.removeprefix(prefix): value for key, value in ours(migration).items() if key.startswith(prefix)
    }
    assert found == expected
    config_of(Config, migration.values)


def test_rejections_of_several_rows_stand_together(tmp_path: Path) -> None:
    section = "algorithm.rollout_correction"
    rejection = f"{section}.rollout_rs=seq_mean_k3 {section}.rollout_rs_threshold=0.01"
    veto = f"{section}.rollout_token_veto_threshold=1e-2"
    for text in (f"{veto} {rejection}", f"{rejection} {veto}"):
        values = settings(tmp_path, text).values
        assert values["algorithm"]["correction"]["reject"] == {"seq_mean_k3": 0.01, "seq_max_k2": 10.6038}


def test_an_asynchronous_run_of_2026(tmp_path: Path) -> None:
    migration = migrated(tmp_path, ASYNC_OF_2026)
    assert migration.open_rows == ()
    assert [one.key for one in migration.rows if one.outcome.status == "refused"] == []
    expected = {
        "rollout.max_staleness": 2.0,
        "resources.apart": {"rollout": 8},
        "resources.ranks": 4,
        "algorithm.correction.weights": "token",
        "algorithm.correction.upper": 2.0,
    }
    assert differs(ours(migration), expected) == {}
    assert "algorithm.old_log_probs" not in ours(migration)
    config_of(Config, migration.values)


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        ("trainer.v1.trainer_mode=sync trainer.v1.sampler.max_off_policy_threshold=2", {}, "as here"),
        (
            "trainer.v1.trainer_mode=colocate_async",
            {"rollout.max_staleness": 1.0, "algorithm.old_log_probs": "rollout"},
            "what is on its way goes on with the new weights",
        ),
        (
            "trainer.v1.trainer_mode=separate_async",
            {"rollout.max_staleness": 1.0, "algorithm.old_log_probs": "rollout"},
            "generation apart: set resources.apart={rollout: N}",
        ),
        ("trainer.v1.trainer_mode=other", {}, "use sync, colocate_async or separate_async"),
    ],
)
def test_the_modes_of_the_trainer_of_2026(
    tmp_path: Path, text: str, expected: dict[str, Any], note: str
) -> None:
    migration = settings(tmp_path, text)
    keys = ("rollout.max_staleness", "algorithm.old_log_probs")
    assert {key: value for key, value in ours(migration).items() if key in keys} == expected
    assert note in row(migration, "trainer.v1.trainer_mode")[1]


@pytest.mark.parametrize(
    ("setting", "status", "expected"),
    [
        # A tenth of the requests is given up: of 1 + 1/9 begun, 1/9 is a tenth.
        (
            f"{R}.over_sample_rate=0.1",
            "translated",
            {"rollout.over_issue": 0.1111, "rollout.slowest": "drop"},
        ),
        (f"{R}.over_sample_rate=0", "not needed", {}),
        ("trainer.default_hdfs_dir=null", "not needed", {}),
        ("trainer.default_hdfs_dir=s3://bucket/runs", "translated", {"run.copy_to": "s3://bucket/runs"}),
        ("trainer.default_hdfs_dir=/mnt/runs", "translated", {"run.copy_to": "file:///mnt/runs"}),
        ("trainer.default_hdfs_dir=runs", "refused", {}),
        (f"{R}.agent.custom_async_server.path=server.py", "refused", {}),
        ("ray_init.address=auto", "translated", {"resources.address": "auto"}),
        ("ray_init.num_cpus=8", "not needed", {}),
        (
            "ray_init.runtime_env.env_vars.NCCL_IB_DISABLE=1",
            "translated",
            {"resources.env.NCCL_IB_DISABLE": 1},
        ),
        ("ray_init.runtime_env.env_vars.RANK=1", "refused", {}),
        ("ray_init.runtime_env.pip=[flask]", "refused", {}),
        (f"{R}.mode=async", "not needed", {}),
        (f"{R}.load_format=dummy_dtensor", "not needed", {}),
        (f"{R}.free_cache_engine=False", "not there", {}),
        (f"{R}.tensor_model_parallel_size=1", "not needed", {}),
    ],
)
def test_rows_that_strop_has_something_for(
    tmp_path: Path, setting: str, status: str, expected: dict[str, Any]
) -> None:
    migration = settings(tmp_path, f"+{setting}")
    found = next(one for one in migration.rows if one.key == setting.partition("=")[0])
    assert (found.outcome.status, dict(found.outcome.ours)) == (status, expected)


def test_an_own_server_is_an_engine_of_ones_own(tmp_path: Path) -> None:
    note = row(
        settings(tmp_path, f"{R}.agent.custom_async_server.name=Mine"), f"{R}.agent.custom_async_server.name"
    )[1]
    assert "algorithm.extensions" in note
    assert "rollout.engine" in note


def test_a_fine_tuning_is_copied_too(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=models/qwen "
        "trainer.default_hdfs_dir=hdfs://nn/x"
    )
    migration = migrate_verl_sft(read_verl([tmp_path / "run.sh"], {}).found)
    assert ours(migration)["run.copy_to"] == "hdfs://nn/x"


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=8", {"resources.ranks": 16, "resources.nodes": 2}),
        ("torchrun --standalone --nnodes=1 --nproc_per_node=4", {"resources.ranks": 4}),
        ("accelerate launch --num_processes 6", {"resources.ranks": 6}),
        ("deepspeed --num_gpus 3", {"resources.ranks": 3}),
    ],
)
def test_processes_of_a_fine_tuning_are_counted_over_machines(
    tmp_path: Path, launch: str, expected: dict[str, int]
) -> None:
    (tmp_path / "run.sh").write_text(
        f"{launch} -m verl.trainer.sft_trainer model.path=models/qwen engine=fsdp optim=fsdp "
        "trainer.test_freq=after_each_epoch trainer.save_freq=50"
    )
    migration = migrate_verl_sft(read_verl([tmp_path / "run.sh"], {}).found)
    assert migration.open_rows == ()
    found = ours(migration)
    assert {key: found[key] for key in found if key in ("resources.ranks", "resources.nodes")} == expected
    assert found["run.save_every"] == 50
    assert "eval.every" not in found
    assert row(migration, "trainer.test_freq") == ("refused", "say it in steps: eval.every")
    config_of(Config, migration.values)


def test_a_sampler_class_is_told_how_it_works_here(tmp_path: Path) -> None:
    note = row(settings(tmp_path, "data.sampler.class_name=Mine"), "data.sampler.class_name")[1]
    assert "@register_sampler(NAME) of strop.data" in note


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("ppo_trainer.yaml", "not needed"),
        ("fully_async_ppo_trainer.yaml", "not needed"),
        ("one_step_off_ppo_trainer", "not needed"),
        ("ppo_megatron_trainer.yaml", "translated"),
        ("mine.yaml", "unresolved"),
    ],
)
def test_files_of_verl_by_name(tmp_path: Path, name: str, status: str) -> None:
    found = row(settings(tmp_path, f"--config-name={name}"), "--config-name")
    assert found[0] == status
    assert ".yaml.yaml" not in found[1]


@pytest.mark.parametrize(
    ("settings_there", "roles"),
    [
        ("algorithm.adv_estimator=grpo", {"actor"}),
        (f"algorithm.adv_estimator=grpo {A}.use_kl_loss=True", {"actor", "reference"}),
        ("reward_model.enable=True reward_model.model.path=r", {"actor", "critic", "reward_model"}),
    ],
)
def test_the_file_of_megatron_runs_is_about_every_role(
    tmp_path: Path, settings_there: str, roles: set[str]
) -> None:
    values = ours(settings(tmp_path, f"--config-name=ppo_megatron_trainer {settings_there}"))
    assert {key.partition(".")[0] for key, value in values.items() if value == "megatron"} == roles


def test_fully_asynchronous_training_validates_by_updates_of_the_weights(tmp_path: Path) -> None:
    migration = settings(
        tmp_path,
        f"algorithm.adv_estimator=grpo {R}.n=16 {A}.ppo_mini_batch_size=32 {M}.path=m rollout.nnodes=1 "
        "rollout.n_gpus_per_node=4 rollout.total_rollout_steps=51200 rollout.test_freq=10 trainer.test_freq=-1 "
        "trainer.n_gpus_per_node=4 async_training.staleness_threshold=0.5 "
        "async_training.trigger_parameter_sync_step=4 async_training.require_batches=1 data.train_batch_size=0",
    )
    assert migration.open_rows == ()
    values = migration.values
    assert values["eval"]["every"] == 10
    # 4 updates of one mini-batch of 32 prompts between two updates of the rollout's weights.
    assert values["data"]["prompts_per_step"] == 128
    assert values["trainer"]["max_steps"] == 51200 // 128
    assert values["resources"]["apart"] == {"rollout": 4}
