"""Several reward functions, functions that do not apply, and policies for samples without a score."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from reward_cases import make_prompt, score_all, write_reward

from strop.rewards import Outcome, RewardConfig
from strop.rewards.combine import Part, combine
from strop.rewards.config import FunctionConfig, OnFailureConfig

pytestmark = pytest.mark.timeout(60)

FUNCTIONS = """
import asyncio, os, pathlib, time, types

async def correct(completions, ground_truth, **columns):
    await asyncio.sleep(0)
    return [float(c[-1]["content"] == t) for c, t in zip(completions, ground_truth)]

def length(solution_str, scale=1.0, **_):
    return {"score": scale * len(solution_str), "chars": len(solution_str), "pred": solution_str[:1]}

def only_maths(prompts, completions, kind, **columns):
    return [1.0 if one == "maths" else None for one in kind]

def broken(solution_strs, **_):
    raise KeyError("x")

def unreachable(**_):
    raise ConnectionRefusedError("no service")

def over_http(solution_str):
    from urllib.request import urlopen
    urlopen("http://127.0.0.1:1/score", timeout=5)  # nobody listens on port 1

def wrapped(solution_str):
    try:
        raise ConnectionRefusedError("no service")
    except ConnectionRefusedError as error:
        raise RuntimeError("the grader failed") from error

def handled(solution_str):
    try:
        raise ConnectionRefusedError("no service")
    except ConnectionRefusedError:
        raise KeyError("x") from None

def parsed(solution_str):
    try:
        raise ConnectionRefusedError("no service")
    except ConnectionError:
        return float("no number: " + solution_str)

class Client(Exception):
    pass

Client.__module__ = "httpx._exceptions"

def of_client(solution_str):
    try:
        raise ConnectionRefusedError("no service")
    except ConnectionError:
        raise Client("no answer")

def client_timeout(solution_str):
    raise Client("no answer") from TimeoutError("timed out")

def unnamed(solution_str):
    import socket
    from urllib.error import URLError
    raise URLError(socket.gaierror(-2, "Name or service not known"))

def late(solution_str):
    from urllib.error import URLError
    raise URLError(TimeoutError("timed out"))

def slow_answer(solution_str):
    raise RuntimeError("the program took too long") from TimeoutError("timed out")

def one_of(solution_str):
    function = globals()[solution_str]
    return function(*[solution_str][:function.__code__.co_argcount])

def refused_by(solution_str):
    package, status = solution_str.split()
    status = int(status)
    refusal = type("Refusal", (Exception,), {"__module__": package})("no answer")
    if package == "requests.exceptions":
        refusal.response = types.SimpleNamespace(status_code=status)
    else:
        setattr(refusal, "status" if package == "aiohttp" else "status_code", status)
    raise refusal

def lost_by(solution_str):
    package, base = solution_str.split()
    lost = type(base, (Exception,), {"__module__": package})
    raise type("Other", (lost,), {})("no answer")

def never_answered():
    import socket
    from urllib.request import urlopen
    with socket.create_server(("127.0.0.1", 0)) as server:
        urlopen("http://127.0.0.1:%d/" % server.getsockname()[1], timeout=0.1)

def own_limit():
    raise TimeoutError("the comparison took too long")

def closed(**_):
    from strop.rewards import RewardUnavailable
    raise RewardUnavailable("the checker is closed")

def flaky(solution_str, counter=""):
    path = pathlib.Path(counter)
    tries = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (tries + 1))
    if solution_str == "slow" and tries == 0:
        time.sleep(600)
    if tries < 2:
        raise ConnectionResetError("again")
    return 0.5
