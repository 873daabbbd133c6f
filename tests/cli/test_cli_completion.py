"""`strop completion`: what the shell is told, and the sentence where the library is missing."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import select
import shutil
import signal
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


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], []),
    "zsh": (["zsh", "-f", "-i"], ["autoload -Uz compinit; compinit -u -D"]),
}
"""How each is started without a person's settings, and what it is told first."""


def typed(shell: str, lines: list[str], folder: Path) -> str:
    """What a shell on a terminal shows, with the Tab key at the end of each line; the line that comes of it in [ ]."""
    program, first = SHELLS[shell]
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(path), "TERM": "dumb", "PS1": "$ ", "EDITOR": "emacs"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(program[0], program, env)
    told = [
        *first,
        f'eval "$(strop completion {shell})"',
        *(f'{line}\t\x01echo "[\x05]"' for line in lines),
        "exit",
    ]
    os.write(terminal, "".join(f"{line}\n" for line in told).encode())
    shown = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the shell has left its terminal
            break
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_commands_options_files_settings_and_presets(
    shell: str, tmp_path: Path
) -> None:
    pytest.importorskip("argcomplete", reason="strop[completion] is not installed")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "config.yaml").touch()
    completed = {
        "strop exp": "strop export",
        "strop train --resu": "strop train --resume",
        "strop push runs/x --dt": "strop push runs/x --dtype",
        "strop train --config conf": "strop train --config config.yaml",
        "strop train data.train_f": "strop train data.train_files=",
        "strop train trainer.preflight=t": "strop train trainer.preflight=true",
        "strop train algorithm=dr_": "strop train algorithm=dr_grpo",
    }
    shown = typed(shell, [*completed, "strop tra\t"], tmp_path)
    lines = re.findall(r"^\[(strop [^\]]*)\]", shown, re.MULTILINE)
    assert [line.rstrip() for line in lines[: len(completed)]] == list(completed.values()), shown
    assert re.search(r"track +train", shown), "several are listed"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_own_text(shell: str) -> None:
    library = importlib.util.find_spec("argcomplete")
    if library is None:
        pytest.skip("strop[completion] is not installed")
    text = cli("completion", shell).out
    assert "strop" in text
    assert ("complete" if shell == "fish" else "compdef") in text
