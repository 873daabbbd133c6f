"""Every command over damaged and hostile run folders: one sentence within a deadline, and never a traceback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from cli_calls import Project, Result, cli
from hostile_folders import KINDS

DEADLINE_S = 60
"""Of one command; far above what it needs, so that only what never ends is caught."""
COMMANDS = {
    "samples": ["samples", "RUN"],
    "dropped": ["samples", "RUN", "--why-dropped"],
    "tokens": ["samples", "RUN", "--tokens", "--limit", "1"],
    "diff": ["diff", "RUN", "GOOD"],
    "doctor": ["doctor", "RUN"],
    "show": ["config", "show", "--config", "RUN/config.yaml"],
    "config-diff": ["config", "diff", "RUN", "GOOD"],
    "eval": ["eval", "RUN", "data.max_val_prompts=1", "--trust-code"],
    "generate": ["generate", "RUN", "--prompts", "QUESTIONS", "--max-tokens", "2"],
    "export": ["export", "RUN", "OUT"],
    "score": ["score", "same", "RUN", "--limit", "2", "--trust-code"],
    "resume": ["train", "--resume", "RUN", "--trust-code"],
}
QUICK = {
    "config_yaml_": ("fifo dev_zero a_terabyte deep not_utf8 link_loop", "show generate"),
    "yaml_": ("bomb bomb_of_merges that_holds_itself python_object", "show"),
    "config_wrong_": ("model_path data_train_files resources", "show generate"),
    "run_json_": ("fifo a_terabyte deep socket only_format wrong_command", "samples diff"),
    "events_": (
        """jsonl_fifo jsonl_a_terabyte jsonl_deep step_text issued_huge settled_flat restored_list fingerprint_list
        finished_bare validation_bare""",
        "dropped resume",
    ),
    "metrics_": ("jsonl_fifo jsonl_dev_zero values_nested value_huge step_true", "doctor"),
    "manifest_": ("is_a_list leads_to_dev_zero names_nul deep has_a_ledger_of_text fifo", "generate resume"),
    "a_": ("shard_fifo", "export"),
    "checkpoint": ("_of_an_absurd_step s_is_a_link_loop", "generate"),
    "weights_": ("garbage header_beyond_the_file shape_huge offsets_negative fifo", "generate"),
    "model_config_": (
        "hidden_size_huge num_layers_huge hidden_size_text a_list auto_map fifo deep quantized_wrong_groups",
        "generate",
    ),
    "tokenizer_": ("broken deep fifo config_auto_map config_max_length_text", "generate"),
    "generation_config_": ("list words", "generate"),
    "pickle": ("d_weights_only _that_runs_code", "generate"),
    "an_adapter_": ("that_leads_elsewhere", "generate"),
    "shard_": ("header_beyond_the_file offsets_words", "export"),
    "state_": ("world_huge tensors_bare shape_text", "export"),
    "samples_": (
        """fifo a_terabyte garbage footer_lies other_schema no_rows id_null reward_parts_no_json messages_wrong
        messages_deep prompt_ids_lists""",
        "samples",
    ),
    "lock_": ("is_a_fifo is_a_link_out garbage", "resume"),
}  # fmt: skip
"""Kinds by the beginning of their names, and the commands that meet them, for the default tests."""
PAIRS = [
    (first + rest, command)
    for first, (names, commands) in QUICK.items()
    for rest in names.split()
    for command in commands.split()
]


class OverDeadline(BaseException):
    """The command did not end; no handler of errors may take it for one of its own."""


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OverDeadline

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ended(kind: str, command: str, good: Path, folder: Path) -> Result:
    """What a command says of such a folder."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(good, run, symlinks=True)
    KINDS[kind](run)
    (folder / "questions.txt").write_text("1 + 1\n")
    places = {"RUN": run, "GOOD": good, "QUESTIONS": folder / "questions.txt", "OUT": folder / "out"}
    words = []
    for word in COMMANDS[command]:
        head, slash, rest = word.partition("/")
        words.append(f"{places[head]}{slash}{rest}" if head in places else word)
    with deadline():
        return cli(*words)


def check(result: Result, kind: str, command: str) -> None:
    assert result.code in (0, 1, 2), (kind, command, result)
    if result.code == 2:
        assert result.sentence.startswith(("strop ", "  - ")), (kind, command, result.err)
        assert len(result.sentence) < 2000


