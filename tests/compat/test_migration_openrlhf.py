"""OpenRLHF's launch scripts: what is read from them, and what follows from several flags."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from strop.compat.migrate import migrate_openrlhf, read_openrlhf
from strop.compat.migrate.flags import Flags

ARRAYS = """\
#!/bin/bash
SAVE=out/${NAME:-run}
CKPT=(
   --pretrain models/qwen   # a comment
   # --reward_pretrain models/rm
   --save_path "${SAVE}/x"
)
set -x
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${CKPT[@]} --eps_clip_low_high 0.2 0.27 --use_kl_loss --actor-learning-rate=5e-7
"""
HELD = """\
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 2048 \\
   --dataset Open-Orca/OpenOrca \\
   --input_key question \\
   --output_key response \\
   --pretrain models/qwen
EOF
    # --wandb [WANDB_TOKENS]
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


def read(folder: Path, text: str, **variables: str) -> Flags:
    (folder / "run.sh").write_text(text)
    return read_openrlhf(folder / "run.sh", variables)


def migrated(folder: Path, flags: str, program: str = "train_ppo_ray") -> dict[str, Any]:
    """Our full keys."""
    migration = migrate_openrlhf(read(folder, f"python3 -m openrlhf.cli.{program} {flags}"))
    return {key: value for row in migration.rows for key, value in row.outcome.ours.items()}


def test_flags_of_arrays_are_read(tmp_path: Path) -> None:
    flags = read(tmp_path, ARRAYS)
    assert flags.program == "train_ppo_ray"
    assert {one.key: one.value for one in flags.found} == {
        "pretrain": "models/qwen",
        "save_path": "out/run/x",
        "eps_clip_low_high": [0.2, 0.27],
        "use_kl_loss": True,
        "actor_learning_rate": 5e-7,
    }


def test_a_command_that_is_held_in_a_variable_is_read(tmp_path: Path) -> None:
    flags = read(tmp_path, HELD)
    assert flags.program == "train_sft"
    ours = {key: value for row in migrate_openrlhf(flags).rows for key, value in row.outcome.ours.items()}
    assert ours["sft.data.train_files"] == ["hub:Open-Orca/OpenOrca@train"]
    assert (ours["sft.data.prompt_key"], ours["sft.data.completion_key"]) == ("question", "response")
    assert (ours["sft.data.max_tokens"], ours["sft.num_epochs"], ours["sft.optim.warmup_share"]) == (
        2048,
        2,
        0.03,
    )
    assert (ours["sft.optim.schedule"], ours["sft.optim.min_lr_ratio"]) == ("cosine", 0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo hello", "has no command that starts a training of OpenRLHF"),
        (
            "python -m openrlhf.cli.train_prm --pretrain a",
            "starts train_prm, which strop has no counterpart of",
        ),
        (
            "python -m openrlhf.cli.train_kd --pretrain a",
            "starts train_kd, whose flags are not translated: .*`strop generate --top-logprobs`",
        ),
        ("python -m openrlhf.cli.train_opd --pretrain a", "with algorithm=on_policy_distillation"),
        (
            "python -m openrlhf.cli.batch_inference --post_processor rs\npython -m openrlhf.cli.train_sft --seed 1",
            r"in turns: that is one run of `strop train` with algorithm=raft",
        ),
        (
            "python -m openrlhf.cli.train_sft --seed 1\npython -m openrlhf.cli.train_sft --seed 2",
            "starts 2 trainings, in lines 1, 2",
        ),
    ],
)
def test_what_starts_no_training_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, text)


def test_without_multiturn_the_last_turn_alone_is_trained(tmp_path: Path) -> None:
    for flags, turns in (("", "last"), ("--multiturn", "all")):
        found = migrated(
            tmp_path, f"--pretrain a --dataset d.jsonl --input_key talk {flags}", program="train_sft"
        )
        assert (found["sft.data.messages_key"], found["sft.data.trained_turns"]) == ("talk", turns)
    found = migrated(tmp_path, "--pretrain a --dataset d.jsonl --output_key b", program="train_sft")
    assert "sft.data.trained_turns" not in found