"""


def test_combined_score_is_the_weighted_sum_over_those_that_apply() -> None:
    # 2 * 0.5 - 1 * 3 = -2; what does not apply has no part and no place in the sum.
    parts = [
        Part(key="a", weight=2.0, score=0.5, parts={"pred": "x"}),
        Part(key="b", weight=-1.0, score=3.0, parts={"acc": True, "pred": "y"}),
        Part(key="c", weight=100.0, score=None),
    ]
    score, merged = combine(parts)
    assert score == -2.0
    assert merged == {
        "a": 0.5,
        "a/pred": "x",
        "b": 3.0,
        "b/acc": True,
        "b/pred": "y",
        "acc": True,
        "pred": "y",
    }
    assert combine([Part(key="c", score=None)]) == (None, {})


def run(folder: Path, functions: list[FunctionConfig], texts: list[str], **fields: Any) -> list[Outcome]:
    config = RewardConfig(functions=tuple(functions), num_workers=1, timeout_s=20.0, **fields)
    return score_all(config, texts, make_prompt(columns={"kind": "maths"}))


def test_several_functions_of_different_kinds_are_added_and_kept_apart(tmp_path: Path) -> None:
    path = write_reward(tmp_path, FUNCTIONS)
    functions = [
        FunctionConfig(path=path, name="correct", weight=2.0),
        FunctionConfig(path=path, name="length", key="size", weight=0.5, kwargs={"scale": 0.1}),
        FunctionConfig(path=path, name="only_maths"),
        FunctionConfig(weight=0.25),
    ]
    right, wrong = run(tmp_path, functions, ["12", "abc"])
    # 2 * 1 + 0.5 * 0.2 + 1 + 0.25 * 1 = 3.35; and 2 * 0 + 0.5 * 0.3 + 1 + 0 = 1.15.
    assert (right.score, wrong.score) == (pytest.approx(3.35), pytest.approx(1.15))
    assert wrong.parts == {
        "correct": 0.0, "size": pytest.approx(0.3), "size/chars": 3, "size/pred": "a", "only_maths": 1.0,
        "rule": 0.0, "rule/acc": False, "rule/pred": "abc", "acc": False, "pred": "abc",
    }  # fmt: skip


def test_function_that_returns_none_leaves_the_others_alone(tmp_path: Path) -> None:
    path = write_reward(tmp_path, FUNCTIONS)
    both = (FunctionConfig(path=path, name="correct"), FunctionConfig(path=path, name="only_maths"))
    prompt = make_prompt(columns={"kind": "poetry"})
    (outcome,) = score_all(RewardConfig(functions=both, num_workers=1, timeout_s=20.0), ["12"], prompt)
    assert (outcome.score, dict(outcome.parts)) == (1.0, {"correct": 1.0})
    alone = RewardConfig(path=path, name="only_maths", num_workers=1, timeout_s=20.0)
    (nothing,) = score_all(alone, ["12"], prompt)
    assert nothing.kind == "error"
    assert "only_maths in my_reward.py returned None, which is TRL's word for not applicable" in nothing.error


def test_one_broken_function_leaves_the_sample_without_score(tmp_path: Path) -> None:
    path = write_reward(tmp_path, FUNCTIONS)
    functions = [FunctionConfig(path=path, name="correct"), FunctionConfig(path=path, name="broken")]
    (outcome,) = run(tmp_path, functions, ["12"])
    assert (outcome.kind, outcome.score, outcome.fallback_score) == ("error", None, None)
    assert "broken in my_reward.py raised KeyError: 'x' at my_reward.py:" in outcome.error


def test_lost_connection_is_infrastructure_and_says_nothing_about_the_answer(tmp_path: Path) -> None:
    path = write_reward(tmp_path, FUNCTIONS)
    (closed,) = run(tmp_path, [FunctionConfig(path=path, name="closed")], ["12"])
    assert closed.kind == "infrastructure"
    (outcome,) = run(tmp_path, [FunctionConfig(path=path, name="unreachable")], ["12"])
    assert outcome.kind == "infrastructure"
    assert "unreachable in my_reward.py could not score: ConnectionRefusedError: no service" in outcome.error


LOST = {
    "over_http": ("infrastructure", "could not score: URLError: .*refused"),
    "wrapped": ("infrastructure", "could not score: RuntimeError: the grader failed"),
    "handled": ("error", "raised KeyError: 'x'"),
    "parsed": ("error", "raised ValueError: could not convert"),
    "of_client": ("infrastructure", "could not score: Client: no answer"),
    "client_timeout": ("infrastructure", "could not score: Client: no answer"),
    "unnamed": ("infrastructure", "could not score: URLError: .*not known"),
    "late": ("infrastructure", "could not score: URLError: .*timed out"),
    "never_answered": ("infrastructure", "could not score: TimeoutError: timed out"),
    "slow_answer": ("error", "raised RuntimeError: the program took too long"),
    "own_limit": ("error", "raised TimeoutError: the comparison took too long"),
}
REFUSED = {429: "infrastructure", 503: "infrastructure", 529: "infrastructure", 400: "error", 401: "error"}
CLIENTS = {
    "openai APIConnectionError": "infrastructure",
    "httpx2 NetworkError": "infrastructure",
    "httpx RemoteProtocolError": "infrastructure",
    "aiohttp.client_exceptions ClientConnectionError": "infrastructure",
    "requests.exceptions ChunkedEncodingError": "infrastructure",
    "requests.exceptions InvalidURL": "error",
    "mine APIConnectionError": "error",
}


def outcomes_of(folder: Path, name: str, texts: list[str]) -> dict[str, Outcome]:
    """By text, what a function makes of it, in one process for all of them."""
    function = FunctionConfig(path=write_reward(folder, FUNCTIONS), name=name)
    return dict(zip(texts, run(folder, [function], texts, retries=1), strict=True))


def test_a_lost_connection_behind_the_exception_of_a_client_is_infrastructure(tmp_path: Path) -> None:
    for name, outcome in outcomes_of(tmp_path, "one_of", list(LOST)).items():
        kind, sentence = LOST[name]
        assert outcome.kind == kind, (name, outcome.error)
        assert re.search(sentence, outcome.error), (name, outcome.error)


def test_a_server_that_is_asked_too_much_says_nothing_about_the_answer(tmp_path: Path) -> None:
    packages = ("openai", "requests.exceptions", "aiohttp", "httpx2")
    texts = [f"{package} {status}" for package in packages for status in REFUSED]
    kinds = {text: outcome.kind for text, outcome in outcomes_of(tmp_path, "refused_by", texts).items()}
    assert kinds == {text: REFUSED[int(text.split()[1])] for text in texts}


def test_a_connection_that_a_client_says_is_lost_is_infrastructure(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, "lost_by", list(CLIENTS))
    assert {text: outcome.kind for text, outcome in outcomes.items()} == CLIENTS


def flaky_outcome(
    folder: Path, text: str, retries: int, timeout_s: float = 20.0, **on_failure: Any
) -> tuple[Outcome, int]:
    counter = folder / "tries"
    config = RewardConfig(
        path=write_reward(folder, FUNCTIONS), name="flaky", kwargs={"counter": str(counter)}, num_workers=1,
        timeout_s=timeout_s, retries=retries, on_failure=OnFailureConfig(**on_failure), failed_score=-1.0,
    )  # fmt: skip
    (outcome,) = score_all(config, [text])
    return outcome, len(counter.read_text())


def test_retry_scores_again_until_it_works(tmp_path: Path) -> None:
    outcome, tries = flaky_outcome(tmp_path, "12", 3, infrastructure="retry", error="fixed")
    assert (outcome.score, outcome.fallback_score, tries) == (0.5, None, 3)


def test_retry_ends_after_its_number_and_excludes(tmp_path: Path) -> None:
    outcome, tries = flaky_outcome(tmp_path, "12", 1, infrastructure="retry", error="fixed")
    assert (outcome.kind, outcome.fallback_score, tries) == ("infrastructure", None, 2)


def test_each_kind_has_its_own_way_out(tmp_path: Path) -> None:
    outcome, tries = flaky_outcome(
        tmp_path, "slow", 1, timeout_s=2.0, infrastructure="retry", timeout="fixed"
    )
    assert (outcome.kind, outcome.score, outcome.fallback_score, tries) == ("timeout", None, -1.0, 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"failed_score": -1.0}, "reward.failed_score is -1.0, but nothing uses it"),
        (
            {"retries": 0},
            "reward.retries is 0, but it needs a whole number of at least 1: .* exclude in reward.on_failure",
        ),
        (
            {"retries": 2, "on_failure": OnFailureConfig(infrastructure="exclude")},
            "reward.retries is 2, but nothing in reward.on_failure is retry",
        ),
        ({"failed_score": float("inf")}, "reward.failed_score is inf"),
        (
            {"functions": (FunctionConfig(),), "path": "a.py"},
            "reward.functions is set together with reward.path",
        ),
        ({"functions": (FunctionConfig(), FunctionConfig())}, "two parts of the reward have the name 'rule'"),
        ({"functions": (FunctionConfig(key="acc"),)}, "has the key 'acc', which means something else"),
    ],
)
def test_settings_that_cannot_apply_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RewardConfig(**fields)


def test_function_without_a_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="reward.functions.weight is inf, but it needs a finite number"):
        FunctionConfig(weight=float("inf"))
    with pytest.raises(
        ValueError, match="reward.functions.name is 'grade', but reward.functions.path is empty"
    ):
        FunctionConfig(name="grade")
