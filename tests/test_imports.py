"""Imports point downwards only, and the light parts of strop stay light."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from strop.base.guests import guests, targets

PACKAGE = Path(__file__).parent.parent / "strop"

# From the bottom up. A room may import the rooms of every rank below its own.
RANKS = (
    {"border"},
    {"base"},
    {"trajectory", "net", "chat_template"},
    {"protocol"},
    {"config"},
    {"algorithms"},
    {"engines", "run", "controller"},
    {"rollout", "agents", "rewards", "data"},
    {"workers"},
    {"trainer"},
    {"cli"},
    {
        "algorithms/distillation",
        "algorithms/stream_functions",
        "border/control",
        "chat_template/bounded",
        "cli/unread",
        "cpu",
        "data/cache",
        "data/curriculum",
        "engines/digests",
        "health",
        "protocol/forms",
        "run/samples",
        "trainer/beginning",
        "trainer/steering",
    },
    {"explaining"},
    {
        "controller/ray",
        "data/command",
        "data/growing",
        "data/mixing",
        "data/streaming",
        "data/tiny",
        "engines/carried",
        "engines/flops",
        "engines/liger",
        "engines/lora",
        "engines/optimizers",
        "engines/options",
        "engines/sharding",
        "engines/ulysses",
        "hub",
        "rollout/captured",
        "rollout/kept",
        "rollout/transfer",
        "shell",
        "trainer/curve",
        "trainer/restarts",
        "trainer/rounds",
    },
    {"received", "replay", "rollout/processes"},
    {"rollout/conformance", "rollout/endpoint", "rollout/sglang", "rollout/vllm", "workers/agents"},
    {
        "ahead",
        "doctor",
        "evaluation",
        "judges",
        "recipes",
        "roles",
        "supervised",
        "tracing",
        "tracking",
        "vision",
    },
    {"preferences", "sandbox"},
    {"scorers", "tools"},
    {"environments", "interactions"},
    {"checks", "compat", "gateway", "python", "quickstart", "view"},
    {"sharing", "sweep"},
    {"__main__"},
)
GUESTS = (
    "ahead", "algorithms/distillation", "algorithms/stream_functions", "border/control", "chat_template/bounded",
    "checks", "cli/unread", "compat", "controller/ray", "cpu", "data/cache", "data/command", "data/curriculum",
    "data/growing", "data/mixing", "data/streaming", "data/tiny", "doctor", "engines/carried", "engines/digests",
    "engines/flops", "engines/liger", "engines/lora", "engines/optimizers", "engines/options", "engines/sharding",
    "engines/ulysses", "environments", "evaluation", "explaining", "gateway", "health", "hub", "interactions",
    "judges", "net", "preferences", "protocol/forms", "python", "quickstart", "received", "recipes", "replay",
    "roles", "rollout/captured", "rollout/conformance", "rollout/endpoint", "rollout/kept", "rollout/processes",
    "rollout/sglang", "rollout/transfer", "rollout/vllm", "run/samples", "sandbox", "scorers", "sharing", "shell",
    "supervised", "sweep", "tools", "tracing", "tracking", "trainer/beginning", "trainer/curve", "trainer/restarts",
    "trainer/rounds", "trainer/steering", "view", "vision", "workers/agents",
)  # fmt: skip
"""Rooms that use the core and are never used by it: the core finds what they declare (strop.base.guests)."""
COMMANDS_OF_GUESTS = {
    PACKAGE.parent / f"{target.partition(':')[0].replace('.', '/')}.py"
    for place in ("command", "data command")
    for target in targets(place).values()
}
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
SIDEWAYS = {("agents", "rollout")}
# Commands, and functions that are called from Python, import what they need when they run: --help and import are quick.
LATE_IMPORTS_ALLOWED = {"cli", "cli/unread", "evaluation", "explaining", "python"}


def violations(source: str, room: str, *, is_command: bool = False) -> list[str]:
    """What is wrong with the imports of a module of `room`, one sentence each; commands import late."""
    found = []
    if room not in RANK:
        return [f"{room} has no rank in this test: add it where DESIGN's arrows put it"]
    for line, target, is_late in _strop_imports(ast.parse(source)):
        if target == "strop":
            found.append(f"line {line}: import from the room that owns the name, not from strop itself")
        elif target == ".":
            found.append(f"line {line}: relative import; write the full name")
        elif target != room and target not in RANK:
            found.append(f"line {line}: imports strop.{target}, which has no rank in this test")
        elif target != room and RANK[target] >= RANK[room] and (room, target) not in SIDEWAYS:
            direction = "upward" if RANK[target] > RANK[room] else "sideways"
            found.append(f"line {line}: {room} imports {target}, {direction}")
        elif is_late and not is_command and room not in LATE_IMPORTS_ALLOWED:
            found.append(f"line {line}: imports strop.{target} inside a function")
    return found


def _strop_imports(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, room, whether inside a function) of each import of strop; "strop" for names of the package."""
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        is_late = id(node) in late
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names if alias.name != "strop" or alias.asname]
            case ast.Attribute(value=ast.Name(id="strop"), attr=attr) if attr != "__version__":
                yield node.lineno, attr if attr in RANK else "strop", False
                continue
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, ".", is_late
                continue
            case ast.ImportFrom(module="strop", names=names):
                modules = [f"strop.{alias.name}" if alias.name in RANK else "strop" for alias in names]
                modules = [m for m, alias in zip(modules, names, strict=True) if alias.name != "__version__"]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")
            ):
                modules = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            case _:
                continue
        for module in modules:
            package, _, rest = str(module).partition(".")
            if package == "strop":
                yield node.lineno, room_in(rest.split(".")) or "strop", is_late


