"""Programs with hidden tests: the share of the cases that the program in the answer passes.

The program runs in the sandbox (strop/sandbox), which holds the input of a case and never its expected output:
outputs are compared here. A case is either a text for standard input with the text expected on standard output, or the
arguments of a function with the value expected from it. Every stdin case has a sandbox of its own; the calls of a
function share one, each in a process of its own (code_harness.py). Nothing that a program writes starts another.

Time is that of the processor, so that a busy machine makes no right program wrong; starting sandboxes is not in it. A
program that waits instead is ended by the clock.

Ground truth, as data sets for code have it (PRIME, APPS, TACO, CodeContests), a dictionary or its JSON text:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                    standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}       function; or arguments as JSON lines
    [{"input": "1 2", "output": "3"}, ...]                                 one dictionary per case

Deviation: outputs are compared by lines without trailing blanks, then word by word, where a word with a decimal point
may differ by 1e-6 of its size. Data sets leave this open; graders in use accept at least that much.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strop.sandbox import Program, SandboxFailed, SandboxResult, shared

_FENCE = "```"
_TAG = re.compile(r"[\w+#-]*")
_PYTHON_TAGS = {"", "python", "python3", "py"}
_HARNESS = Path(__file__).with_name("code_harness.py")
_TOLERANCE = 1e-6
_PATIENCE = 4.0
"""Seconds on the clock for each second of processor time: so much slower may a busy machine be."""
_FREE_S = 0.05
"""Processor time of each sandbox that is not counted: an interpreter's start."""
_MAX_PRED = 4000
_MAX_DEPTH = 50
_EXPECTED = (
    "the ground truth of a code task is a dictionary (or its JSON text) with lists `inputs` and `outputs` of equal "
    "length, and `fn_name` for calls of a function; or a list of dictionaries with `input` and `output`"
)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The hidden tests of one task."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str = ""
    """Name of the function; empty for standard input and output."""


def start() -> None:
    """Start the sandbox of this process; SandboxUnavailable where programs cannot be isolated."""
    shared.get()


def grade(
    solution_str: str,
    ground_truth: object,
    *,
    mode: Literal["fraction", "all"] = "fraction",
    case_s: float = 4.0,
    total_s: float = 8.0,
) -> dict[str, Any]:
    """Score the last fenced Python block of an answer.

    Args:
        solution_str: the answer.
        ground_truth: the tests; see above.
        mode: `fraction`: passed cases / all cases. `all`: 1 when all pass, else 0; stops at the first that does not.
        case_s: limit of one stdin case, in seconds of processor time.
        total_s: limit of all cases together, in seconds of processor time; cases beyond it are not passed. A program
            that waits has four times as long on the clock, here as for one case.

    Returns:
        score, acc (whether all passed), pred (the program), num_passed, num_tests and failure: what the first failed
        case did.

    Raises:
        ValueError: the ground truth has another form.
        SandboxFailed: the sandbox failed, which says nothing about the answer.
        SandboxUnavailable: there is no isolation here, so nothing was run.
    """
    tests = read_tests(ground_truth)
    code = last_block(solution_str)
    if code is None:
        passed, failure = [False] * len(tests.inputs), "the answer has no fenced Python block"
    else:
        run = _Budget(total_s=total_s, case_s=case_s)
        if tests.function:
            passed, failure = _call_cases(code, tests, run)
        else:
            passed, failure = _feed_cases(code, tests, run, stops_early=mode == "all")
    num_passed = sum(passed)
    is_right = num_passed == len(tests.inputs)
    return {
        "score": float(is_right) if mode == "all" else num_passed / len(tests.inputs),
        "acc": is_right, "pred": (code or "")[:_MAX_PRED],
        "num_passed": num_passed, "num_tests": len(tests.inputs), "failure": failure[:500],
    }  # fmt: skip


def last_block(text: str) -> str | None:
    """The content of the last complete fenced block that is Python or has no language. One pass over the text."""
    last, tag, lines = "", None, list[str]()
    for line in text.split("\n"):
        inner = line.lstrip(" \t")
        if not inner.startswith(_FENCE):
            lines.append(line)
        elif tag is None:
            match = _TAG.match(inner.removeprefix(_FENCE).lstrip(" \t"))
            tag, lines = match[0].lower() if match else "", []
        else:
            if tag in _PYTHON_TAGS:
                last = "".join(f"{each}\n" for each in lines)
            tag, lines = None, []
    return last if last.strip() else None


