"""Modules import without circles, by the name of what owns a thing, and the light parts of strop stay light."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "strop"


def module_of(path: Path) -> str:
    """The dotted name of a file below strop/."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of strop, parsed."""
    return {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


ROOMS = [
    "utils",
    "config",
    "protocol",
    "algorithms",
    "run",
    "controller",
    "engines",
    "data",
    "rollout",
    "sandbox",
    "rewards",
    "agents",
    "workers",
    "observability",
    "trainer",
    "evaluation",
    "compat",
    "cli",
    "api",
]
"""Packages from the ground up: one imports only those before it."""

EXCEPTIONS = {("strop.protocol", "strop.controller.ray.future")}
"""Users of verl import DataProtoFuture from protocol, which loads it when asked."""

DOTTED_NAME = re.compile(r"strop(\.\w+)+(:\w+)?")


def owner(name: str) -> str:
    """The module that a dotted name lies in; "" where no module of strop has it."""
    known = modules()
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def type_checking(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """Those of a module's nodes that only a type checker reads."""
    blocks = (
        node
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def references(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Modules of strop that a module names, with the line: imports at the top and in functions, and strings."""
    nodes = list(ast.walk(tree))
    left_out = type_checking(nodes)
    left_out |= {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if node in left_out:
            continue
        match node:
            case ast.Import(names=names):
                yield from ((owner(alias.name), node.lineno) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((owner(f"{module}.{alias.name}"), node.lineno) for alias in names)
            case ast.Constant(value=str(text)) if DOTTED_NAME.fullmatch(text):
                yield owner(text.partition(":")[0]), node.lineno


@cache
def edges() -> dict[str, dict[str, int]]:
    """For each module the modules it names, with a line. Modules beside the packages are left out."""
    outside = {"", "strop", "strop.__main__", "strop._moved", "strop.version"}
    return {
        name: {
            other: line
            for other, line in references(tree)
            if other not in outside | {name} and (name, other) not in EXCEPTIONS
        }
        for name, tree in modules().items()
        if name not in outside
    }


def room_of(name: str) -> str:
    return name.split(".")[1]


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for node in sorted(edges):
            if node not in index:
                visit(node)
    finally:
        sys.setrecursionlimit(limit)
    return found


def test_the_rooms_are_the_packages() -> None:
    assert sorted(ROOMS) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def test_no_import_goes_up_the_rooms() -> None:
    assert sum(map(len, edges().values())) > 1000, "the walk must reach the imports"
    upward = [
        f"{name}, line {line}: {other}"
        for name, others in edges().items()
        for other, line in others.items()
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(name))
    ]
    assert upward == []


def test_no_modules_import_each_other() -> None:
    assert circles({name: set(others) for name, others in edges().items()}) == []


def test_references_in_functions_and_strings_are_seen() -> None:
    text = (
        '"""strop.cli.main"""\n'
        "if TYPE_CHECKING:\n    from strop.cli import main\n"
        "import strop.utils.rng\n"
        "def load():\n    from strop.data import readers\n    return 'strop.api.results:Result'\n"
    )
    assert dict(references(ast.parse(text))) == {
        "strop.utils.rng": 4,
        "strop.data.readers": 6,
        "strop.api.results": 7,
    }


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_names_are_imported_from_what_owns_them() -> None:
    """Not from strop itself, and not relative to a package."""
    wrong = [
        f"{name}, line {node.lineno}"
        for name, tree in modules().items()
        if name != "strop"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level or node.module == "strop")
        and not (node.module == "strop" and (PACKAGE / node.names[0].name).is_dir())
    ]
    assert wrong == []


def rooms() -> list[Path]:
    """Every folder below strop/ with modules; each is a package, and says what it is for."""
    return sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE})


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(PACKAGE)))
def test_the_map_of_a_room_names_modules_that_exist(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    entries = re.findall(r"(?m)^ *(\w+(?:, \w+)*)  +\S", text)  # maps that leave the suffix out
    names = {f"{name}.py" for entry in entries for name in entry.split(", ")}
    names |= set(re.findall(r"[\w/]+\.(?:py|toml)\b", text))
    places = (room, room.parent)
    there = [name for name in names if any((at / name).is_file() for at in places)]
    there += [name for name in names if (room / name.removesuffix(".py") / "__init__.py").is_file()]
    assert text, "a room says what it is for"
    assert names - set(there) == set()


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(PACKAGE)))
def test_the_map_of_a_room_names_each_of_its_modules(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r"[\w*]+", text))
    modules = {path.stem for path in room.glob("*.py")} - {"__init__", "__main__"}
    modules |= {path.parent.name for path in room.glob("*/__init__.py")}
    missing = {module for module in modules if not any(fnmatch(module, name) for name in named)}
    assert missing == set()


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that a module imports from anywhere, also for a type checker alone."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)


def is_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern of mypy's fits; `a.*` is `a` itself too."""
    return any(fnmatch(name, one) or fnmatch(f"{name}.", one) for one in patterns)


def test_mypy_reads_whatever_strop_imports() -> None:
    """What it skips to save time is used nowhere. Only of Megatron it knows nothing, wherever that is installed."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    skipped, read = (
        [pattern for one in settings if one.get("follow_imports") == how for pattern in one["module"]]
        for how in ("skip", "normal")
    )
    looks = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in (PACKAGE.parent / "benchmarks/gpu").glob("*.py")
    ]
    names = {name for tree in [*modules().values(), *looks] for name in imported_names(tree)}
    unread = {name for name in names if is_any(name, skipped) and not is_any(name, read)}
    assert [name for name in sorted(unread) if not name.startswith("megatron.")] == []


def import_facts(module: str) -> tuple[float, set[str]]:
    """Seconds that importing a module takes in a fresh process, and the top-level packages it loads."""
    code = (
        "import json, sys, time; started = time.perf_counter(); import " + module + "\n"
        "seconds = time.perf_counter() - started\n"
        "print(json.dumps([seconds, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, loaded = json.loads(run.stdout)
    return seconds, set(loaded)


HEAVY = {"torch", "tensordict", "transformers", "datasets", "ray", "matplotlib", "vllm", "sglang"}


def test_import_strop_is_quick_and_pulls_in_nothing_heavy() -> None:
    facts = [import_facts("strop") for _ in range(3)]
    assert min(seconds for seconds, _ in facts) < 1.0
    assert facts[0][1] & (HEAVY | {"numpy"}) == set()


def test_what_an_import_loads_is_seen() -> None:
    assert "numpy" in import_facts("strop.utils.rng")[1]


@pytest.mark.parametrize(
    "module",
    [
        "strop.utils.sanitize",
        "strop.compat.migrate",
        "strop.config",
        "strop.run",
        "strop.rewards",
        "strop.protocol.trajectory",
    ],
)
def test_what_small_processes_import_is_free_of_torch(module: str) -> None:
    assert import_facts(module)[1] & (HEAVY - {"datasets", "matplotlib"}) == set()


@pytest.mark.parametrize(
    "source", ["def f(solution_str): return 1.0", "def f(completions): return [1.0]", ""]
)
def test_a_process_that_scores_loads_no_torch(tmp_path: Path, source: str) -> None:
    """Functions of both kinds, and the built-in scorers; processes are started by the hundred."""
    path = tmp_path / "mine.py"
    path.write_text(source)
    name = "f" if source else "compute_score"
    setup = {
        "path": str(path) if source else "", "source": source, "name": name, "kwargs": {}, "key": "", "weight": 1.0,
        "manager": "", "tokenizer": "", "is_left_out": False,
    }  # fmt: skip
    code = (
        "import sys\nimport strop.rewards.worker_main\nfrom strop.rewards.function_loading import load_functions\n"
        f"load_functions([{setup!r}])\nprint(sorted(set({sorted(HEAVY)}) & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
