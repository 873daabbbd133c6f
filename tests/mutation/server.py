"""Runs tests on mutants, each in a process forked from one that has imported everything heavy before.

    warm    every test is collected once; a child puts the code of the changed function in the place of the old
            one and runs the collected tests. For changes inside a function.
    cold    nothing of strop is imported yet; a child imports it with the changed module in place, and collects.
            For changes that run at import.

Reads requests as lines of JSON from one pipe and answers on another:

    {"module": "algorithms.losses.clipped", "function": "f", "is_default": false, "source": "...",
     "tests": [[nodeid, seconds], ...]}
    {"outcome": "killed", "test": nodeid}    or survived, timeout, unpatched
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

PACKAGE = "strop"
TESTED = (
    "strop.algorithms", "strop.engines.parallel.balance", "strop.run.samples.selection",
    "strop.algorithms.best_of_k",
)  # fmt: skip
HEAVY = (
    "numpy", "torch", "torch.distributed", "hypothesis.strategies", "tensordict", "datasets", "transformers",
    "transformers.models.qwen3.modeling_qwen3", "yaml", "hydra", "omegaconf", "rich", "jinja2", "safetensors",
)  # fmt: skip
PYTEST = (
    "-q", "-p", "no:cacheprovider", "-o", "timeout=0", "-o", "tmp_path_retention_policy=none",
    "-o", "addopts=", "-m", "not gpu and not dist and not slow and not smollm2",
)  # fmt: skip
SURVIVED, KILLED, UNPATCHED = 0, 1, 2
MEMORY = 6 << 30
"""Address space that a mutant may add, in bytes."""


def settle() -> None:
    """One thread, repeatable draws, and no search for the smallest example of a failure."""
    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("mutation")


class Requests:
    """The pipe of requests and the pipe of answers."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read = os.fdopen(read_fd, "r", encoding="utf-8")
        self._write = os.fdopen(write_fd, "w", encoding="utf-8")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._read:
            yield json.loads(line)

    def answer(self, **facts: object) -> None:
        self._write.write(json.dumps(facts) + "\n")
        self._write.flush()


def in_child(run: Any, request: dict[str, Any]) -> dict[str, object]:
    """Outcome of `run(request, report)` in a forked child; `report` takes the id of the test that runs now."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_fd)
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
            code = run(request, lambda test: os.write(write_fd, f"{test}\n".encode()))
        except BaseException:  # noqa: BLE001  # whatever breaks the run was broken by the mutant
            code = KILLED
        os._exit(code)
    os.close(write_fd)
    with os.fdopen(read_fd, encoding="utf-8") as pipe:
        tests = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    test = tests[-1] if tests else None
    if os.WIFSIGNALED(status):
        stopped = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
        return {"outcome": "timeout" if stopped else "killed", "test": test}
    outcome = {SURVIVED: "survived", UNPATCHED: "unpatched"}.get(os.WEXITSTATUS(status), "killed")
    return {"outcome": outcome, "test": None if outcome == "survived" else test}


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_time(seconds: float) -> None:
    """The process ends when the next test takes much longer than it does without a mutant."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime + 3 + 6 * seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))
    signal.alarm(int(60 + 40 * seconds))


class EndAtFailure:
    """Plugin: the process ends where a test fails, before anything is reported: that takes longer than most tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        failure = call.excinfo
        if (
            failure is None
            or failure.errisinstance(pytest.skip.Exception)
            or item.get_closest_marker("xfail")
        ):
            return
        os._exit(KILLED)


# --- warm -----------------------------------------------------------------------------------------------------------


class Warm(EndAtFailure):
    """Plugin: serves requests in place of the loop over tests."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = live_functions()
        gc.collect()
        gc.freeze()
        self.requests.answer(ready=True)

        def run(request: dict[str, Any], report: Any) -> int:
            if not (patch_defaults if request["is_default"] else patch)(functions, request):
                return UNPATCHED
            chosen = [(items[test], seconds) for test, seconds in request["tests"] if test in items]
            for at, (item, seconds) in enumerate(chosen):
                following = chosen[at + 1][0] if at + 1 < len(chosen) else None
                report(item.nodeid)
                limit_time(seconds)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            return SURVIVED

        for request in self.requests:
            self.requests.answer(**in_child(run, request))
        return True


