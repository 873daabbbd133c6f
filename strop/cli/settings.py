"""Settings on the command line: a file and key=value, the same for every command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.output import UsageError

if TYPE_CHECKING:
    from strop.trainer.config import Config


def add_config_arguments(parser: argparse.ArgumentParser, *, source: str = "") -> None:
    """`--config FILE` and `key=value ...`.

    Args:
        parser: of a command.
        source: where settings come from without --config, for the help.
    """
    default = f" (default: {source})" if source else ""
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with settings, or the name of a preset{default}"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings on top of the file; `strop config show --docs` lists all",
    )


def load_settings(args: argparse.Namespace, *, source: Path | None = None) -> Config:
    """The configuration that the command line asks for.

    Args:
        args: with `config` and `overrides`.
        source: used when there is no --config.

    Raises:
        ConfigError: with every problem found.
    """
    from strop.config import load_config
    from strop.trainer.config import Config

    return load_config(Config, source=args.config or source, overrides=args.overrides)


def refuse_overrides_of(args: argparse.Namespace, key: str, reason: str) -> None:
    """Raise a UsageError when `key` is set on the command line although something else decides it."""
    for text in args.overrides:
        if text.lstrip("+~").split("=", 1)[0] == key:
            raise UsageError(f"{text!r} has no place here: {reason}")
