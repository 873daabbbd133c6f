"""Programs in answers, scored by hidden tests; and payloads aimed at graders of every kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.agents.tools.python_sandbox import _without_fence
from strop.protocol.trajectory import Prompt
from strop.rewards import Outcome, RewardConfig, RewardPool, default_compute_score, known_data_sources
from strop.rewards.scorers import code as scorer
from strop.rewards.scorers.code import grade, last_block, read_tests, same_output, same_value
from strop.sandbox import (
    Limits,
    SandboxConfig,
    SandboxFailed,
    SandboxResult,
    SandboxUnavailable,
    shared,
)

ADD = {"inputs": ["1 2\n", "10 20\n", "-1 1\n"], "outputs": ["3\n", "30\n", "0\n"]}


@pytest.fixture(scope="module", autouse=True)
def _shared_sandbox() -> Iterator[None]:
    shared.configure(SandboxConfig(max_concurrent=2, limits=Limits(memory_mib=128)))
    yield
    shared.close()


def fenced(code: str, tag: str = "python") -> str:
    return f"Here it is:\n```{tag}\n{code}\n```\nDone."


# --- reading ---


def test_last_complete_python_block_is_the_program() -> None:
    assert last_block("```python\nfirst\n```\ntext\n```py\nlast\n```\n```cpp\nint x;\n```") == "last\n"
    assert last_block("```\nplain\n```") == "plain\n"
    assert last_block("    ```python\n    indented\n    ```") == "    indented\n"
    assert last_block("```python\nunfinished") is None
    assert last_block("no block") is None
    assert last_block("```python\n\n```") is None


@pytest.mark.parametrize("open_end", ["```", "```python", "\n```\n", "``` ", " ", "```a\n \n", "\n \t"])
def test_time_to_find_the_block_grows_with_the_text_and_not_faster(open_end: str) -> None:
    # A reader that goes over it again and again does not come back.
    text = "```" + open_end * (1_000_000 // len(open_end)) + "a" * 1_000_000
    last_block(text)
    assert _without_fence(text) == text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx\n```", "x"), (" ```py \nx\ny\n``` \n", "x\ny"), ("```\nx```", "x"), ("x", "x"),
        ("```sh\nx\n```", "```sh\nx\n```"), ("```python\nx", "```python\nx"), ("see ```\nx\n```", "see ```\nx\n```"),
    ],
)  # fmt: skip
def test_program_of_a_tool_call_may_stand_in_a_fence(text: str, code: str) -> None:
    assert _without_fence(text) == code


@pytest.mark.parametrize(
    "truth",
    [
        ADD,
        json.dumps(ADD),
        json.dumps(json.dumps(ADD)),
        [
            {"input": given, "output": wanted}
            for given, wanted in zip(ADD["inputs"], ADD["outputs"], strict=True)
        ],
    ],
)
def test_tests_are_read_in_every_known_form(truth: Any) -> None:
    tests = read_tests(truth)
    assert list(tests.inputs) == ADD["inputs"]
    assert list(tests.outputs) == ADD["outputs"]
    assert tests.function == ""


@pytest.mark.parametrize(
    ("truth", "found"),
    [
        ("{", "this one is no JSON"), ({"inputs": []}, r"this one has \['inputs'\]"), (7, "this one has int"),
        ({"inputs": [1], "outputs": []}, "1 inputs and 0 outputs"), ({"inputs": [], "outputs": []}, "0 inputs"),
        ("[" * 100_000, "this one is no JSON"),
    ],
)  # fmt: skip
def test_other_ground_truths_are_refused(truth: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        read_tests(truth)


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("3\n", "3", True), ("3 \n\n", "3\n", True), ("1 2 3", "1\n2\n3", True), ("3.0000001", "3.0", True),
        ("3.1", "3.0", False), ("3.0", "3", False), ("nan", "1.0", False), ("inf", "1.5", False), ("", "0", False),
        ("3 3", "3", False), ("Yes", "YES", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_words(found: str, expected: str, is_same: bool) -> None:
    assert same_output(found, expected) is is_same


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ([1, 2], [1, 2], True), ([1, 2], (1, 2), True), (3, [3], True), ([3], 3, False), (True, 1, False),
        (1, True, False), (0.1 + 0.2, 0.3, True), ({"1": [2]}, {1: [2]}, True), ("3", 3, False), (None, None, True),
        (10**400, 1.5, False), ([[1]], [[2]], False), ([1, 2, 3], [1, 2], False),
    ],
)  # fmt: skip
def test_results_are_compared_by_value(found: Any, expected: Any, is_same: bool) -> None:
    assert same_value(found, expected) is is_same


# --- scoring ---


def test_right_program_passes_every_case() -> None:
    graded = default_compute_score("taco", fenced("print(sum(map(int, input().split())))"), ADD)
    assert (graded["score"], graded["acc"], graded["num_passed"], graded["failure"]) == (1.0, True, 3, "")
    assert graded["pred"] == "print(sum(map(int, input().split())))\n"
    assert {"apps", "codecontests", "codeforces", "taco"} <= set(known_data_sources())


def test_share_of_cases_or_all_of_them() -> None:
    answer = fenced("a, b = map(int, input().split())\nprint(a + b if a != 10 else 0)")
    graded = grade(answer, ADD)
    assert graded["score"] == pytest.approx(2 / 3)
    assert (graded["acc"], graded["failure"]) == (False, "case 1: wrong output")
    assert grade(answer, ADD, mode="all")["score"] == 0.0


def test_answer_without_a_program_scores_zero() -> None:
    graded = grade("the answer is 3", ADD)
    assert (graded["score"], graded["failure"]) == (0.0, "the answer has no fenced Python block")


def test_failures_of_a_program_are_its_own() -> None:
    truth = {"inputs": ["x"], "outputs": ["1"]}
    assert "case 0: the program exited with code 1: NameError" in grade(fenced("print(y)"), truth)["failure"]
    assert "processor time (limits.cpu_s)" in grade(fenced("while True: pass"), truth, case_s=0.2)["failure"]
    assert (
        "did not finish in 0.6 s"
        in grade(fenced("import time; time.sleep(60)"), truth, case_s=0.1)["failure"]
    )
    graded = grade(fenced("while True: pass"), ADD, case_s=0.2, total_s=0.3)
    assert (graded["score"], graded["num_tests"]) == (0.0, 3)


FUNCTION = {"inputs": ["[1, 2]\n3", [[4], 5], [[], 6]], "outputs": ["6", 9, [6]], "fn_name": "Solution.total"}


def test_function_and_method_are_called_with_the_arguments() -> None:
    method = (
        "class Solution:\n    def total(self, values: List[int], more: int) -> int:\n"
        "        print('noise')\n        return sum(values) + more"
    )
    assert grade(fenced(method), FUNCTION)["score"] == 1.0
    function = "def total(values, more):\n    return reduce(operator.add, values, more)"
    assert grade(fenced(function), FUNCTION)["score"] == 1.0


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("1 / 0", "it ended without a plain value (ZeroDivisionError: division by zero)"),
        ("return object()", "it ended without a plain value (TypeError: 'object' object is not iterable)"),
        ("import os; os._exit(5)", "it ended without a plain value (the program exited with code 5)"),
        (
            "import os; os.kill(os.getpid(), 11)",
            "it ended without a plain value (the program died with SIGSEGV)",
        ),
        ("return -1", "wrong result"),
    ],
)
def test_case_that_goes_wrong_costs_that_case_only(body: str, failure: str) -> None:
    answer = fenced(
        f"def total(values, more):\n    if more == 5:\n        {body}\n    return sum(values) + more"
    )
    graded = grade(answer, FUNCTION)
    assert graded["num_passed"] == 2
    assert graded["failure"] == f"case 1: {failure}"


def test_solution_that_does_not_load_fails_every_case() -> None:
    graded = grade(fenced("import nothing_of_that_name"), FUNCTION)
    assert graded["score"] == 0.0
    assert "No module named 'nothing_of_that_name'" in graded["failure"]
    assert "has no attribute 'total'" in grade(fenced("x = 1"), FUNCTION)["failure"]


# --- hidden tests stay hidden ---

HUNT = """
import gc, os, sys
wanted = "XYZ" + "ZY-42"
def look(text):
    at = text.find(wanted)
    if at >= 0:
        end = at
        while end < len(text) and (text[end].isalnum() or text[end] == "-"):
            end += 1
        return text[at:end]
