"""Reward functions that a process of pytest has seen to load, for the conftest of rooms whose tests start many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.config.sections import code_of
from strop.rewards import RewardConfig
from strop.run import RunFolder
from strop.trainer import loop, named_files
from strop.trainer.api_costs import CostTracker
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.reward_trial import try_reward
from strop.trainer.setup import TrainingData
from strop.utils.trust import ask

_results: dict[tuple[object, ...], bool] = {}
_passed: set[tuple[object, ...]] = set()


@pytest.fixture(autouse=True)
def rewards_are_tried_once() -> Iterator[None]:
    """Before a run starts, its reward functions are loaded in a process that ends at once, and score a few answers in
    another one; it starts others for its samples. The same files and settings load again as they did, and score the
    same answers, which took most of a tenth of a second each in each run. A trial is repeated unless it passed without
    a word.

    Not for tests that change what such files import, or the environment: nobody looks at these here. Those that look at
    what a trial leaves behind ask for `rewards_are_tried`.
    """
    load, attempt = named_files.try_loading, loop.try_reward

    async def load_once(config: RewardConfig) -> bool:
        for reference in code_of(config, "reward"):
            ask(reference.key, reference.value)
        paths = [config.path, *(function.path for function in config.functions)]
        key = (repr(config), Path.cwd(), *map(_content, paths))
        if key not in _results:
            _results[key] = await load(config)  # an error is not kept
        return _results[key]

    def try_once(
        config: Config, data: TrainingData, run: RunFolder, say: Reporter, *, costs: CostTracker | None
    ) -> None:
        reward, files = config.reward, [*config.data.train_files, *config.data.val_files]
        paths = [reward.path, *(function.path for function in reward.functions), *files]
        sizes = config.rollout.samples_per_prompt, config.eval.samples_per_prompt
        settings = repr((reward, config.data, config.agent, config.model.tokenizer_folder))
        key = (settings, sizes, Path.cwd(), *map(_content, paths))
        if key in _passed and costs is None:
            return
        said: list[str] = []
        attempt(config, data, run, lambda line: (said.append(line), say(line))[1], costs=costs)
        if not said:
            _passed.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_files, "try_loading", load_once)
        patch.setattr(loop, "try_reward", try_once)
        yield


@pytest.fixture
def rewards_are_tried(rewards_are_tried_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run tries its rewards, whatever others have seen of them."""
    monkeypatch.setattr(loop, "try_reward", try_reward)


def _content(path: str) -> bytes:
    """Of a file that can be read; what it is else, the run itself finds out."""
    try:
        return Path(path).read_bytes() if Path(path).is_file() else b""
    except OSError:
        return b""
