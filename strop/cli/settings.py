"""Settings on the command line: a file and key=value, the same for every command.

Settings that lie in a run folder may be somebody else's. What they name is run only when strop wrote them for this user
on this machine (received/), or with --trust-code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.compat.key_aliases import aliases_beside, key_aliases
from strop.trainer.untrusted_runs import settings as untrusted_settings

if TYPE_CHECKING:
    from strop.config.unknown_key import KeyAliases
    from strop.trainer.config import Config


def user_path(text: str) -> Path:
    """A path as a user types it: `~` is the home folder, also where no shell replaces it (behind `=`, in quotes)."""
    return Path(text).expanduser()


EVERYTHING = ("",)
"""A command that trains needs all that the settings name."""
_SETTING = re.compile(r"[+~]?[a-z_]+(\.[\w/-]+)+=|[a-z_]+=")


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


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """`--trust-code`."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that the settings of a run folder from elsewhere name (reward files, extensions, tools, "
        "servers); without this option, the folder is refused with a list of that code",
    )


def add_accept_argument(parser: argparse.ArgumentParser) -> None:
    """`--accept-changes`."""
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="continue although data, models, rewards or templates have changed since the run began; each change is "
        "listed",
    )


def check_unchanged(
    args: argparse.Namespace, folder: Path, config: Config, *, only: tuple[str, ...] = ("",)
) -> None:
    """Refuse, or with --accept-changes name, what a run reads from outside and has changed since it began.

    Args:
        args: with `accept_changes`.
        folder, config: of the run.
        only: beginnings of the keys that the command has a use for.

    Raises:
        RunError: something has changed.
    """
    from strop.config import to_flat_dict
    from strop.run.inputs import check_inputs
    from strop.utils.terminal import say

    for line in check_inputs(folder, to_flat_dict(config), accept=args.accept_changes, only=only):
        say(line)


def is_setting(word: str) -> bool:
    """True if a word among files and folders is key=value."""
    return _SETTING.match(word) is not None


def aliases_of(args: argparse.Namespace) -> KeyAliases:
    """The lookup for a key that is unknown to a command with these arguments."""
    return aliases_beside(name for name in ("out", "resume") if hasattr(args, name))


def load_settings(
    args: argparse.Namespace,
    *,
    source: Path | None = None,
    needs: Collection[str] = EVERYTHING,
    section: str = "",
) -> Config:
    """The configuration that the command line asks for; this process has the variables of `resources.env` from then on.

    Args:
        args: with `config`, `overrides` and `trust_code`.
        source: used when there is no --config; of a run folder.
        needs: beginnings of the keys whose code, commands and addresses the command has a use for.
        section: of the command, where it has one: what an unknown key may mean is looked for there first.

    Raises:
        ConfigError: with every problem found.
        UntrustedCode: the settings are those of a received run, and name something that the command needs.
    """
    from strop.config import read_settings
    from strop.trainer.environment import variables_of
    from strop.trainer.loading import load
    from strop.utils.allocator import give_way

    path = Path(args.config) if args.config else source
    if path is None or args.trust_code or (args.config and not _lies_in_run(path)):
        # what the command line names is the user's word
        config: Config = load(
            args.config or source, overrides=args.overrides, section=section, aliases=aliases_of(args)
        )
    else:
        needs = (*needs, "resources.env")
        config = untrusted_settings.load(
            path, read_settings(path), args.overrides, needs, aliases=aliases_of(args)
        )
    os.environ.update(variables_of(config.resources))
    give_way(os.environ)
    return config


def admission(path: Path, overrides: Sequence[str]) -> Callable[[str], object]:
    """Check that refuses the settings of a run folder when they name code and are not the user's own: a
    function of their text, which raises an UntrustedCode that lists what they name, or a ConfigError."""
    return lambda text: untrusted_settings.load(path, text, overrides, EVERYTHING, aliases=key_aliases)


def _lies_in_run(path: Path) -> bool:
    """Also a link to such a file does."""
    from strop.run import is_run

    with contextlib.suppress(OSError, RuntimeError):  # a circle of links lies nowhere
        return is_run(path.parent) or is_run(path.resolve().parent)
    return False
