"""The examples' own files: what prepare.py writes is scored as the config says, and the config loads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_files import REPO, load_example, read

from strop.cli.commands.sft import READS
from strop.cli.unused_keys import OF_TRAINING, Reads, unread_of_file
from strop.config import load_config
from strop.protocol.trajectory import Prompt
from strop.rewards import Outcome, RewardConfig, RewardPool
from strop.trainer.config import Config

pytestmark = pytest.mark.timeout(120)


def score_rows(config: RewardConfig, rows: list[dict[str, Any]], texts: list[str]) -> list[Outcome]:
    prompts = [
        Prompt(
            uid=f"val-{number:06d}",
            row=number,
            token_ids=(1,),
            messages=tuple(row["prompt"]),
            data_source=row["data_source"],
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )
        for number, row in enumerate(rows)
    ]

    async def run() -> list[Outcome]:
        async with RewardPool(config) as pool:
            return await asyncio.gather(
                *(pool.score_text(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
            )

    return asyncio.run(run())


def test_arithmetic_rows_are_complete_and_disjoint(tmp_path: Path) -> None:
    counts = load_example("arithmetic/prepare.py").write_data(tmp_path, seed=0, largest=4)
    assert counts == {"train": 22, "val": 3, "sft": 22}
    train, val, sft = (read(tmp_path / f"{name}.parquet") for name in ("train", "val", "sft"))
    asked = [row["prompt"][0]["content"] for row in train + val]
    assert sorted(asked) == sorted(f"{a} + {b} = ?" for a in range(5) for b in range(5))
    assert {row["messages"][0]["content"] for row in sft} == {row["prompt"][0]["content"] for row in train}
    for row in sft:
        user, assistant = row["messages"]
        a, b = user["content"].removesuffix(" = ?").split(" + ")
        assert assistant == {"role": "assistant", "content": str(int(a) + int(b))}


def test_arithmetic_reward_scores_the_rows(tmp_path: Path) -> None:
    load_example("arithmetic/prepare.py").write_data(tmp_path, seed=0, largest=4)
    (row, *_) = read(tmp_path / "val.parquet")
    truth = row["reward_model"]["ground_truth"]
    texts = [truth, f" {truth}\n", f"{truth}.", "-1", "", "1" * 5000]
    outcomes = score_rows(RewardConfig(path=str(REPO / "examples/arithmetic/reward.py")), [row] * 6, texts)
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [outcome.parts["is_number"] for outcome in outcomes] == [True, True, False, True, False, False]


@pytest.mark.parametrize("example", ["arithmetic", "reasoning_gym"])
def test_config_of_the_example_loads(example: str) -> None:
    config = load_config(Config, source=REPO / "examples" / example / "config.yaml")
    assert config.samples_per_step == 256
    if config.reward.path:
        assert (REPO / config.reward.path).is_file()


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("arithmetic/sft.yaml", READS),
        ("arithmetic/config.yaml", OF_TRAINING),
        ("distillation/sft.yaml", READS),
        ("dpo/sft.yaml", READS),
        ("multi_turn_env/sft.yaml", READS),
        ("multi_turn_env/gigpo.yaml", OF_TRAINING),
        ("own_loop/config.yaml", OF_TRAINING),
        ("raft/sft.yaml", READS),
        ("raft/config.yaml", OF_TRAINING),
        ("reasoning_gym/sft.yaml", READS),
        ("reasoning_gym/config.yaml", OF_TRAINING),
        ("tool_calculator/sft.yaml", READS),
        ("tool_calculator/config.yaml", OF_TRAINING),
    ],
)
def test_the_command_of_a_settings_file_reads_all_of_it(name: str, reads: Reads) -> None:
    assert unread_of_file(str(REPO / "examples" / name), reads) == []


@pytest.mark.slow
def test_reasoning_gym_rows_are_scored_by_the_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    prepare = load_example("reasoning_gym/prepare.py")
    prepare.main([
        "spell_backward", "--out", str(tmp_path), "--num-train", "30", "--num-val", "8", "--num-sft", "5",
        "--set", "max_word_len=5",
    ])  # fmt: skip
    train, val, sft = (read(tmp_path / f"{name}.parquet") for name in ("train", "val", "sft"))
    assert (len(train), len(val), len(sft)) == (30, 8, 5)
    asked = [row["prompt"][0]["content"] for row in train + val] + [
        row["messages"][0]["content"] for row in sft
    ]
    assert len(set(asked)) == 43
    words = [json.loads(row["extra_info"]["reasoning_gym"])["metadata"]["word"] for row in val]
    right = score_rows(RewardConfig(num_workers=1), val, [word[::-1] for word in words])
    assert [(outcome.score, outcome.parts["acc"]) for outcome in right] == [(1.0, True)] * 8
    partly = score_rows(RewardConfig(num_workers=1), val, [word[-1] for word in words])
    assert [outcome.score for outcome in partly] == [pytest.approx(1 / len(word)) for word in words]
    assert not any(outcome.parts["acc"] for outcome in partly)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no_such_task"], "reasoning-gym has no task 'no_such_task'; known: "),
        (["chain_sum", "--set", "max_term=3"], "refuses the options {'max_term': 3} of chain_sum"),
        (["chain_sum", "--set", "max_terms"], "'max_terms' has no '='"),
        ([], "name a task"),
        (
            ["chain_sum", "--set", "max_terms=2", "--set", "max_digits=1"],
            "lower --num-val and --num-sft, or widen the task",
        ),
    ],
)
def test_reasoning_gym_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(SystemExit, match="2"):
        load_example("reasoning_gym/prepare.py").main(arguments)
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_prepare_scripts_write_a_model(tmp_path: Path) -> None:
    script = REPO / "examples" / "arithmetic" / "prepare.py"
    subprocess.run([sys.executable, script, "--out", tmp_path / "data"], check=True, timeout=100, cwd=REPO)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        "model", "train.parquet", "val.parquet", "sft.parquet",
    }  # fmt: skip


def test_comparisons_are_of_a_right_and_a_wrong_answer_and_disjoint(tmp_path: Path) -> None:
    counts = load_example("dpo/prepare.py").write_data(tmp_path, seed=0, largest=4)
    assert counts == {"pairs": 88, "val_pairs": 12, "sft": 22}
    train, val = (read(tmp_path / f"{name}.parquet") for name in ("pairs", "val_pairs"))
    for row in train + val:
        a, b = row["prompt"][0]["content"].removesuffix(" = ?").split(" + ")
        assert row["chosen"] == [{"role": "assistant", "content": str(int(a) + int(b))}]
        assert row["rejected"] != row["chosen"]
        assert int(row["rejected"][0]["content"]) >= 0
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in val}


@pytest.mark.parametrize(("name", "loss"), [("dpo", "sigmoid"), ("reward_model", "reward")])
def test_settings_of_the_examples_on_preferences_load(name: str, loss: str) -> None:
    config = load_config(Config, source=REPO / "examples" / name / "config.yaml")
    assert config.prefer.loss == loss  # type: ignore[attr-defined]
