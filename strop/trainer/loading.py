"""The configuration of a run: read, with the files of the user's own that its names come from imported, and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from strop.algorithms.registry import load_extensions
from strop.config import ConfigError, build_config, load_layers, read_config
from strop.config.unknown_key import KeyAliases
from strop.trainer.config import Config
from strop.utils.trust import may_run


def load(
    source: str | Path | None = None,
    *,
    text: str | None = None,
    overrides: Sequence[str] = (),
    section: str = "",
    in_shell: bool = True,
    aliases: KeyAliases | None = None,
) -> Config:
    """As `strop.config.load_layers`, for the configuration of a run; `section` is that of the command, where it has
    one.

    Raises:
        ConfigError: also where a file of algorithm.extensions cannot be imported.
    """
    return load_and_tell(
        source, text=text, overrides=overrides, section=section, in_shell=in_shell, aliases=aliases
    )[0]


def load_and_tell(
    source: str | Path | None = None,
    *,
    text: str | None = None,
    overrides: Sequence[str] = (),
    section: str = "",
    in_shell: bool = True,
    aliases: KeyAliases | None = None,
) -> tuple[Config, Callable[[str], str]]:
    """As `load`, with a function from a full key to where its value comes from."""
    layers = load_layers(
        Config,
        source=source,
        text=text,
        overrides=overrides,
        section=section,
        in_shell=in_shell,
        aliases=aliases,
    )
    return with_extensions(build_config(Config, layers)), layers.source_of


def read(path: str | Path, *, text: str | None = None) -> Config:
    """The configuration that `save_config` wrote.

    Raises:
        ConfigError: as `load`.
    """
    return with_extensions(read_config(Config, path, text=text))


def with_extensions(config: Config) -> Config:
    """The same configuration once its extensions are imported, and its names checked against what they register.

    Settings that are only looked at (strop.utils.trust) stay as they are: what they name is not imported.

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
