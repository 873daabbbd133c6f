"""The files and folders of this machine that settings name, wherever a command is started."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

READ = frozenset(
    {
        "path", "tokenizer_path", "tokenizer", "chat_template", "train_files", "val_files", "extensions", "files",
        "loops", "interactions", "tools", "function_tools", "skip_rollout",
    }
)  # fmt: skip
"""Last words of the settings that name what a run reads: a file, a folder, or something in one of them."""
_USED = READ | {"python", "read_only_paths"}
_WRITTEN = frozenset({"cache_dir", "copy_to"})

_AFTER = re.compile(r"^(?P<path>.+?)(?P<rest>:\w+|@[^@/]*)?$", re.DOTALL)
"""A path, and what follows it: a function or class of the file, a split of a data set in the folder."""


def read_paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of every setting that may name something a run reads.

    Args:
        settings: full key to value. An entry of a list is named by its place: `data.train_files[0]`.
    """
    for key, value in settings.items():
        yield from _texts(key, value)


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts(f"{name}.{key}", entry)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _texts(f"{name}[{index}]", entry)
    elif isinstance(value, str) and value and _last_word(name) in READ:
        yield name, value


def _last_word(name: str) -> str:
    return name.rpartition(".")[2].partition("[")[0]


def split_path(text: str) -> tuple[Path, str] | None:
    """The path of this machine that a text names, absolute, and what follows it there (`:FUNCTION`, `@SPLIT`); None
    where nothing is there: a name of a hub, a template, a module."""
    match = _AFTER.match(text)
    assert match is not None, "a text that is not empty"
    whole, short = (text, ""), (match["path"], match["rest"] or "")
    for spelling, rest in dict.fromkeys([whole, short]):
        try:
            path = Path(spelling).expanduser().absolute()
            if path.exists():
                return path, rest
        except (OSError, ValueError, RuntimeError):  # a text that is no path; a user without a home
            return None
    return None


def with_absolute_paths(config: T, *, base: T | None = None) -> T:
    """Settings whose relative paths are absolute ones, so that they mean the same from every directory.

    A relative path that is read is one only if something is there; folders that a run writes need not be.

    Args:
        config: a section, with sections in it.
        base: the same section as it was; values that it has stay as they are.
    """
    changes = {}
    for setting in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, setting.name)
        was = getattr(base, setting.name, None)
        if value == was:
            continue
        changed = _absolute(setting.name, value, was)
        if changed is not value:
            changes[setting.name] = changed
    return dataclasses.replace(config, **changes) if changes else config  # type: ignore[type-var]


def _absolute(word: str, value: object, base: object = None) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return with_absolute_paths(value, base=base)
    if isinstance(value, tuple):
        entries = tuple(_absolute(word, entry) for entry in value)
        return value if all(a is b for a, b in zip(entries, value, strict=True)) else entries
    if not isinstance(value, str) or not value or "://" in value:
        return value
    if word in _WRITTEN:
        return value if Path(value).is_absolute() else str(Path(value).expanduser().absolute())
    if word in _USED and (word != "python" or "/" in value) and (parts := split_path(value)) is not None:
        path = f"{parts[0]}{parts[1]}"
        return value if path == value else path
    return value
