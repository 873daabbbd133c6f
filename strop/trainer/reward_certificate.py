"""The certificate of a reward, kept beside its file by `strop reward check --save`, in the log of runs that use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.rewards import RewardConfig
from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.utils.atomic_io import replace_text, sha256_of_file
from strop.utils.safe_read import open_regular

EVENT = "reward_check"
_MAX_BYTES = 1 << 20


def certificate_path(reward: Path, name: str) -> Path:
    """`reward.compute_score.check.json` beside `reward.py`."""
    return reward.with_name(f"{reward.stem}.{name}.check.json")


def save_certificate(reward: Path, name: str, certificate: dict[str, Any]) -> Path:
    """Keep it beside the file, with the sha256 of the file that it is about."""
    path = certificate_path(reward, name)
    replace_text(path, json.dumps({"sha256": sha256_of_file(reward), **certificate}, indent=2) + "\n")
    return path


def note_certificate(config: Config, run: RunFolder, say: Reporter) -> None:
    """A record for each function of the run that was checked, and a line with its verdict."""
    for path, name in _files(config.reward):
        report = _read(certificate_path(path, name))
        if report is None:
            continue
        is_current = report.get("sha256") == sha256_of_file(path)
        verdict = report.get("verdict") if is_current else "unchecked"
        run.events.append(
            EVENT, 0, fsync=True, reward=f"{path}:{name}", verdict=verdict, certificate=report if is_current else None
        )  # fmt: skip
        if not is_current:
            say(f"reward {path}:{name} has changed since it was checked; `strop reward check` tries it again")
        else:
            details = "" if verdict == "ok" else f": {certificate_path(path, name)} says why"
            say(f"reward {path}:{name} was found {verdict}{details}")


def _files(reward: RewardConfig) -> list[tuple[Path, str]]:
    files = [(reward.path, reward.name), *((function.path, function.name) for function in reward.functions)]
    return [(Path(path), name) for path, name in files if path and not reward.manager]


def _read(path: Path) -> dict[str, Any] | None:
    """A saved certificate; None where there is none, or a file that is no such thing."""
    if not path.is_file():
        return None
    with open_regular(path) as file:
        try:
            content = json.loads(file.read(_MAX_BYTES))
        except (ValueError, RecursionError):
            return None
    return content if isinstance(content, dict) else None
