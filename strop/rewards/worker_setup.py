"""Setup of worker processes: their limits, and the source of each reward function."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.rewards.config import RewardConfig
from strop.rewards.functions import describe
from strop.rewards.outcome import RewardError
from strop.utils.safe_read import read_text

MAX_SOURCE_BYTES = 2**24
"""Of a Python file."""


def functions_label(config: RewardConfig) -> str:
    """Name of the functions of a run in error sentences."""
    if config.manager:
        return f"{config.manager} in {Path(config.path).name}"
    return ", ".join(
        f"{function.name} in {Path(function.path).name}" if function.path else "the built-in scorer"
        for function in config.functions or (config,)
    )


def function_setups(config: RewardConfig, tokenizer: str) -> list[dict[str, Any]]:
    """Settings from which a worker process loads each function, with the text of its file.

    Raises:
        RewardError: a file is missing or cannot be read.
    """
    if config.functions:
        entries = [
            (function.path, function.name, function.kwargs, function.part, function.weight)
            for function in config.functions
        ]
    else:
        entries = [(config.path, config.name, config.kwargs, "", 1.0)]
    setups = []
    for file, name, kwargs, key, weight in entries:
        path, source = _read_source(file)
        setups.append({
            "path": path, "source": source, "name": name, "kwargs": kwargs, "key": key, "weight": weight,
            "manager": config.manager, "tokenizer": tokenizer, "is_left_out": config.weight == 0,
        })  # fmt: skip
    return setups


def process_setup(config: RewardConfig, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of a worker process; those of its functions are from `function_setups`."""
    limit = config.max_memory_gib
    return {
        "functions": functions,
        "sections": {"reward.sandbox": asdict(config.sandbox)},
        "timeout_s": config.timeout_s,
        "start_timeout_s": config.start_timeout_s,
        "max_concurrent": config.max_concurrent,
        "max_memory_bytes": None if limit is None else int(limit * 2**30),
        "memory_limit": f"; a worker may allocate {limit:g} GiB (reward.max_memory_gib)" if limit else "",
    }


def check_sources(functions: Sequence[Mapping[str, Any]]) -> None:
    """Refuse files that are no Python.

    Raises:
        RewardError: the sentence names the file.
    """
    for function in functions:
        path = function["path"]
        try:
            ast.parse(function["source"], path)
        except (SyntaxError, ValueError) as error:
            raise RewardError(f"reward file {path} cannot be imported: {describe(error, path)}") from error


def _read_source(path: str) -> tuple[str, str]:
    """Absolute path and text of the reward file; two empty strings for the built-in scorers."""
    if not path:
        return "", ""
    file = Path(path).expanduser().resolve()
    if not file.exists() or file.is_dir():
        kind = "a folder" if file.is_dir() else "missing"
        raise RewardError(
            f"reward.path is {path!r}, but {file} is {kind}; name a Python file, relative to the current "
            f"directory"
        )
    try:
        return str(file), read_text(file, limit=MAX_SOURCE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward.path is {path!r}, but it cannot be read: {error}") from error
