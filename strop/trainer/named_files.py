"""Files that settings name, checked before anything slow is begun: data, and Python files of the user's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from strop.agents.config import AgentConfig
from strop.config.sections import where_on
from strop.data.config import DataConfig
from strop.data.entries import check_there
from strop.rewards import try_loading
from strop.trainer.config import Config
from strop.trainer.environment import environment_of
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.user_files import load_user_class, load_user_file


def check_named_files(config: Config, command: str) -> None:
    """Refuse data files that are not there, and code that cannot be loaded: no such file, a syntax error, an import
    that fails, no function or class of the name.

    Reward functions are loaded in a process of their own, which ends at once; all other code in this one.

    Args:
        config: of the run, or of an evaluation.
        command: word of the command, such as `train`, `sft` or `eval`.

    Raises:
        ValueError, FileNotFoundError: the sentence says which file, and what is wrong with it.
        RewardError: the reward cannot be loaded.
        UntrustedCode: received settings name code.
    """
    if command in SECTION_OF_COMMAND:
        data = getattr(config, SECTION_OF_COMMAND[command]).data
        check_there([*data.train_files, *data.val_files])
        return
    with environment_of(config.resources):
        _check_rows(config.data, is_trained=command != "eval")
        reward = config.reward
        if reward.path or any(function.path for function in reward.functions):
            # asyncio.run needs a thread of its own: a notebook has a loop in this one.
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(lambda: asyncio.run(try_loading(reward))).result()
        _load_agents(config.agent)


def _check_rows(data: DataConfig, *, is_trained: bool) -> None:
    if data.dataset_class.is_on:
        load_user_class(data.dataset_class.path, data.dataset_class.name, setting="data.dataset_class")
    if is_trained and data.datagen.is_on:
        load_user_class(data.datagen.path, data.datagen.name, setting="data.datagen")
    if where_on(data.dataset_class) is None:  # a class may make anything of the names
        check_there([*(data.train_files if is_trained else ()), *data.val_files])


def _load_agents(config: AgentConfig) -> None:
    if config == AgentConfig():
        return
    from strop.agents.builtin import PLUGINS  # torch: seconds
    from strop.agents.registry import check_agent

    for name in config.files:
        load_user_file(name, setting="agent.files")
    for plugin in PLUGINS.values():
        plugin.load(config)
    check_agent(config.default_agent, "agent.default_agent is")
