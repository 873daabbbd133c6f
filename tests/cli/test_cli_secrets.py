"""Keys and passwords among settings: no command shows one, and no file of strop's holds one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from cli_calls import Project, Result, cli

KEY = "Opensesame-0123456789"
WANDB = "0123456789abcdef0123456789abcdef01234567"


def said(result: Result) -> str:
    return result.out + result.err


@pytest.mark.parametrize(
    "words",
    [
        ("config", "show", f"reward.kwargs.api_key={KEY}"),
        ("config", "show", "--json", f"reward.kwargs.api_key={KEY}"),
        ("config", "show", "--resolved", f"reward.kwargs.api_key={KEY}"),
        ("config", "show", "--docs", f"reward.kwargs={{api_key: {KEY}}}"),
        ("config", "show", f"trainer.api_key={KEY}"),
        ("config", "show", f"reward.kwargs.api_key=[{KEY}"),
        ("config", "explain", "reward.kwargs", f"reward.kwargs.api_key={KEY}"),
        ("train", f"reward.kwargs.password={KEY}", "--out", "NOWHERE"),
    ],
)
def test_a_key_of_the_command_line_is_not_repeated(words: tuple[str, ...], tmp_path: Path) -> None:
    out = said(cli(*(str(tmp_path / "run") if word == "NOWHERE" else word for word in words)))
    assert out
    assert KEY not in out
    assert not list(tmp_path.iterdir())


def test_a_key_in_a_file_is_not_repeated(tmp_path: Path) -> None:
    for name, key in (("a", KEY), ("b", f"{KEY}x")):
        (tmp_path / f"{name}.yaml").write_text(f"reward: {{kwargs: {{api_key: {key}}}}}\n")
    (tmp_path / "c.yaml").write_text(
        f"reward: {{kwargs: {{api_key: {KEY}}}, timeout_s: {{password: {KEY}}}}}\n"
    )
    shown = cli("config", "show", "--config", tmp_path / "a.yaml")
    assert "api_key: [redacted]" in shown.out
    differ = cli("config", "diff", tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert 'reward.kwargs.api_key: "[redacted]" and' in differ.out
    wrong = cli("config", "show", "--config", tmp_path / "c.yaml")
    assert "reward.timeout_s" in wrong.err
    assert KEY not in said(shown) + said(differ) + said(wrong)


def test_a_run_with_a_key_among_its_settings_is_refused(project: Project, tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused = cli("train", "--config", project.config, "--out", out, f"reward.kwargs.api_key={KEY}")
    assert "reward.kwargs.api_key holds a secret, and settings are written into" in refused.sentence
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_holds_a_key_does_not_show_it(trained: Path, tmp_path: Path) -> None:
    """As one does that was written before they were refused."""
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / name, symlinks=True)
        for file in ("run.json", "config.yaml"):
            path = tmp_path / name / file
            tree = yaml.safe_load(path.read_text())
            (tree["config"] if file == "run.json" else tree)["reward"]["kwargs"] = {"api_key": f"{KEY}{name}"}
            path.write_text(json.dumps(tree))
    for words in (
        ("config", "show", "--config", tmp_path / "a" / "config.yaml"),
        ("config", "diff", tmp_path / "a", tmp_path / "b"),
        ("diff", tmp_path / "a", tmp_path / "b"),
        ("incident", tmp_path / "a"),
        ("runs", tmp_path),
    ):
        shown = cli(*words)
        assert said(shown)
        assert KEY not in said(shown), words


FLAGS = "--pretrain models/qwen --prompt_data data.jsonl --remote_rm_url reward.py"


@pytest.mark.parametrize(
    ("library", "script", "row"),
    [
        (
            "openrlhf",
            f"python3 -m openrlhf.cli.train_ppo_ray {FLAGS} --use_wandb {WANDB}",
            "use_wandb=[redacted]",
        ),
        (
            "openrlhf",
            f"KEY={WANDB}\npython3 -m openrlhf.cli.train_ppo_ray {FLAGS} --logger.wandb.key=$KEY",
            "logger.wandb.key=[redacted]",
        ),
        (
            "openrlhf",
            f"python3 -m openrlhf.cli.train_ppo_ray {FLAGS} --use_wandb short",
            "use_wandb=[redacted]",
        ),
        (
            "verl",
            (
                "python3 -m verl.trainer.main_ppo custom_reward_function.path=r.py "
                f"+custom_reward_function.reward_kwargs.api_key={KEY}"
            ),
            "custom_reward_function.reward_kwargs.api_key=[redacted]",
        ),
        ("verl", f"python3 -m verl.trainer.main_ppo +trainer.api_key={KEY}", "trainer.api_key=[redacted]"),
        (
            "trl",
            (
                "from trl import SFTConfig, SFTTrainer\n"
                f"args = SFTConfig(output_dir='o', hub_token='{KEY}')\n"
                "SFTTrainer(model='models/qwen', args=args).train()\n"
            ),
            "hub_token=[redacted]",
        ),
        (
            "trl",
            (
                "from trl import SFTConfig, SFTTrainer\n"
                f"args = SFTConfig(output_dir='o', model_init_kwargs={{'token': '{KEY}'}})\n"
                "SFTTrainer(model='models/qwen', args=args).train()\n"
            ),
            'model_init_kwargs={"token": "[redacted]"}',
        ),
    ],
)
def test_a_key_in_a_script_is_neither_shown_nor_written(
    library: str, script: str, row: str, tmp_path: Path
) -> None:
    (tmp_path / ("train.py" if library == "trl" else "train.sh")).write_text(script)
    (file,) = tmp_path.iterdir()
    out = tmp_path / "out.yaml"
    made = cli("migrate", library, file, "--out", out, "--keep-going", "--json")
    assert row in made.out
    for key in (KEY, WANDB, "=short"):
        assert key not in said(made) + out.read_text()


@pytest.mark.parametrize(
    ("library", "script", "row"),
    [
        (
            "openrlhf",
            f"python3 -m openrlhf.cli.train_ppo_ray {FLAGS} --use_wandb $WANDB_TOKEN",
            "-> trainer.trackers",
        ),
        (
            "verl",
            (
                "python3 -m verl.trainer.main_ppo custom_reward_function.path=r.py "
                "+custom_reward_function.reward_kwargs.api_key=$JUDGE_KEY"
            ),
            "a secret is not written into a file",
        ),
    ],
)
def test_a_key_that_is_not_known_is_not_asked_for(
    library: str, script: str, row: str, tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(script)
    made = cli("migrate", library, tmp_path / "train.sh")
    assert row in made.out
    assert "--set" not in said(made)
    assert "not read" not in made.out


def test_a_key_beside_a_script_is_refused(tmp_path: Path) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "out.yaml"
    script.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {FLAGS} --use_wandb $MINE")
    own = cli("migrate", "openrlhf", script, "--out", out, f"reward.kwargs.api_key={KEY}")
    assert "reward.kwargs.api_key holds a secret" in own.sentence
    given = cli("migrate", "openrlhf", script, "--set", f"MINE={WANDB}", "--out", out)
    assert "use_wandb=[redacted]" in given.out
    assert KEY not in said(own)
    assert WANDB not in said(given) + out.read_text()
