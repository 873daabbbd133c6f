"""Runs inside the sandbox: calls the model's function on each case and writes what it returned, as JSON lines.

Started as `python harness.py` beside solution.py and cases.json, which holds the function's name and the arguments of
each case. The solution is loaded once; each case is called in a copy of this process, so that one which exits, crashes
or breaks something costs that case and no other. No expected value is known here: results are compared outside, and
since the model's code shares this sandbox, nothing that is written here is believed beyond that.

Each line is [case, result]; a case without a JSON value is [case] alone, with the reason on standard error. What the
model's code prints goes nowhere.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Solutions for online judges leave these imports out; there, they are in place.
PRELUDE = (
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "sys", "typing",
)  # fmt: skip
WHOLE = ("bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "typing")


def load(name: str) -> Any:
    """The function, or the method of a class Solution, in solution.py."""
    spec = importlib.util.spec_from_file_location("solution", "solution.py")
    assert spec is not None, "a file has a spec"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    for library_name in PRELUDE:
        library = importlib.import_module(library_name)
        setattr(module, library_name, library)
        if library_name in WHOLE:
            for key, value in vars(library).items():
                if not key.startswith("_"):
                    setattr(module, key, value)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    holder = getattr(module, "Solution", None)
    if holder is not None and hasattr(holder, name):
        return getattr(holder(), name)
    return getattr(module, name)


def write(fd: int, text: str) -> None:
    """Write a text on a line of its own, whatever was written before."""
    data = f"\n{text}\n".encode("ascii", errors="replace")
    while data:
        data = data[os.write(fd, data) :]


def call(function: Any, number: int, arguments: list[Any], results: int) -> None:
    """One case, in a process of its own."""
    try:
        write(results, json.dumps([number, function(*arguments)], default=list))
    except Exception as error:  # noqa: BLE001 (whatever the model's code raises is its failure on this case)
        write(results, json.dumps([number]))
        write(2, f"case {number}: {type(error).__name__}: {str(error)[:200]}")


def reason(status: int) -> str:
    """Exit code or signal that ended a process."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the program exited with code {code}"
    names = {int(entry): entry.name for entry in signal.Signals}
    return f"the program died with {names.get(-code, f'signal {-code}')}"


def main() -> None:
    """Call the function on every case, one line each."""
    results = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    task = json.loads(Path("cases.json").read_text(encoding="utf-8"))
    function = load(task["name"])
    sys.setrecursionlimit(20_000)
    for number, arguments in enumerate(task["cases"]):
        child = os.fork()
        if child == 0:
            call(function, number, arguments, results)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            write(results, json.dumps([number]))
            write(2, f"case {number}: {reason(status)}")


if __name__ == "__main__":
    main()