def test_the_core_never_imports_a_guest() -> None:
    core = [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in {*GUESTS, "__main__"}]
    found = {
        str(path.relative_to(PACKAGE)): target
        for path in core
        for _, target, _ in _strop_imports(ast.parse(path.read_text(encoding="utf-8")))
        if target in GUESTS
    }
    assert found == {}
    assert len(core) > 100, "the walk must reach the rooms"
    assert guests() == GUESTS


def room_of(path: Path) -> str:
    """The room of a module: its folder below strop/, or the module right below it."""
    return room_in(path.relative_to(PACKAGE).with_suffix("").parts)


def room_in(parts: Sequence[str]) -> str:
    """The room of a path below strop/: the first part, unless the path goes on into a room inside that one."""
    inside = "/".join(parts[:2])
    return inside if inside in RANK else parts[0]


def test_no_module_imports_upwards_or_sideways() -> None:
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    found = {
        str(path.relative_to(PACKAGE)): wrong
        for path in modules
        if (
            wrong := violations(
                path.read_text(encoding="utf-8"), room_of(path), is_command=path in COMMANDS_OF_GUESTS
            )
        )
    }
    assert found == {}
    assert {"protocol", "config"} <= {room_of(path) for path in modules}, "the walk must reach the rooms"


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


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("config", "from strop.trainer.config import Config", "config imports trainer, upward"),
        (
            "algorithms",
            "import torch\nimport strop.engines.packing as p",
            "line 2: algorithms imports engines, up",
        ),
        ("rewards", "from strop.data import read_rows", "rewards imports data, sideways"),
        ("rollout", "from strop.agents import registry", "rollout imports agents, sideways"),
        ("protocol", "from strop import trainer", "protocol imports trainer, upward"),
        (
            "protocol",
            "if TYPE_CHECKING:\n    from strop.run import Ledger",
            "protocol imports run, upward",
        ),
        (
            "run",
            "def f():\n    from strop.protocol import DataProto",
            "imports strop.protocol inside a function",
        ),
        (
            "run",
            "import importlib\nimportlib.import_module('strop.cli.main')",
            "run imports cli, upward",
        ),
        ("engines", "from . import head", "relative import"),
        ("engines", "from strop import DataProto", "import from the room that owns the name"),
        ("engines", "from strop.shed import x", "imports strop.shed, which has no rank"),
        ("engines", "import strop\nstrop.DataProto", "import from the room that owns the name"),
        ("engines", "import strop\nstrop.trainer.loop()", "line 2: engines imports trainer, upward"),
        ("engines", "import strop as s", "import from the room that owns the name"),
        ("shed", "import torch", "shed has no rank in this test"),
        ("rollout", "from strop.rollout.vllm.engine import A", "rollout imports rollout/vllm, upward"),
    ],
)
def test_the_walk_sees_each_kind_of_wrong_import(room: str, source: str, expected: str) -> None:
    (wrong,) = violations(source, room)
    assert expected in wrong


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("agents", "from strop.rollout.types import Sampling"),
        (
            "trainer",
            "import strop.workers\nfrom strop.protocol import DataProto\nfrom strop.trajectory import Prompt",
        ),
        (
            "run",
            "import strop, other\nstrop.__version__\nfrom strop import __version__\nfrom strop.run import A",
        ),
        ("cli", "def main():\n    from strop.trainer import loop"),
        ("rewards", "def start():\n    import reasoning_gym"),
    ],
)
def test_the_walk_accepts_what_points_down(room: str, source: str) -> None:
    assert violations(source, room) == []


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
    assert "numpy" in import_facts("strop.base.randomness")[1]


@pytest.mark.parametrize(
    "module",
    [
        "strop.border",
        "strop.compat.migration",
        "strop.config",
        "strop.run",
        "strop.rewards",
        "strop.trajectory",
    ],
)
def test_what_small_processes_import_is_free_of_torch(module: str) -> None:
    assert import_facts(module)[1] & (HEAVY - {"datasets", "matplotlib"}) == set()
