"""The configuration of a run: read, with the files of the user's own that its names come from imported, and checked.

What it would run, import, start or contact is listed too, for settings that somebody else may have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strop.algorithms.registry import load_extensions
from strop.base.elsewhere import fetched
from strop.base.sections import code_of_guests
from strop.base.trust import Named, may_run
from strop.config import ConfigError, build_config, load_layers, read_config
from strop.trainer.config import Config
from strop.trainer.models import models_elsewhere


def load(
    source: str | Path | None = None, *, text: str | None = None, overrides: Sequence[str] = ()
) -> Config:
    """As `strop.config.load_config`, for the configuration of a run.

    Raises:
        ConfigError: also where a file of algorithm.extensions cannot be imported.
    """
    return load_and_tell(source, text=text, overrides=overrides)[0]


def load_and_tell(
    source: str | Path | None = None, *, text: str | None = None, overrides: Sequence[str] = ()
) -> tuple[Config, Callable[[str], str]]:
    """As `load`, with a function from a full key to where its value comes from."""
    layers = load_layers(Config, source=source, text=text, overrides=overrides)
    return with_extensions(build_config(Config, layers)), layers.source_of


def read(path: str | Path, *, text: str | None = None) -> Config:
    """The configuration that `save_config` wrote.

    Raises:
        ConfigError: as `load`.
    """
    return with_extensions(read_config(Config, path, text=text))


def with_extensions(config: Config) -> Config:
    """The same configuration once its extensions are imported, and its names checked against what they register.

    Settings that are only looked at (strop.base.trust) stay as they are: what they name is not imported.

    Raises:
        ConfigError: a file cannot be imported, or the settings do not go together.
    """
    if config.algorithm.extensions and may_run("algorithm.extensions"):
        try:
            load_extensions(config.algorithm.extensions)
            config.check()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return config


def code_named(config: Config) -> Iterator[Named]:
    """Everything that running with these settings would execute or contact beside strop and its packages.

    Plain files that are only read, such as data and model folders, are not among them.
    """
    for path in config.algorithm.extensions:
        yield Named(key="algorithm.extensions", value=path, path=path)
    for key, text in models_elsewhere(config):
        yield Named(key=key, value=f"{text} (fetched)")
    if config.model.trust_remote_code:
        yield Named(key="model.trust_remote_code", value=f"true (the code in {config.model.path})")
    if config.model.external_lib:
        yield Named(key="model.external_lib", value=f"{config.model.external_lib} (imported)")
    yield from _of_data(config)
    yield from code_of_guests(config, "")
    yield from code_of_guests(config.rollout, "rollout")
    yield from config.agent.code_named()
    yield from config.reward.code_named()
    if config.run.copy_to:
        yield Named(key="run.copy_to", value=f"{config.run.copy_to} (gets the checkpoints)")
    if config.resources.address:
        yield Named(key="resources.address", value=f"{config.resources.address} (a Ray cluster)")


def _of_data(config: Config) -> Iterator[Named]:
    yield from code_of_guests(config.data, "data")
    if config.data.cache_dir:
        yield Named(key="data.cache_dir", value=f"{config.data.cache_dir} (old entries of it are removed)")
    for key, files in (
        ("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files),
    ):  # fmt: skip
        for entry in fetched(files):
            yield Named(key=key, value=f"{entry} (fetched)")


def is_elsewhere(named: Named) -> bool:
    """A relative path: which file it means depends on the current directory."""
    return bool(named.path) and not Path(named.path).expanduser().is_absolute()
