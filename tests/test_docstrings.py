"""Docstrings begin with the noun or the verb, for a relative clause points at a thing without naming it; the modules
that docstrings and comments name are there."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "strop"
RELATIVE = re.compile(r"(What|Which|How|Those|Whether|Where|Who|Whose|Why)\b")


Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def scopes(tree: ast.Module) -> Iterator[Scope]:
    """The module, and its classes and functions, wherever they are defined; no expression is looked into."""
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, Scope):
            yield node
        parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
        open_nodes += [child for part in parts if isinstance(part, list) for child in part]


@cache
def docstrings_of(path: Path) -> list[tuple[int, str]]:
    """Those of a file."""
    return list(docstrings(ast.parse(path.read_text())))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of the module, its classes, functions, fields and constants."""
    for node in scopes(tree):
        for position, statement in enumerate(node.body):
            before = node.body[position - 1] if position else None
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
                and (before is None or isinstance(before, ast.Assign | ast.AnnAssign))
            ):
                yield statement.lineno, statement.value.value


def test_a_docstring_of_each_kind_is_found() -> None:
    source = '"M."\nX = 1\n"X."\nclass C:\n    "C."\n    y: int\n    "Y."\n    def f(self):\n        "F."\n'
    assert [text for _, text in docstrings(ast.parse(source))] == ["M.", "X.", "C.", "Y.", "F."]


@pytest.mark.parametrize(
    "room", sorted(path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py"))
)
def test_docstrings_name_the_thing(room: str) -> None:
    root = PACKAGE / room
    clauses = [
        f"{path.relative_to(PACKAGE.parent)}:{line} {text.splitlines()[0]}"
        for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
        for line, text in docstrings_of(path)
        if RELATIVE.match(text.lstrip())
    ]
    assert not clauses, "begin with the noun or the verb:\n" + "\n".join(clauses)


MODULE_FILE = re.compile(r"(?<![\w./{'\"-])((?:\w+/)*[a-z_]\w*\.py)\b")
DOTTED_NAME = re.compile(r"\bstrop(?:\.\w+)+")
OF_USERS = {"reward.py", "solution.py", "harness.py", "my_data.py", "my_rows.py"}
"""Files of the user's own, and of a sandbox, in examples."""


@cache
def modules() -> dict[str, Path]:
    """Files of strop by the dotted name of their module."""
    files = {path.relative_to(PACKAGE.parent): path for path in PACKAGE.rglob("*.py")}
    return {
        ".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in files.items()
    }


@cache
def words_of(path: Path) -> frozenset[str]:
    """All words of a file."""
    return frozenset(re.findall(r"\w+", path.read_text()))


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings and comments of a file."""
    text = path.read_text()
    yield from docstrings_of(path)
    if not re.search(r"#.*(\.py\b|\bstrop\.)", text):
        return  # taking it apart takes long
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def is_file_near(name: str, path: Path) -> bool:
    """A module is named from the folder of the file, from the one above, or by the end of its path."""
    near = any((folder / name).is_file() for folder in (path.parent, path.parent.parent))
    return near or ("/" in name and any(str(file).endswith(f"/{name}") for file in modules().values()))


def is_known(name: str) -> bool:
    """A dotted name is a module, or a name in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if path := modules().get(".".join(parts[:end])):
            return words_of(path).issuperset(parts[end:])
    return False


@pytest.mark.parametrize(
    "room", sorted(path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py"))
)
def test_modules_that_are_named_are_there(room: str) -> None:
    root, missing = PACKAGE / room, []
    for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
        for line, text in remarks(path):
            files = {name for name in MODULE_FILE.findall(text) if name not in OF_USERS}
            names = {match.rstrip(".") for match in DOTTED_NAME.findall(text)}
            missing += [f"{path}:{line} {name}" for name in files if not is_file_near(name, path)]
            missing += [f"{path}:{line} {name}" for name in names if not is_known(name)]
    assert not missing, "no such module or name:\n" + "\n".join(missing)


def test_a_module_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("# see here.py, gone.py and strop.run.folder.gone\n")
    ((_, text),) = remarks(tmp_path / "here.py")
    assert [name for name in MODULE_FILE.findall(text) if not is_file_near(name, tmp_path / "here.py")] == [
        "gone.py"
    ]
    assert [name for name in DOTTED_NAME.findall(text) if not is_known(name)] == ["strop.run.folder.gone"]
    assert is_known("strop.run.folder.RunFolder")
