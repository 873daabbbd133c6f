"""`strop completion`: what the shell is told, and the sentence where the library is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import cli

from strop.cli.completion import settings


def test_settings_are_completed_as_keys_presets_and_values() -> None:
    assert [one for one in settings("data.tr") if one.startswith("data.tr")] == [
        "data.train_files=",
        "data.truncation=",
    ]
    assert "algorithm=" in settings("alg")
    assert "algorithm=dr_grpo" in settings("algorithm=")
    assert list(settings("trainer.preflight=t")) == ["trainer.preflight=true", "trainer.preflight=false"]
    assert list(settings("reward.on_failure.error=")) == [
        f"reward.on_failure.error={value}" for value in ("exclude", "fixed", "retry")
    ]
    assert list(settings("data.max_prompt_tokens=")) == [], "any number"


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert "pip install 'strop[completion]'" in cli("completion", "bash").sentence


@pytest.mark.slow
def test_bash_completes_commands_options_and_settings(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete", reason="strop[completion] is not installed")
    asked = [
        "strop tr",
        "strop train --res",
        "strop train algorithm=dr_",
        "strop push runs/x --dt",
        "strop exp",
    ]
    script = f"""
cd {tmp_path}
eval "$(strop completion bash)"
COMP_WORDBREAKS=$' \\t\\n"\\x27><=;|&(:'
while read -r line; do
    COMP_LINE="$line"; COMP_POINT=${{#line}}; COMPREPLY=()
    _python_argcomplete strop
    echo "${{COMPREPLY[@]}}"
done
"""
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-c", script], input="\n".join(asked) + "\n", capture_output=True, text=True, timeout=120,
        env={**os.environ, "PATH": os.pathsep.join(path)}, check=True,
    )  # fmt: skip
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["train", "track"], ["--resume"], ["dr_grpo"], ["--dtype"], ["export"]
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_own_text(shell: str) -> None:
    library = importlib.util.find_spec("argcomplete")
    if library is None:
        pytest.skip("strop[completion] is not installed")
    text = cli("completion", shell).out
    assert "strop" in text
    assert ("complete" if shell == "fish" else "compdef") in text
