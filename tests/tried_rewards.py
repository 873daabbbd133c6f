"""Reward functions that a process of pytest has seen to load, for the conftest of rooms whose tests start many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.config.sections import code_of
from strop.rewards import RewardConfig
from strop.trainer import named_files
from strop.utils.trust import ask

_results: dict[tuple[object, ...], bool] = {}


@pytest.fixture(autouse=True)
def rewards_are_tried_once() -> Iterator[None]:
    """Before a run starts, its reward functions are loaded in a process that ends at once; it starts others for its
    samples. The same files and settings load again as they did, which took most of a tenth of a second in each run.

    Not for tests that change what such files import, or the environment: nobody looks at these here.
    """
    load = named_files.try_loading

    async def load_once(config: RewardConfig) -> bool:
        for reference in code_of(config, "reward"):
            ask(reference.key, reference.value)
        paths = [config.path, *(function.path for function in config.functions)]
        key = (repr(config), Path.cwd(), *map(_content, paths))
        if key not in _results:
            _results[key] = await load(config)  # an error is not kept
        return _results[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_files, "try_loading", load_once)
        yield


def _content(path: str) -> bytes:
    """Of a file that can be read; what it is else, the run itself finds out."""
    try:
        return Path(path).read_bytes() if Path(path).is_file() else b""
    except OSError:
        return b""
