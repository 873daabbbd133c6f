"""Files of the host that are visible in a local sandbox."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.sandbox.errors import SandboxUnavailable

_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostView:
    """Files of the host that are visible inside."""

    python: str
    """The interpreter."""
    visible: tuple[str, ...]
    """Files and folders, read-only; none lies inside another."""
    hidden: tuple[str, ...]
    """Folders below a visible one that are empty inside: the home folder, the current one, and packages that were
    installed into the interpreter strop runs with."""


def host_view(python: str, read_only_paths: Sequence[str]) -> HostView:
    """Paths of the system's programs, of an interpreter's installation, and of the settings.

    Args:
        python: path of an interpreter; "" for the installation that this process runs on.
        read_only_paths: more files and folders.

    Raises:
        SandboxUnavailable: a path does not exist, or would show the home folder or the current folder.
    """
    packages: list[str] = []
    if python:
        interpreter, prefixes = _installation(python)
    else:
        packages = site.getsitepackages([sys.base_prefix])
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        prefix = Path(sys.base_prefix)
        interpreter, prefixes = str(prefix / "bin" / version), [prefix]
        if not os.access(interpreter, os.X_OK):
            raise SandboxUnavailable(
                f"there is no interpreter at {interpreter}; set reward.sandbox.python to the path of one"
            )
    home, current = Path.home(), Path.cwd()
    requested = [str(prefix) for prefix in prefixes] + list(read_only_paths)
    for path in requested:
        if not Path(path).exists():
            raise SandboxUnavailable(
                f"{path} does not exist, so a sandbox cannot show it; correct "
                f"reward.sandbox.read_only_paths or reward.sandbox.python"
            )
        for private, name in ((home, "the home folder"), (current, "the current folder")):
            if _holds(path, private) and not _is_of_system(path):
                raise SandboxUnavailable(
                    f"{path} holds {name}, and programs in the sandbox would read it: name a narrower path in "
                    f"reward.sandbox.read_only_paths, or an interpreter installed elsewhere in reward.sandbox.python"
                )
    visible = _outermost([*_SYSTEM, *requested])
    # A link below a visible folder stays one, so what is private is there where it lies.
    hidden = tuple(
        str(private)
        for private in dict.fromkeys((home.resolve(), current.resolve(), *map(Path, packages)))
        if any(private.is_relative_to(path) for path in visible)
        and not any(Path(path).is_relative_to(private) for path in visible)
    )
    return HostView(python=interpreter, visible=visible, hidden=hidden)


def _holds(path: str, private: Path) -> bool:
    """True if a folder is this path or lies below it, by the names that either was given or has without links."""
    return any(
        folder.is_relative_to(shown)
        for folder in (private, private.resolve())
        for shown in (path, Path(path).resolve())
    )


def _is_of_system(path: str) -> bool:
    """True of what lies below /usr, which is shown as it is, without what is private in it."""
    return all(name.is_relative_to("/usr") for name in (Path(path), Path(path).resolve()))


def _installation(python: str) -> tuple[str, list[Path]]:
    """An interpreter's path and the folders it needs: its own and, for a virtual environment, the one it is made of.
    Its folder is named without links, which would lead nowhere inside."""
    path = Path(python)
    if not path.is_absolute() or not os.access(path, os.X_OK):
        raise SandboxUnavailable(
            f"reward.sandbox.python is {python!r}; give the full path of a Python interpreter"
        )
    path = path.parent.resolve() / path.name
    folders = [path.parent.parent]
    settings = path.parent.parent / "pyvenv.cfg"
    if settings.is_file():
        for line in settings.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                folders.append(Path(value.strip()).parent)
    folders.append(path.resolve().parent.parent)
    return str(path), list(dict.fromkeys(folders))


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths that exist and do not lie inside another one of them."""
    existing = dict.fromkeys(path for path in paths if os.path.lexists(path))
    return tuple(
        path
        for path in existing
        if not any(outer != path and Path(path).is_relative_to(outer) for outer in existing)
    )
