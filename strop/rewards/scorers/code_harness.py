"""Runs inside the sandbox: calls the model's function on each case and writes what it returned, as JSON lines.

Started as `python harness.py` beside solution.py and cases.json, which holds the function's name and the arguments of
each case. It knows no expected value, so nothing in this process does: results are compared outside. After ["loaded"],
each line is [case, result]; a case that raised or returned no JSON value is [case] alone. What the model's code prints
goes nowhere.
"""

import importlib.util
import json
import os
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
    for each in PRELUDE:
        known = importlib.import_module(each)
        setattr(module, each, known)
        if each in WHOLE:
            for key, value in vars(known).items():
                if not key.startswith("_"):
                    setattr(module, key, value)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    holder = getattr(module, "Solution", None)
    if holder is not None and hasattr(holder, name):
        return getattr(holder(), name)
    return getattr(module, name)


def main() -> None:
    """Call the function on every case, one line each."""
    results = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    task = json.loads(Path("cases.json").read_text(encoding="utf-8"))
    function = load(task["name"])
    results.write('["loaded"]\n')
    results.flush()
    sys.setrecursionlimit(20_000)
    for number, arguments in enumerate(task["cases"]):
        try:
            line = json.dumps([number, function(*arguments)], default=list)
        except Exception as error:  # noqa: BLE001 (whatever the model's code raises is its failure on this case)
            sys.stderr.write(f"case {number}: {type(error).__name__}: {str(error)[:200]}\n")
            line = json.dumps([number])
        results.write(line + "\n")
        results.flush()


if __name__ == "__main__":
    main()