def read_tests(ground_truth: object) -> Tests:
    """The tests in any of the known forms; ValueError for another one."""
    data = ground_truth
    for _ in range(2):  # JSON text, sometimes inside JSON text
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{_EXPECTED}; this one is no JSON: {error}") from error
    if isinstance(data, Sequence) and data and all(isinstance(case, Mapping) for case in data):
        data = {
            "inputs": [case.get("input") for case in data], "outputs": [case.get("output") for case in data],
            "fn_name": next((case["fn_name"] for case in data if case.get("fn_name")), ""),
        }  # fmt: skip
    if not isinstance(data, Mapping) or "inputs" not in data or "outputs" not in data:
        description = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"{_EXPECTED}; this one has {description}")
    inputs, outputs = (_as_list(data[key]) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{_EXPECTED}; this one has {len(inputs)} inputs and {len(outputs)} outputs")
    function = str(data.get("fn_name") or "").rpartition(".")[2]
    return Tests(inputs=tuple(inputs), outputs=tuple(outputs), function=function)


def _as_list(value: Any) -> list[Any]:
    return list(value.tolist() if hasattr(value, "tolist") else value)  # data frames bring arrays


class _Budget:
    """Time left for the cases of one answer, and the sandbox they run in."""

    def __init__(self, *, total_s: float, case_s: float) -> None:
        self.left_s = total_s
        self._case_s = case_s

    def run(self, program: Program, *, is_one_case: bool) -> SandboxResult:
        """Run a program within what is left; SandboxFailed when the sandbox fails."""
        sandbox = shared.get()
        configured = sandbox.config.limits
        cpu_s = min(self._case_s, self.left_s) if is_one_case else self.left_s
        limits = replace(
            configured, cpu_s=min(cpu_s, configured.cpu_s) + _FREE_S, wall_s=_PATIENCE * (cpu_s + _FREE_S)
        )
        result = sandbox.run_blocking(replace(program, limits=limits))
        if result.outcome == "infrastructure":
            raise SandboxFailed(f"the sandbox failed: {result.error}")
        # A server or service tells the time on the clock alone.
        self.left_s -= max(0.0, max(result.cpu_s, result.wall_s / _PATIENCE) - _FREE_S)
        return result


# --- standard input and output ---


def _feed_cases(code: str, tests: Tests, budget: _Budget, *, stops_early: bool) -> tuple[list[bool], str]:
    passed, failure = [], ""
    for number, (case_input, expected) in enumerate(zip(tests.inputs, tests.outputs, strict=True)):
        if budget.left_s <= 0 or (stops_early and failure):
            failure = failure or f"case {number}: no time left (total_s)"
            break
        program = Program(code=code, stdin=_as_text(case_input).encode("utf-8", errors="replace"))
        result = budget.run(program, is_one_case=True)
        is_right = result.outcome == "ok" and same_output(result.text, _as_text(expected))
        passed.append(is_right)
        if not is_right:
            failure = failure or f"case {number}: {_failure(result)}"
    return passed, failure


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _failure(result: SandboxResult) -> str:
    if result.outcome == "ok":
        return "wrong output"
    last_line = result.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
    return f"{result.error}: {last_line}" if last_line else result.error


def same_output(output: str, expected: str) -> bool:
    """True if two outputs are the same; see the module's docstring."""
    lines, expected_lines = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected)
    )
    if lines == expected_lines:
        return True
    words, expected_words = output.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected:
        return False
    try:
        return _close(float(word), float(expected))
    except ValueError:
        return False


def _close(number: float, expected: float) -> bool:
    return abs(number - expected) <= _TOLERANCE * max(1.0, abs(expected))  # False for NaN


# --- calls of a function ---


def _call_cases(code: str, tests: Tests, budget: _Budget) -> tuple[list[bool], str]:
    """All cases in one sandbox; the results reported from there are compared here and decide nothing else."""
    task = {"name": tests.function, "cases": [_arguments(case_input) for case_input in tests.inputs]}
    files = {
        "harness.py": _HARNESS.read_bytes(), "solution.py": code.encode("utf-8", errors="replace"),
        "cases.json": json.dumps(task).encode(),
    }  # fmt: skip
    result = budget.run(Program(command=("python", "-B", "harness.py"), files=files), is_one_case=False)
    results = _read_results(result.text, len(tests.inputs))
    passed = [
        bool(results.get(number)) and same_value(results[number][0], _expected(expected))
        for number, expected in enumerate(tests.outputs)
    ]
    first_wrong = next((number for number, is_right in enumerate(passed) if not is_right), None)
    if first_wrong is None:
        return passed, ""
    if results.get(first_wrong):
        reason = "wrong result"
    elif first_wrong in results and result.outcome == "ok":
        reason = f"it ended without a plain value{_harness_note(first_wrong, result)}"
    else:
        reason = _failure(result) if result.outcome != "ok" else "it returned nothing"
    return passed, f"case {first_wrong}: {reason}"


def _harness_note(number: int, result: SandboxResult) -> str:
    """Message of the harness about a case; empty where there is none."""
    start = f"case {number}: "
    lines = result.stderr.decode(errors="replace").splitlines()
    return next((f" ({line.removeprefix(start)})" for line in lines if line.startswith(start)), "")


def _arguments(case_input: object) -> list[Any]:
    """A list of arguments, or a text with one JSON value per line."""
    if not isinstance(case_input, str):
        return _as_list(case_input)
    return [_json_or_text(line) for line in case_input.splitlines() if line.strip()]


def _expected(value: object) -> Any:
    return _json_or_text(value) if isinstance(value, str) else value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read_results(text: str, num_cases: int) -> dict[int, list[Any]]:
    """Value of each case, in a list that is empty without one, from the harness's lines. The program may have written
    any of them."""
    results = dict[int, list[Any]]()
    for line in text.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            continue
        match message:
            case [int(number), *rest] if len(rest) <= 1 and 0 <= number < num_cases:
                results.setdefault(number, rest)
    return results


def same_value(value: object, expected: object) -> bool:
    """True if a result is the expected one. APPS writes some expected values as a list of one: both are taken."""
    if _same(value, expected, _MAX_DEPTH):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same(value, expected[0], _MAX_DEPTH)


def _same(value: object, expected: object, depth: int) -> bool:
    if depth == 0 or isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_same(item, other, depth - 1) for item, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(value, Mapping)
            and set(value) == {str(key) for key in expected}
            and all(_same(value[str(key)], item, depth - 1) for key, item in expected.items())
        )
    if isinstance(expected, float) and isinstance(value, (int, float)):
        try:
            return _close(float(value), expected)
        except OverflowError:
            return False
    return bool(value == expected)