def test_a_value_that_nothing_says_is_open(tmp_path: Path) -> None:
    migration = migrate_openrlhf(read(tmp_path, "python -m openrlhf.cli.train_sft --pretrain $WHO --bogus 1"))
    assert {(row.key, row.outcome.status) for row in migration.open_rows} == {
        ("pretrain", "unresolved"),
        ("bogus", "unknown"),
    }
    told = read(tmp_path, "python -m openrlhf.cli.train_sft --pretrain $WHO", WHO="models/a")
    assert told.found[0].value == "models/a"


def test_what_it_assumes_and_strop_would_not_is_written_out(tmp_path: Path) -> None:
    ours = migrated(tmp_path, "--pretrain a --prompt_data d.jsonl --remote_rm_url r.py")
    assert ours["algorithm.adv_estimator"] == "gae"
    assert (ours["actor.optim.lr"], ours["critic.optim.lr"]) == (1e-6, 9e-6)
    assert (ours["resources.ranks"], ours["resources.runtime"]) == (8, "ray")
    assert (ours["actor.optim.betas"], ours["critic.optim.weight_decay"]) == ([0.9, 0.95], 0.0)
    assert (ours["algorithm.use_kl_in_reward"], ours["algorithm.kl_ctrl.kl_coef"]) == (True, 0.01)
    assert ours["algorithm.clip_ratio_c"] == math.inf
    assert (ours["data.prompt_key"], ours["data.ground_truth_key"]) == ("input", None)
    assert ours["actor.engine.max_tokens_per_device"] == 4 * 2048


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--init_kl_coef 0", {}),
        (
            "--init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3",
            {
                "algorithm.use_kl_loss": True,
                "algorithm.kl_loss_coef": 1e-3,
                "algorithm.kl_loss_type": "low_var_kl",
            },
        ),
        (
            "--init_kl_coef 1e-3 --kl_estimator k2 --kl_target 6",
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.kl_coef": 1e-3,
                "algorithm.kl_penalty": "mse",
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.target_kl": 6,
                "algorithm.kl_ctrl.horizon": 10000,
            },
        ),
    ],
)
def test_the_kl_term(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    ours = migrated(tmp_path, flags)
    assert {key: value for key, value in ours.items() if "kl" in key} == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--dynamic_filtering", {}),
        (
            "--dynamic_filtering --dynamic_filtering_reward_range 0.1 0.9",
            {"algorithm.filter_groups.lowest_mean": 0.1, "algorithm.filter_groups.highest_mean": 0.9},
        ),
        ("--dynamic_filtering_reward_range 0.1 0.9", None),
    ],
)
def test_dynamic_filtering(tmp_path: Path, flags: str, expected: dict[str, Any] | None) -> None:
    ours = migrated(tmp_path, f"--advantage_estimator group_norm {flags}")
    on = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"}
    wanted = {} if expected is None else {**on, **expected}
    assert {key: value for key, value in ours.items() if "filter" in key} == wanted


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--enable_vllm_is_correction", {"weights": "token", "upper": 2}),
        (
            "--enable_vllm_is_correction --vllm_is_correction_type icepop --vllm_is_truncated_threshold 0.5 5",
            {"weights": "token", "upper": 5, "lower": 0.5, "mode": "mask"},
        ),
    ],
)
def test_the_correction_of_what_vllm_samples(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    ours = migrated(tmp_path, flags)
    start = "algorithm.correction."
    assert {
        key.removeprefix(start): value for key, value in ours.items() if key.startswith(start)
    } == expected


def test_a_reward_model_is_the_reward_where_there_is_no_function(tmp_path: Path) -> None:
    ours = migrated(tmp_path, "--reward_pretrain models/rm")
    assert (ours["reward_model.path"], ours["reward.weight"]) == ("models/rm", 0.0)
    both = migrated(tmp_path, "--reward_pretrain models/rm --remote_rm_url f.py")
    assert "reward_model.path" not in both
    assert (both["reward.path"], both["reward.name"]) == ("f.py", "reward_func")


def test_a_coefficient_that_follows_the_kl_takes_its_horizon(tmp_path: Path) -> None:
    found = migrated(tmp_path, "--kl_target 6 --kl_horizon 500")
    assert (found["algorithm.kl_ctrl.target_kl"], found["algorithm.kl_ctrl.horizon"]) == (6, 500)
    assert "algorithm.kl_ctrl.horizon" not in migrated(tmp_path, "--kl_horizon 500")


DOTTED = "--actor.model_name_or_path m --data.max_len 3072 --rollout.max_new_tokens 1024"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--algo.advantage.estimator reinforce --actor.adam.lr 5e-7 --train.batch_size 64 --rollout.batch_size 32",
         {"model.path": "m", "algorithm.adv_estimator": "reinforce_plus_plus", "actor.optim.lr": 5e-7,
          "actor.samples_per_update": 64, "data.prompts_per_step": 32, "data.max_response_tokens": 1024,
          "data.max_prompt_tokens": 2048, "model.dtype": "bfloat16", "critic.optim.lr": None}),
        # Each role has flags of its own, and defaults of its own.
        ("--actor.adam.betas 0.8 0.9 --critic.adam.weight_decay 0.1 --actor.min_lr_ratio 0.3",
         {"actor.optim.betas": [0.8, 0.9], "critic.optim.betas": [0.9, 0.95], "critic.optim.weight_decay": 0.1,
          "actor.optim.weight_decay": 0.0, "critic.optim.lr": 9e-6, "actor.optim.min_lr_ratio": 0.3,
          "critic.optim.min_lr_ratio": 0.1, "critic.optim.warmup_share": 0.03}),
        ("--algo.advantage.is_correction_level token",
         {"algorithm.correction.weights": "token", "algorithm.correction.mode": "mask",
          "algorithm.correction.lower": 0.5, "algorithm.correction.upper": 5.0}),
        ("--algo.kl.use_loss --algo.kl.init_coef 1e-3 --algo.kl.estimator k3",
         {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 1e-3, "algorithm.kl_loss_type": "low_var_kl"}),
        ("--algo.advantage.is_correction_level seq", {"algorithm.correction.weights": None}),
        ("--ds.tensor_parallel_size 2", {"actor.engine.tensor_parallel": 2}),
        ("--ds.ring_attn_size 2",
         {"actor.engine.context_parallel": 2, "actor.engine.sequence_parallel": None}),
        ("--actor.loss_agg_mode seq-mean-token-mean", {"algorithm.loss_agg_mode": "seq-mean-token-mean"}),
    ],
)  # fmt: skip
def test_flags_with_dots_are_those_of_before(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    found = migrated(tmp_path, f"{DOTTED} {flags}")
    assert {key: found.get(key) for key in expected} == expected


def test_a_flag_with_dots_is_shown_as_it_is_written(tmp_path: Path) -> None:
    migration = migrate_openrlhf(
        read(tmp_path, f"python -m openrlhf.cli.train_ppo_ray {DOTTED} --actor.typo 1")
    )
    assert [row.key for row in migration.rows if row.place != "default"] == [
        "actor.model_name_or_path", "data.max_len", "rollout.max_new_tokens", "actor.typo",
    ]  # fmt: skip
    assert [row.key for row in migration.open_rows] == ["actor.typo"]
    alone = migrate_openrlhf(read(tmp_path, "python -m openrlhf.cli.train_ppo_ray --actor.eps_clip 0.1"))
    (limit,) = (row for row in alone.rows if row.key == "max_len")
    assert "an answer has what its prompt leaves of 2048 tokens there" in limit.outcome.note


def test_fine_tuning_with_dots(tmp_path: Path) -> None:
    flags = "--model.model_name_or_path m --data.dataset a/b --data.dataset_split part --adam.lr 1e-6 --adam.eps 1e-6"
    found = migrated(tmp_path, flags, program="train_sft")
    assert found["sft.data.train_files"] == ["hub:a/b@part"]
    assert (found["sft.optim.lr"], found["sft.optim.eps"], found["model.dtype"]) == (1e-6, 1e-6, "bfloat16")
