"""Python files of the user's own, imported once per process; what they define registers itself."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.utils.trust import ask

_LOADED: dict[Path, Any] = {}


def load_user_file(name: str, *, setting: str) -> Any:
    """Import a file; a second call gives the same module. It may import modules that lie beside it.

    Args:
        name: a path; a relative one starts at the current directory.
        setting: that names it, for messages.

    Raises:
        ValueError: there is no such file, or importing it failed.
        UntrustedCode: received settings name it.
    """
    ask(setting, name)
    path = Path(name).expanduser().resolve()
    if path in _LOADED:
        return _LOADED[path]
    if not path.is_file():
        raise ValueError(
            f"{setting} names {name!r}, but {path} is no file; relative names start at the current directory"
        )
    module_name = f"strop_user_file_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{setting} names {name!r}, which is no Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # classes look their module up, for example to be pickled
    try:
        with modules_beside(path):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        problem = f"{type(error).__name__}: {error}{from_elsewhere(error)}"
        raise ValueError(f"{setting}: {path} cannot be imported: {problem}") from error
    _LOADED[path] = module
    return module


_FROM_ELSEWHERE = {
    "verl": "what a file imports from verl comes from strop.agents (tools, agent loops, interactions), strop.data "
    "(data sets), strop.rewards.managers, strop.rewards.scorers or strop.algorithms here",
    "openrlhf": "what a file imports from openrlhf comes from strop.agents here",
    "trl": "what a file needs of trl has to be copied into it: rewards here are plain functions",
}


def from_elsewhere(error: BaseException) -> str:
    """Advice on an import from verl, TRL or OpenRLHF, to stand behind the error that names it; empty for others."""
    name = str(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    advice = _FROM_ELSEWHERE.get(name.partition(".")[0], "")
    return f"; {advice} (docs/moving-in.md)" if advice else ""


def load_user_class(path: str, name: str, *, setting: str) -> type:
    """The class of this name in a Python file.

    Args:
        path, name: of file and class.
        setting: the section that has both, for messages.

    Raises:
        ValueError: there is no such file or class, or importing it failed.
    """
    module = load_user_file(path, setting=f"{setting}.path")
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ValueError(
            f"{setting}.name is {name!r}, but {path} has no class of that name; it has {', '.join(classes) or 'none'}"
        )
    return cls


@contextlib.contextmanager
def modules_beside(path: Path) -> Iterator[None]:
    """While a file is imported: modules in its folder are found first, as for a script. Afterwards, for imports inside
    its functions, they are found last.

    Raises:
        ImportError: the file imports a module beside it, and one of that name from elsewhere is imported already.
    """
    folder = str(path.parent)
    for name in sorted(_imported_names(path)):
        beside = [
            file
            for file in (path.parent / f"{name}.py", path.parent / name / "__init__.py")
            if file.is_file()
        ]
        module_file = getattr(sys.modules.get(name), "__file__", None)
        if beside and module_file and not any(file.samefile(module_file) for file in beside):
            raise ImportError(
                f"it imports {name}, which is {beside[0]}, but another module of that name was imported from "
                f"{module_file} before: rename one of the two"
            )
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a file beside it may be younger than the last look into the folder
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have edited sys.path itself
            sys.path.remove(folder)  # the first one
        if folder not in sys.path:
            sys.path.append(folder)


def _imported_names(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, those of Python itself left out; none where it cannot be
    read, which importing it says better."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


def divide_named_file(section: Any, *, default: str = "") -> None:
    """Take a path FILE.py:NAME apart, in a section with path and name whose name is not given beside it.

    Args:
        section: a frozen dataclass, while it is made.
        default: its name where none is given.
    """
    file, colon, name = section.path.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier() and section.name in (default, name):
        object.__setattr__(section, "path", file)
        object.__setattr__(section, "name", name)


def absolute_path(path: str) -> str:
    """The whole path of a file; empty for none."""
    return str(Path(path).expanduser().absolute()) if path else ""


def is_loaded(name: str) -> bool:
    """True if this process has imported the file by `load_user_file`."""
    return Path(name).expanduser().resolve() in _LOADED
