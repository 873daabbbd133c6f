"""`strop completion`: commands, options and settings completed by the shell, through argcomplete (strop[completion]).

The shell starts strop itself for each list, with a variable that `main` looks for; no torch is imported then.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from strop.utils.terminal import UsageError, print_plain

ASKED = "_ARGCOMPLETE"
"""Set by the shell when it asks for a list."""
SUMMARY = "print the Tab completion of bash, zsh or fish for commands, options and settings"
EPILOG = """\
examples:
  eval "$(strop completion bash)"                                     # in ~/.bashrc
  eval "$(strop completion zsh)"                                      # in ~/.zshrc, after compinit
  strop completion fish > ~/.config/fish/completions/strop.fish       # once

Afterwards the Tab key completes commands, options, files, settings (`strop train data.tr`), values of settings that are
among a few (`trainer.preflight=`) and presets (`algorithm=`).
"""
_SETTINGS = "key=value"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    print_plain(_library().shellcode(["strop"], True, args.shell))
    return 0


def complete(commands: Collection[str], parser_of: Callable[[str], argparse.ArgumentParser]) -> int:
    """Answer the shell, and leave.

    Args:
        commands: their names.
        parser_of: the parser of a command.
    """
    library = _library()
    before = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = before.split()
    name = words[1] if len(words) > 2 or (len(words) == 2 and before[-1].isspace()) else ""
    if name in commands:
        parser = parser_of(name)
        os.environ[ASKED] = "2"  # the words of the command begin after its name
        for action in parser._actions:
            _complete_settings(action, library)
    else:
        parser = argparse.ArgumentParser(prog="strop")
        parser.add_argument("command", choices=tuple(commands))
        parser.add_argument("--version", action="store_true")
    library.autocomplete(parser, validator=lambda text, prefix: text.startswith(prefix))
    return 0


def settings(prefix: str) -> Iterator[str]:
    """Settings that begin so, as `key=`; of one that is written out, the values that are listed for it."""
    from strop.config.docs import describe
    from strop.config.sources import preset_names, preset_sections
    from strop.trainer.config import Config

    key, is_written, _ = prefix.partition("=")
    if is_written and key in preset_sections():
        yield from (f"{key}={name}" for name in preset_names(key))
        return
    if not is_written:
        yield from (f"{section}=" for section in preset_sections() if section)
    for doc in describe(Config):
        if not is_written:
            yield f"{doc.key}="
        elif doc.key == key:
            yield from (f"{key}={value}" for value in _values(doc.type))


def _values(type_in_words: str) -> list[str]:
    if type_in_words == "true or false":
        return ["true", "false"]
    listed = type_in_words.removeprefix("one of ")
    return listed.split(", ") if listed != type_in_words else []


def _complete_settings(action: argparse.Action, library: Any) -> None:
    """Let a positional argument that takes settings complete them; where it takes files too, both."""
    shown = f"{action.metavar} {action.dest}"
    if action.option_strings or not any(word in shown for word in (_SETTINGS, "overrides", "words", "model")):
        return
    files = None if action.metavar == _SETTINGS else library.FilesCompleter()
    action.completer = partial(_offer, files)  # type: ignore[attr-defined]


def _offer(files: Any, prefix: str, **rest: object) -> list[str]:
    offers = [text for text in settings(prefix) if text.startswith(prefix)] if prefix or files is None else []
    return offers if files is None else [*files(prefix), *offers]


def _library() -> Any:
    try:
        return importlib.import_module("argcomplete")
    except ImportError as error:
        raise UsageError("completion needs argcomplete: pip install 'strop[completion]'") from error
