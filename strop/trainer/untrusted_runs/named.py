"""Code, programs and addresses that settings would run, import, start or contact."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from strop.agents.config import AgentConfig
from strop.config.sections import code_below
from strop.trainer.config import Config
from strop.trainer.model_locations import models_elsewhere
from strop.utils.remote_path import fetched
from strop.utils.trust import CodeReference


def code_references(config: Config) -> Iterator[CodeReference]:
    """Everything that running with these settings would execute or contact beside strop and its packages.

    Plain files that are only read, such as data and model folders, are not among them.
    """
    for path in config.algorithm.extensions:
        yield CodeReference(key="algorithm.extensions", value=path, path=path)
    for key, text in models_elsewhere(config):
        yield CodeReference(key=key, value=f"{text} (fetched)")
    if config.model.trust_remote_code:
        yield CodeReference(key="model.trust_remote_code", value=f"true (the code in {config.model.path})")
    if config.model.external_lib:
        yield CodeReference(key="model.external_lib", value=f"{config.model.external_lib} (imported)")
    yield from _of_data(config)
    for name in ("prefer", "teacher", "critic", "prm", "reward_model", "sft"):
        yield from code_below(config, "", name)
    for name in ("openai", "sglang", "vllm", "trace"):
        yield from code_below(config.rollout, "rollout", name)
    yield from of_agents(config.agent)
    yield from code_below(config, "", "reward")
    if config.run.copy_to:
        yield CodeReference(key="run.copy_to", value=f"{config.run.copy_to} (gets the checkpoints)")
    if config.resources.weight_store:
        yield CodeReference(
            key="resources.weight_store", value=f"{config.resources.weight_store} (gets the weights)"
        )
    if config.resources.env:
        yield CodeReference(
            key="resources.env", value=f"{sorted(config.resources.env)} (variables of the environment)"
        )
    if config.resources.address:
        yield CodeReference(key="resources.address", value=f"{config.resources.address} (a Ray cluster)")


def _of_data(config: Config) -> Iterator[CodeReference]:
    for name in ("dataset_class", "datagen"):
        yield from code_below(config.data, "data", name)
    if config.data.cache_dir:
        yield CodeReference(
            key="data.cache_dir", value=f"{config.data.cache_dir} (old entries of it are removed)"
        )
    for key, files in (
        ("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files),
    ):  # fmt: skip
        for entry in fetched(files):
            yield CodeReference(key=key, value=f"{entry} (fetched)")


def of_agents(agent: AgentConfig) -> Iterator[CodeReference]:
    """References of agents: code, programs and addresses beside strop and its packages."""
    for setting in dataclasses.fields(agent):
        if setting.default in ("", ()):
            value = getattr(agent, setting.name)
            for path in [value] if isinstance(value, str) else value:
                if path:
                    yield CodeReference(key=f"agent.{setting.name}", value=path, path=path)
    for name in ("environment", "openai"):
        yield from code_below(agent, "agent", name)


def is_elsewhere(reference: CodeReference) -> bool:
    """A relative path: which file it means depends on the current directory."""
    return bool(reference.path) and not Path(reference.path).expanduser().is_absolute()