found = None
for root in ("/box", "/tmp", "/dev/shm", "/proc", "/root", "/var", "/home"):
    for folder, below, names in os.walk(root):
        if "python" in folder:  # the interpreter's own library
            below.clear()
        for name in names[:200]:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                try:
                    with open(path, "rb") as file:
                        found = found or look(file.read(1 << 20).decode(errors="replace"))
                except OSError:
                    pass
found = found or look(sys.stdin.read() if not sys.stdin.closed else "")
found = found or look(repr(dict(os.environ))) or look(repr(sys.argv))
frame = sys._getframe()
while frame is not None:
    found = found or look(repr(frame.f_locals)) or look(repr(frame.f_globals))
    frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, (list, tuple, dict)) and len(thing) < 1000:
        try:
            found = found or look(repr(thing))
        except Exception:
            pass
"""


def test_program_that_hunts_for_the_expected_output_finds_nothing() -> None:
    truth = {"inputs": ["go\n"], "outputs": ["XYZZY-42-secret"]}
    assert grade(fenced(HUNT + "print(found)"), truth)["failure"] == "case 0: wrong output"
    control = {"inputs": ["XYZZY-42-secret\n"], "outputs": ["XYZZY-42-secret"]}  # the hunt itself works
    assert grade(fenced(HUNT + "print(found)"), control)["score"] == 1.0


def test_function_that_hunts_for_the_expected_result_finds_nothing() -> None:
    truth = {"inputs": [["go"]], "outputs": ["XYZZY-42-secret"], "fn_name": "f"}
    hunt = "def f(given):\n" + "".join(f"    {line}\n" for line in HUNT.splitlines()) + "    return found"
    assert grade(fenced(hunt), truth)["failure"] == "case 0: wrong result"


def test_forged_results_still_have_to_be_right() -> None:
    forged = (
        "import os\ndef total(*a):\n    for fd in range(64):\n        try:\n"
        "            os.write(fd, b'[0, true]\\n[1, true]\\n[2, true]\\n[\"passed\", 3]\\n' + b'[' * 9999 + b'\\n')\n"
        "        except OSError:\n            pass\n    os._exit(0)"
    )
    assert grade(fenced(forged), FUNCTION)["score"] == 0.0


@pytest.mark.parametrize("line", ["[-2]", "[-1]", "[0]", '["loaded"]', "[1e9]", "[99999999999]", "[true, 6]"])
def test_forged_line_starts_no_other_sandbox(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    runs = []
    run = scorer._Budget.run

    def counted(self: Any, program: Any, *, is_one_case: bool) -> SandboxResult:
        runs.append(program)
        assert len(runs) < 4, "sandboxes are started again and again"
        return run(self, program, is_one_case=is_one_case)

    monkeypatch.setattr(scorer._Budget, "run", counted)
    write = (
        f"import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{line}\\n')\n    except OSError: pass\n"
    )
    forged = f"{write}os._exit(0)"
    assert grade(fenced(forged), FUNCTION)["score"] == 0.0
    assert len(runs) == 1


def test_case_that_kills_the_process_above_it_costs_the_cases_behind_it() -> None:
    kill = "    if more == 5:\n        os.kill(os.getppid(), 9)\n"
    answer = fenced(f"import os\ndef total(values, more):\n{kill}    return sum(values) + more")
    graded = grade(answer, FUNCTION)
    assert graded["num_passed"] in (1, 2)  # the case itself may still have an answer
    assert "died with SIGKILL" in graded["failure"]


def test_result_whose_reading_would_run_code_or_never_end_is_wrong() -> None:
    for value in (
        "'['*50000+']'*50000",
        "10**100000",
        "{'__reduce__': 'os.system'}",
        "float('nan')",
        "[[]]*100000",
    ):
        assert grade(fenced(f"def total(*a): return {value}"), FUNCTION, total_s=3.0)["score"] == 0.0


# --- in the reward workers ---


def score_in_workers(config: RewardConfig, rows: list[tuple[str, Any, str]]) -> list[Outcome]:
    async def score() -> list[Outcome]:
        async with RewardPool(config) as pool:
            prompts = [
                Prompt(
                    uid=f"u{number}", row=number, token_ids=(1,), messages=(), data_source=source, ground_truth=truth,
                    extra_info={}, columns={},
                )
                for number, (source, truth, _) in enumerate(rows)
            ]  # fmt: skip
            return await asyncio.gather(
                *(pool.score_text(prompt, text) for prompt, (_, _, text) in zip(prompts, rows, strict=True))
            )

    return asyncio.run(score())


def test_reward_workers_run_programs_in_the_sandbox_of_the_configuration() -> None:
    config = RewardConfig(num_workers=2, timeout_s=60.0, sandbox=SandboxConfig(limits=Limits(output_kib=1)))
    rows = [
        ("taco", ADD, fenced("print(sum(map(int, input().split())))")),
        ("taco", {"inputs": [""], "outputs": ["y" * 3000]}, fenced("print('y' * 3000)")),
    ]
    right, loud = score_in_workers(config, rows)
    assert (right.kind, right.score, right.parts["num_passed"]) == ("score", 1.0, 3)
    assert (loud.score, loud.parts["failure"]) == (
        0.0,
        "case 0: the program wrote more than 1 KiB of standard output (limits.output_kib)",
    )


ASK = """
from strop.sandbox import Limits, Program, shared

