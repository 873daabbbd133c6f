"""What a model writes is untrusted input: nothing in strop/ evaluates, unpickles or hands it to a shell.

Reads every module with ast and resolves the names it imports. It cannot follow a value, so whole families are
forbidden, and a use with a good reason stands in ALLOWED with that reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "strop"

# (module below strop/, what it uses): why nothing that a model or a user's scorer produced can reach it.
ALLOWED: dict[tuple[str, str], str] = {
    ("api/inputs.py", "dill"): "it writes down the caller's own function, and reads none",
    (
        "rollout/vllm/inside/headless.py",
        "multiprocessing",
    ): "it waits for vLLM's own processes to end, and reads none",
    (
        "engines/parallel/host_activations.py",
        "torch.multiprocessing",
    ): "it takes weak references to storages from there, and neither pipes nor queues",
    ("rollout/sglang/target.py", "multiprocessing"): "it writes a pickle for SGLang's server, and reads none",
}

BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    "pickle": "unpickling runs code",
    "_pickle": "unpickling runs code",
    "cloudpickle": "unpickling runs code",
    "dill": "unpickling runs code",
    "joblib": "unpickling runs code",
    "shelve": "unpickling runs code",
    "marshal": "unmarshalling is unsafe",
    "multiprocessing": "its pipes and queues unpickle what the other side sends",
    "torch.multiprocessing": "its pipes and queues unpickle what the other side sends",
    "concurrent.futures.ProcessPoolExecutor": "it unpickles what the other side sends",
    "concurrent.futures.process": "it unpickles what the other side sends",
    "code": "it evaluates text",
}
FORBIDDEN_NAMES = {
    **{f"builtins.{name}": "it evaluates text" for name in BUILTINS},
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "asyncio.create_subprocess_shell": "a shell",
    "pandas.read_pickle": "unpickling runs code",
    "numpy.fromregex": "it may unpickle",
    "runpy.run_path": "it runs a file as code",
    "runpy.run_module": "it runs a module as code",
    "yaml.unsafe_load": "it builds any Python object",
    "yaml.full_load": "it builds Python objects",
    "yaml.UnsafeLoader": "it builds any Python object",
    "yaml.FullLoader": "it builds Python objects",
    "yaml.Loader": "it builds any Python object",
    **{
        f"torch.distributed.{name}": "it unpickles what other ranks send"
        for name in (
            "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
            "scatter_object_list", "send_object_list",
        )
    },
}  # fmt: skip


def findings(source: str) -> list[tuple[int, str, str]]:
    """(line, what is used, why not) of each forbidden use in a module, in the order of its lines."""
    nodes = list(ast.walk(ast.parse(source)))
    names = _imported_names(nodes)
    found = []
    for node in nodes:
        for used, reason in _uses(node, names):
            found.append((getattr(node, "lineno", 0), used, reason))
    return sorted(set(found))


def _imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What each imported name stands for, with dots."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _uses(node: ast.AST, names: dict[str, str]) -> list[tuple[str, str]]:
    match node:
        case ast.Import(names=aliases):
            return _forbidden_modules(alias.name for alias in aliases)
        case ast.ImportFrom(module=str(module), names=aliases):
            return _forbidden_modules(f"{module}.{alias.name}" for alias in aliases)
        case ast.Name(id=name, ctx=ast.Load()) if name in BUILTINS and name not in names:
            return [(name, "it evaluates text")]
        case ast.Name() | ast.Attribute():
            dotted = _dotted(node, names)
            if dotted.startswith(("os.exec", "os.spawn", "os.posix_spawn")):
                return [(dotted, "it starts a program unseen by subprocess")]
            forbidden = _forbidden_modules([dotted]) if isinstance(node, ast.Attribute) else []
            return [*forbidden, *([(dotted, FORBIDDEN_NAMES[dotted])] if dotted in FORBIDDEN_NAMES else [])]
        case ast.Call():
            return _call(node, _dotted(node.func, names))
    return []


def _forbidden_modules(dotted_names: Iterable[str]) -> list[tuple[str, str]]:
    found = []
    for dotted in dotted_names:
        parts = dotted.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if prefix in FORBIDDEN_MODULES:
                found.append((prefix, FORBIDDEN_MODULES[prefix]))
    return found


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full name an expression stands for: `o.system` after `import os as o` is os.system; "" if none."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        below = _dotted(node.value, names)
        return f"{below}.{node.attr}" if below else ""
    return ""


def _call(node: ast.Call, called: str) -> list[tuple[str, str]]:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}

    def is_constant(name: str, value: object) -> bool:
        argument = keywords.get(name)
        return isinstance(argument, ast.Constant) and argument.value is value

    found = []
    if "shell" in keywords and not is_constant("shell", False):
        found.append(("shell=", "a shell"))
    if "allow_pickle" in keywords and not is_constant("allow_pickle", False):
        found.append(("allow_pickle=", "unpickling runs code"))
    if is_constant("trust_remote_code", True):
        found.append(
            ("trust_remote_code=True", "it runs code that came with a model; only the user may ask for it")
        )
    if called == "torch.load" and not is_constant("weights_only", True):
        found.append(("torch.load", "without weights_only=True it unpickles"))
    if called == "yaml.load" and "Loader" not in keywords:
        found.append(("yaml.load", "name a Loader= derived from SafeLoader"))
    return found


def test_nothing_in_strop_runs_or_unpickles_untrusted_input() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 10, "the walk must reach the rooms"
    used = {
        (str(path.relative_to(PACKAGE)), what): f"line {line}: {why}"
        for path in modules
        for line, what, why in findings(path.read_text(encoding="utf-8"))
    }
    assert {key: text for key, text in used.items() if key not in ALLOWED} == {}
    assert set(ALLOWED) - set(used) == set(), "an exception that is no longer needed must go"
    assert all(len(reason.split()) > 5 for reason in ALLOWED.values()), "an exception says why it is safe"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = eval(answer)", "eval"),
        ("run = exec", "exec"),
        ("import builtins\nbuiltins.eval(answer)", "builtins.eval"),
        ("compile(answer, 'a', 'exec')", "compile"),
        ("__import__(answer)", "__import__"),
        ("import pickle\npickle.loads(data)", "pickle"),
        ("from pickle import load", "pickle"),
        ("def f():\n    import pickle as p", "pickle"),
        ("import torch\ntorch.multiprocessing.Queue()", "torch.multiprocessing"),
        ("import multiprocessing.connection", "multiprocessing"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        (
            "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
            "concurrent.futures.ProcessPoolExecutor",
        ),
        ("import os\nos.system(text)", "os.system"),
        ("import os as o\no.popen(text)", "os.popen"),
        ("from os import system as s\ns(text)", "os.system"),
        ("import os\nos.execv(text, [])", "os.execv"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell="),
        ("import subprocess\nsubprocess.run(text, shell=flag)", "shell="),
        ("from subprocess import getoutput\ngetoutput(text)", "subprocess.getoutput"),
        ("import asyncio\nasyncio.create_subprocess_shell(text)", "asyncio.create_subprocess_shell"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import torch\ntorch.load(path, weights_only=False)", "torch.load"),
        ("from torch import load\nload(path, weights_only=flag)", "torch.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle="),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("import yaml\nyaml.load(text, Loader=yaml.UnsafeLoader)", "yaml.UnsafeLoader"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code=True"),
        (
            "import torch.distributed as dist\ndist.all_gather_object(a, b)",
            "torch.distributed.all_gather_object",
        ),
    ],
)
def test_each_forbidden_use_is_seen(source: str, expected: str) -> None:
    assert expected in {what for _, what, _ in findings(source)}


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "class Config:\n    eval: EvalConfig = EvalConfig()",
        "import torch\ntorch.compile(f)\ntorch.load(path, weights_only=True)",
        "import re\nre.compile('x')",
        "import json\njson.loads(text)",
        "import subprocess\nsubprocess.Popen(['a'], shell=False)",
        "import yaml\nyaml.safe_load(text)\nclass L(yaml.SafeLoader): pass\nyaml.load(text, Loader=L)",
        "from concurrent.futures import ThreadPoolExecutor",
        "AutoModel.from_pretrained(path, trust_remote_code=config.trust_remote_code)",
        "'eval(answer)  # in text only'",
    ],
)
def test_ordinary_code_is_not_reported(source: str) -> None:
    assert findings(source) == []


WALL_CLOCK = {
    "run/events.py": "records say when",
    "run/heartbeat.py": "signs of life of several machines are compared",
    "agents/spans.py": "spans say when",
    "workers/player.py": "spans say when",
    "observability/trackers/tensorboard.py": "records say when",
    "trainer/fault_tolerance/machine.py": "when a machine is taken away is a time of day",
    "agents/openai_server/chat.py": "a field of an answer",
    "agents/openai_server/responses.py": "a field of an answer",
    "agents/openai_server/scoring.py": "a field of an answer",
    "cli/commands/doctor.py": "the clocks of machines are compared",
    "cli/doctor/survey.py": "the clocks of machines are compared",
    "controller/ray/process.py": "which of several failures came first",
    "controller/ray/launcher.py": "which of several failures came first",
    "controller/ray/failures.py": "which of several failures came first",
    "data/cache/__init__.py": "against the times of files",
    "observability/trackers/async_logger.py": "trackers record when a metric was logged",
    "observability/trackers/run_metadata.py": "names a run that is sent again",
}
"""Modules that ask for the time of day. It can go back or jump, so no deadline and no duration is measured by it."""


def test_deadlines_and_durations_do_not_depend_on_the_time_of_day() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "time.time" not in text and "datetime.now" not in text:
            continue  # taking it apart takes long
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns"):
                    found.add(str(path.relative_to(PACKAGE)))
                case ast.Attribute(value=ast.Name(id="datetime"), attr="now"):
                    found.add(str(path.relative_to(PACKAGE)))
    allowed = {*WALL_CLOCK, "run/folder.py", "run/manifest.py"}  # datetime, for people
    assert found - allowed == set(), "use time.monotonic or time.perf_counter"
    assert set(WALL_CLOCK) - found == set()
