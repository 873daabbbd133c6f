"""OpenRLHF's launch scripts: what is read from them, and what follows from several flags."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from strop.compat.migration import migrate_openrlhf, read_openrlhf
from strop.compat.migration.flags import Flags

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
            "python -m openrlhf.cli.train_dpo --pretrain a",
            "starts train_dpo, which strop has no counterpart of",
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