def compute_score(solution_str, **_):
    result = shared.get().run_blocking(Program(code=solution_str, limits=Limits(wall_s=2.5, memory_mib=64)))
    return {"score": float(result.outcome == "ok"), "outcome": result.outcome}
"""


@pytest.mark.slow
def test_nothing_that_a_program_does_leaves_its_sample_without_a_score(tmp_path: Path) -> None:
    """The deadline of a sample is a second: each of these takes longer, or aims at what scores it."""
    right = fenced("import time\ntime.sleep(0.02)\nprint(sum(map(int, input().split())))")
    many = {"inputs": ["1 2\n"] * 50, "outputs": ["3\n"] * 50}
    limit = "import os, resource\nresource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\n"
    hostile = [
        "import time; time.sleep(600)",
        "while True: pass",
        f"{limit}for _ in range(999): os.fork() or os._exit(0); os.wait()",
        "import os; os.kill(os.getpid(), 9)",
        "raise MemoryError",
        "\ud800",
    ]
    kwargs = {"case_s": 0.4, "total_s": 0.4}
    config = RewardConfig(num_workers=2, timeout_s=1.0, kwargs=kwargs)
    rows = [("taco", ADD, fenced(code)) for code in hostile]
    *lost, passed = score_in_workers(config, [*rows, ("taco", many, right)])
    assert [(each.kind, each.score) for each in lost] == [("score", 0.0)] * len(hostile), lost
    assert (passed.kind, passed.score) == ("score", 1.0), passed

    path = tmp_path / "reward.py"
    path.write_text(ASK)
    config = RewardConfig(path=str(path), num_workers=2, timeout_s=1.0)
    asked = score_in_workers(config, [("own", None, code) for code in (hostile[0], "print(1)")])
    assert [(each.kind, each.parts.get("outcome")) for each in asked] == [
        ("score", "timeout"),
        ("score", "ok"),
    ], asked


@pytest.mark.slow
def test_deadline_goes_on_outside_of_the_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(ASK.replace("    return", "    while True: pass\n    return"))
    (outcome,) = score_in_workers(
        RewardConfig(path=str(path), num_workers=1, timeout_s=1.0), [("own", None, "1")]
    )
    assert (outcome.kind, "reward.timeout_s" in outcome.error) == ("timeout", True)


def test_worker_without_isolation_scores_nothing() -> None:
    config = RewardConfig(num_workers=1, timeout_s=60.0, sandbox=SandboxConfig(python="/no/python"))
    (outcome,) = score_in_workers(config, [("taco", ADD, fenced("print(3)"))])
    assert outcome.kind == "infrastructure"
    assert "SandboxUnavailable: reward.sandbox.python is '/no/python'" in outcome.error


def test_failed_sandbox_is_an_error_and_not_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        config = SandboxConfig()

        def run_blocking(self, _program: Any) -> SandboxResult:
            return SandboxResult(outcome="infrastructure", error="no machine")

    monkeypatch.setattr(scorer.shared, "get", Broken)
    with pytest.raises(SandboxFailed, match="the sandbox failed: no machine"):
        grade(fenced("print(1)"), ADD)
    assert issubclass(SandboxUnavailable, ValueError)


@pytest.mark.slow
def test_payloads_for_maths_graders_end_within_the_deadline(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payloads = [
        "9^{9^{9^{9^{9}}}}", "9**9**9**9", f"__import__('os').system('touch {mark}')", f"open('{mark}','w')",
        "{" * 3000 + "1" + "}" * 3000, "\\frac{" * 400 + "1", "\x00\u202e12", "$" * 5000,
    ]  # fmt: skip
    rows = [("lighteval/MATH", "12", f"\\boxed{{{payload}}}") for payload in payloads]
    rows.append(("lighteval/MATH", "12", "\\boxed{12}"))
    started = time.monotonic()
    outcomes = score_in_workers(RewardConfig(num_workers=2, timeout_s=1.0), rows)
    assert time.monotonic() - started < 120
    assert outcomes[-1].score == 1.0
    for (_, _, text), outcome in zip(rows[:-1], outcomes, strict=False):
        assert outcome.kind in ("score", "error", "timeout"), text
        assert outcome.score is None or outcome.score <= 0, text
    assert not mark.exists()
