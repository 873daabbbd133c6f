"""Docstrings begin with the noun or the verb: a relative clause points at a thing without naming it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "strop"
RELATIVE = re.compile(r"(What|Which|How|Those|Whether|Where|Who|Whose|Why)\b")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of the module, its classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
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
        for line, text in docstrings(ast.parse(path.read_text()))
        if RELATIVE.match(text.lstrip())
    ]
    assert not clauses, "begin with the noun or the verb:\n" + "\n".join(clauses)
