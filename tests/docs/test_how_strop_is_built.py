"""docs/how-strop-is-built.md: files and names in the code exist, and packages stand in the order of imports."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from doc_pages import ROOT, code_spans

PAGE = ROOT / "docs" / "how-strop-is-built.md"
PLACE = re.compile(r"(?P<path>(?:strop|tests|docs)/[\w/.-]*)(?:: (?P<name>[\w.]+))?")
MAX_FILES = 3
"""Files of one answer."""


def places(text: str) -> list[tuple[str, str]]:
    """Path and name of every place in the code; no name where a file or folder stands alone."""
    matches = (PLACE.fullmatch(span) for span in re.findall(r"`([^`]+)`", text))
    return [(match["path"], match["name"] or "") for match in matches if match]


def rows_below(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table below a heading."""
    lines = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = lines[start : next((n for n in range(start, len(lines)) if not lines[n]), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


@cache
def names_in(path: str) -> frozenset[str]:
    """Functions, classes and variables of a file, and of its classes as `Class.name`."""
    return frozenset(_names(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> set[str]:
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(prefix + name)
            case ast.ClassDef(name=name):
                names |= {prefix + name} | _names(node.body, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(prefix + name)
            case _:
                pass
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(places(PAGE.read_text(encoding="utf-8")))))
def test_a_place_in_the_code_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists(), f"there is no {path}"
    if name:
        assert name in names_in(path), f"{path} has no {name}"


def test_every_file_of_the_code_is_a_place() -> None:
    spans = [span for span in code_spans(PAGE) if re.search(r"\.py\b", span) and "FILE" not in span]
    odd = [span for span in spans if not PLACE.fullmatch(span) and span != "__init__.py"]
    assert not odd, "written as `strop/FILE.py` or `strop/FILE.py: NAME`"


def test_the_packages_are_those_of_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ordered = re.findall(r"`(\w+)`", text.partition("from the ground up:")[2].partition(".\n")[0])
    packages = {path.parent.name for path in (ROOT / "strop").glob("*/__init__.py")}
    told = [row[0].strip("`") for row in rows_below("The packages")]
    assert told == ordered
    assert set(told) == packages


def test_every_question_has_an_answer_in_few_files() -> None:
    rows = rows_below("Twelve questions")
    assert len(rows) == 12
    for question, answer in rows:
        answered = places(answer)
        assert question.endswith("?")
        assert any(name for _, name in answered), f"{question} names no function"
        assert len({path for path, _ in answered}) <= MAX_FILES, question
