"""What a configuration would run, import, start or contact, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strop.base.sections import guest_sections
from strop.data.sources import HUB_PREFIX, is_url
from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class Named:
    """One thing that a setting names."""

    key: str
    """Full key of the setting."""
    value: str
    """As it stands there, with what becomes of it."""
    path: str = ""
    """The file, where it is one."""


def code_named(config: Config) -> Iterator[Named]:
    """Everything that running with these settings would execute or contact beside strop and its packages.

    Plain files that are only read, such as data and model folders, are not among them.
    """
    for path in config.algorithm.extensions:
        yield Named(key="algorithm.extensions", value=path, path=path)
    if config.model.trust_remote_code:
        yield Named(key="model.trust_remote_code", value=f"true (the code in {config.model.path})")
    yield from _of_data(config)
    yield from _of_agents(config)
    yield from _of_rewards(config)
    if config.resources.address:
        yield Named(key="resources.address", value=f"{config.resources.address} (a Ray cluster)")


def _of_data(config: Config) -> Iterator[Named]:
    chosen = config.data.dataset_class
    if chosen.path:
        yield Named(key="data.dataset_class.path", value=chosen.path, path=chosen.path)
    if config.data.cache_dir:
        yield Named(key="data.cache_dir", value=f"{config.data.cache_dir} (old entries of it are removed)")
    for key, files in (
        ("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files),
        ("sft.data.train_files", config.sft.data.train_files), ("sft.data.val_files", config.sft.data.val_files),
    ):  # fmt: skip
        for entry in files:
            if is_url(entry) or entry.startswith(HUB_PREFIX):
                yield Named(key=key, value=f"{entry} (fetched)")


def _of_agents(config: Config) -> Iterator[Named]:
    for key, path in config.agent.files_named():
        yield Named(key=f"agent.{key}", value=path, path=path)
    for full, section in guest_sections(config.agent, "agent").items():
        for key, value, path in section.code_named():
            yield Named(key=f"{full}.{key}", value=value, path=path)


def _of_rewards(config: Config) -> Iterator[Named]:
    reward = config.reward
    if reward.path:
        yield Named(key="reward.path", value=reward.path, path=reward.path)
    for function in reward.functions:
        if function.path:
            yield Named(key="reward.functions", value=function.path, path=function.path)
    for key, service, address in (
        ("reward.judge.base_url", reward.judge, reward.judge.base_url),
        ("reward.server.url", reward.server, reward.server.url),
    ):
        if address:
            secret = f" and your {service.api_key_env}" if service.api_key_env else ""
            yield Named(key=key, value=f"{address} (gets the answers{secret})")
    sandbox = reward.sandbox
    if sandbox.backend != "local":
        where = sandbox.url or "the hosted service, with your key"
        key = "reward.sandbox.url" if sandbox.url else "reward.sandbox.backend"
        yield Named(key=key, value=f"{sandbox.backend} at {where}")
    if sandbox.python:
        yield Named(key="reward.sandbox.python", value=sandbox.python, path=sandbox.python)
    for path in sandbox.read_only_paths:
        yield Named(
            key="reward.sandbox.read_only_paths", value=f"{path} (shown to programs of the model)", path=path
        )


def is_elsewhere(named: Named) -> bool:
    """A relative path: which file it means depends on the current directory."""
    return bool(named.path) and not Path(named.path).expanduser().is_absolute()