def live_functions() -> dict[tuple[str, str], list[types.FunctionType]]:
    """All functions of the package that exist, by module file and qualified name; caches are emptied."""
    found: dict[tuple[str, str], list[types.FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:  # isinstance would wake lazy objects
            code = thing.__code__
            found.setdefault((code.co_filename, code.co_qualname), []).append(thing)
        elif type(thing).__name__ == "_lru_cache_wrapper" and str(thing.__module__).startswith(TESTED):
            thing.cache_clear()
    return found


def patch(functions: dict[tuple[str, str], list[types.FunctionType]], request: dict[str, Any]) -> bool:
    """Gives every live function around the change its new code; False where none could take it."""
    path = sys.modules[f"{PACKAGE}.{request['module']}"].__file__
    assert path is not None
    assert Path(path).is_relative_to(Path.cwd()), f"{path} is not in the copy that is tested"
    old_codes = list(_codes(compile(Path(path).read_text(encoding="utf-8"), path, "exec")))
    new_codes = list(_codes(compile(request["source"], path, "exec")))
    changed = False
    for name in {code.co_qualname for code in new_codes}:
        olds = [code for code in old_codes if code.co_qualname == name]
        news = [code for code in new_codes if code.co_qualname == name]
        if len(olds) != len(news) or not _encloses(name, request["function"]):
            continue
        for function in functions.get((path, name), []):
            for old, new in zip(olds, news, strict=True):
                if function.__code__.co_firstlineno == old.co_firstlineno and "<" not in name.rsplit(".")[-1]:
                    if function.__code__.co_freevars != new.co_freevars:
                        return False
                    function.__code__ = new
                    changed = True
    return changed


def patch_defaults(
    functions: dict[tuple[str, str], list[types.FunctionType]], request: dict[str, Any]
) -> bool:
    """Gives every live function of the changed name the defaults that the changed text has."""
    module = sys.modules[f"{PACKAGE}.{request['module']}"]
    changed = False
    for node, name in _definitions(ast.parse(request["source"]), ""):
        if name == request["function"]:
            values = [eval(ast.unparse(default), vars(module)) for default in node.args.defaults]
            by_keyword = {
                argument.arg: eval(ast.unparse(default), vars(module))
                for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if default is not None
            }
            for function in functions.get((str(module.__file__), name), []):
                function.__defaults__ = tuple(values) or None
                function.__kwdefaults__ = by_keyword or None
                changed = True
    return changed


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _encloses(qualname: str, function: str) -> bool:
    plain = qualname.replace(".<locals>", "")
    return plain == function or function.startswith(plain + ".")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# --- cold -----------------------------------------------------------------------------------------------------------


class Replaced(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module, and loads it from another text."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.source, str(self.path), "exec")


class Cold(EndAtFailure):
    """Plugin: runs the tests of a request in its order."""

    def __init__(self, request: dict[str, Any], report: Any) -> None:
        self.seconds = dict(request["tests"])
        self.report = report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: at for at, test in enumerate(self.seconds)}
        items[:] = sorted(
            (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.report(nodeid)
        limit_time(self.seconds[nodeid])


def run_cold(request: dict[str, Any], report: Any) -> int:
    name = f"{PACKAGE}.{request['module']}"
    path = Path(*name.split(".")).with_suffix(".py").resolve()
    sys.meta_path.insert(0, Replaced(name, str(path), request["source"]))
    report("(import)")
    limit_time(30)
    files = list(dict.fromkeys(test.partition("::")[0] for test, _ in request["tests"]))
    code = pytest.main([*PYTEST, "-x", *files], plugins=[Cold(request, report)])
    return SURVIVED if code == pytest.ExitCode.OK else KILLED


def main() -> None:
    """server.py warm|cold READ_FD WRITE_FD TESTS..."""
    kind, read_fd, write_fd, *tests = sys.argv[1:]
    requests = Requests(int(read_fd), int(write_fd))
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(silence, fd)
    for module in HEAVY:
        importlib.import_module(module)
    settle()
    if kind == "warm":
        pytest.main([*PYTEST, *tests], plugins=[Warm(requests)])
        return
    gc.freeze()
    requests.answer(ready=True)
    for request in requests:
        requests.answer(**in_child(run_cold, request))


if __name__ == "__main__":
    main()