@pytest.mark.parametrize(("kind", "command"), PAIRS)
def test_one_sentence(kind: str, command: str, interrupted: Path, tmp_path: Path) -> None:
    check(ended(kind, command, interrupted, tmp_path), kind, command)
    assert not (tmp_path / "ran-code").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_commands_over_all_kinds(kind: str, interrupted: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        check(ended(kind, command, interrupted, tmp_path), kind, command)


@pytest.mark.parametrize(
    ("kind", "command", "expected"),
    [
        ("config_yaml_fifo", "generate", "config.yaml cannot be read: it is a named pipe and no file"),
        ("config_yaml_a_terabyte", "generate", "it has 1,048,576.0 MiB, and at most"),
        ("config_yaml_deep", "show", "it is nested more than 100 levels deep"),
        ("yaml_bomb", "show", "its aliases stand for more than 200000 values"),
        ("yaml_that_holds_itself", "show", "a value contains itself"),
        ("run_json_fifo", "samples", "it is a named pipe and no file"),
        ("run_json_deep", "samples", "run.json is damaged (it is nested more than 100 levels deep)"),
        ("events_jsonl_dev_zero", "dropped", "cannot read the event log"),
        ("events_settled_flat", "dropped", "is no event record"),
        ("manifest_leads_out", "generate", "which is not in the checkpoint"),
        ("a_file_of_the_manifest_fifo", "generate", "pipe: it is a named pipe and no file"),
        ("pickled_weights_only", "generate", "has its weights as pickles only (pytorch_model.bin)"),
        ("an_adapter_that_leads_elsewhere", "generate", "its weights are those of another model"),
        ("model_config_auto_map", "generate", "it names code of its own, which is run only with"),
        (
            "model_config_num_layers_huge",
            "generate",
            "num_hidden_layers is 10000000, and no model is built with more than 4096",
        ),
        ("tokenizer_broken", "generate", "has no usable tokenizer"),
        pytest.param(
            "samples_that_decompress_to_gigabytes",
            "samples",
            "too much for the memory here",
            marks=pytest.mark.slow,
        ),
        ("samples_id_null", "samples", "row 0: it has no id"),
        (
            "config_yaml_missing",
            "resume",
            "has lost its config.yaml: the run did begin, so restore that file",
        ),
        ("lock_is_a_link_out", "resume", "lock is a link, and a run is written in its own folder"),
    ],
)
def test_what_is_said(kind: str, command: str, expected: str, interrupted: Path, tmp_path: Path) -> None:
    assert expected in ended(kind, command, interrupted, tmp_path).err


def test_a_link_out_of_the_folder_is_not_written_to(interrupted: Path, tmp_path: Path) -> None:
    ended("lock_is_a_link_out", "resume", interrupted, tmp_path)
    assert (tmp_path / "victim").read_text() == "precious"


def test_checkpoints_of_another_run_are_not_removed_through_a_link(interrupted: Path, tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    shutil.copytree(interrupted, other, symlinks=True)
    shutil.copytree(interrupted, run, symlinks=True)
    (run / "checkpoints" / "global_step_7").symlink_to(other / "checkpoints" / "global_step_1")
    assert cli("train", "--resume", run).code == 0
    assert (other / "checkpoints" / "global_step_1" / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_files_that_another_user_may_not_read(interrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(interrupted, run, symlinks=True)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    for name in ("events.jsonl", "run.json", "metrics.jsonl"):
        (run / name).chmod(0)
        for words in (["samples", run], ["doctor", run], ["diff", run, run]):
            command = [
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                sys.executable,
                "-m",
                "strop.cli.main",
            ]
            done = subprocess.run(
                [*command, *map(str, words)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                cwd="/",
            )
            assert "Traceback" not in done.stderr, done.stderr
            assert done.returncode in (0, 2), done.stderr
        (run / name).chmod(0o644)


# --------------------------------------------------------------------------------------- files of data and settings


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "loop", "listening", "sparse"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_data_files_that_are_no_files(project: Project, tmp_path: Path, kind: str, suffix: str) -> None:
    import hostile_folders

    path = tmp_path / f"rows{suffix}"
    path.write_text("x")
    getattr(hostile_folders, kind)(path)
    with deadline():
        assert cli("data", "check", path, "--model", project.model).code == 2


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("rows.jsonl", f'{{"prompt": {DEEP}', "line 1 of"),
        ("rows.json", DEEP, "it is nested more than 100 levels deep"),
        ("rows.jsonl", "", "has no rows"),
        ("rows.parquet", "", "cannot be read as parquet"),
    ],
)
def test_data_files_of_hostile_content(
    project: Project, tmp_path: Path, name: str, content: str, expected: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert expected in cli("data", "check", path, "--model", project.model).sentence


def test_a_mark_in_front_of_utf8_is_no_content(project: Project, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1 + 1", "data_source": "x"}\n')
    assert "train: 1 row\n" in cli("data", "check", path, "--model", project.model).out


@pytest.mark.parametrize("words", [["train", "--config", "PIPE"], ["generate", "MODEL", "--prompts", "PIPE"]])
def test_a_pipe_in_place_of_settings_or_prompts(project: Project, tmp_path: Path, words: list[str]) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    places = {"PIPE": str(pipe), "MODEL": str(project.model)}
    with deadline():
        result = cli(*(places.get(word, word) for word in words))
    assert "it is a named pipe and no file" in result.sentence


def test_a_pipe_in_place_of_a_reward_file(project: Project, tmp_path: Path) -> None:
    pipe = tmp_path / "reward.py"
    os.mkfifo(pipe)
    with deadline():
        result = cli("train", "--config", project.config, "--out", tmp_path / "run", f"reward.path={pipe}")
    assert "it is a named pipe and no file" in result.sentence
