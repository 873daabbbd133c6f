"""Reward functions that cannot be used: one sentence each, before training starts."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from reward_cases import DEADLINE_S, FAULTS, make_prompt, reward_processes, write_reward

from strop.protocol.trajectory import Prompt
from strop.rewards import RewardConfig, RewardError, RewardPool
from strop.rewards.config import FunctionConfig, OnFailureConfig
from strop.rewards.judges.config import JudgeConfig, ServerConfig
from strop.trainer.reward_trial import probe_answers

pytestmark = pytest.mark.timeout(60)


def load_error(folder: Path, source: str, **fields: Any) -> str:
    config = RewardConfig(path=write_reward(folder, source), **fields)

    async def run() -> None:
        async with RewardPool(config):
            raise AssertionError("the pool started")

    with pytest.raises(RewardError) as caught:
        asyncio.run(run())
    assert reward_processes() == []
    return str(caught.value)


def test_missing_file_is_named_with_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run(path: str) -> None:
        await RewardPool(RewardConfig(path=path)).start()

    with pytest.raises(
        RewardError, match=f"reward.path is 'nowhere.py', but {tmp_path}/nowhere.py is missing"
    ):
        asyncio.run(run("nowhere.py"))
    with pytest.raises(RewardError, match="is a folder"):
        asyncio.run(run("."))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "def score(): ...\ndef other(): ...\nimport os",
            "has no function 'compute_score': it defines other, score; set reward.name",
        ),
        ("x = 1", "has no function 'compute_score': it defines no function"),
        ("compute_score = 3", "is the int 3, not a function; set reward.name"),
        (
            "\nimport no_such_package",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_package' at my_reward.py:2",
        ),
        ("from trl.rewards import accuracy_reward", "what a file needs of trl has to be copied into it"),
        (
            "x = 1\ndef compute_score(:",
            "cannot be imported: SyntaxError: invalid syntax at my_reward.py:2",
        ),
        ("raise SystemExit(2)", "cannot be imported: SystemExit: 2 at my_reward.py:1"),
        ("import os\nos._exit(4)", "exited with status 4 while loading compute_score in my_reward.py"),
        ("def compute_score(solution): ...", "asks for solution, which strop does not pass"),
    ],
)
def test_function_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, source: str, sentence: str) -> None:
    message = load_error(tmp_path, source)
    assert sentence in message
    assert "\n" not in message


def test_import_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    message = load_error(tmp_path, "import time\ntime.sleep(600)", start_timeout_s=2.5)
    assert "could not be loaded within 2.5 s (reward.start_timeout_s): its imports hang" in message
    assert "my_reward.py:2" in message


def test_keyword_that_the_function_does_not_accept_is_named(tmp_path: Path) -> None:
    message = load_error(tmp_path, "def compute_score(solution_str): ...", kwargs={"bonsu": 1})
    assert "reward.kwargs has bonsu, but compute_score in my_reward.py accepts only solution_str" in message


def preflight_error(config: RewardConfig, prompt: Prompt) -> str:
    async def run() -> None:
        async with RewardPool(config) as pool:
            await probe_answers(pool, [prompt] * 6, ["12"] * 6)

    with pytest.raises(RewardError) as caught:
        asyncio.run(run())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "return 1 / 0",
            "compute_score in my_reward.py raised ZeroDivisionError: division by zero at my_reward.py:3",
        ),
        ("return float('nan')", "compute_score in my_reward.py returned nan; return a finite number"),
        ("return 'good'", "compute_score in my_reward.py returned the str 'good', which is no number"),
        ("time.sleep(600)", "did not finish in 0.3 s (reward.timeout_s) at my_reward.py:3 in compute_score"),
    ],
)
def test_preflight_says_what_a_broken_function_does(tmp_path: Path, body: str, sentence: str) -> None:
    path = write_reward(tmp_path, f"import time\ndef compute_score(**_):\n    {body}\n")
    message = preflight_error(RewardConfig(path=path, timeout_s=DEADLINE_S), make_prompt())
    assert f"the reward function failed on all 4 probes ({path}): " in message
    assert sentence in message
    assert "What to do: " in message


with socket.socket() as _bound:
    _bound.bind(("127.0.0.1", 0))
    NOBODY = f"http://127.0.0.1:{_bound.getsockname()[1]}"
"""An address where nobody listens."""


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"judge": JudgeConfig(base_url=f"{NOBODY}/v1", model="m", retries=0)}, "reward.judge.base_url"),
        ({"server": ServerConfig(url=f"{NOBODY}/score", retries=0)}, "reward.server.url"),
    ],
)
def test_preflight_of_a_service_that_is_not_there_says_to_start_it(
    fields: dict[str, Any], address: str
) -> None:
    message = preflight_error(RewardConfig(**fields, retries=1), make_prompt())
    assert message.startswith("none of 4 probes could be scored: the ")
    assert f"{NOBODY}/" in message.partition("What to do: ")[2]
    assert f"must run, and take these requests from here; or set {address}" in message
    assert "function" not in message
    assert "repair" not in message


def test_preflight_of_a_function_whose_service_is_not_there_does_not_blame_the_function(
    tmp_path: Path,
) -> None:
    source = f"import urllib.request\ndef compute_score(**_):\n    urllib.request.urlopen('{NOBODY}')\n"
    message = preflight_error(RewardConfig(path=write_reward(tmp_path, source)), make_prompt())
    assert "none of 4 probes could be scored" in message
    assert "could not score: URLError" in message
    assert "a service that runs and is reached from here" in message
    assert "repair" not in message


def test_preflight_says_of_each_cause_what_to_do(tmp_path: Path) -> None:
    source = (
        "calls = []\n"
        "def compute_score(**_):\n"
        "    calls.append(1)\n"
        "    raise ConnectionError('down') if len(calls) > 3 else KeyError('k')\n"
    )
    reward = RewardConfig(
        path=write_reward(tmp_path, source),
        num_workers=1,
        on_failure=OnFailureConfig(infrastructure="exclude"),
    )
    message = preflight_error(reward, make_prompt())
    assert (
        "KeyError: 'k' at my_reward.py:4. What to do: repair the function; compute_score in my_reward.py"
        in message
    )
    assert (
        "could not score: ConnectionError: down at my_reward.py:4. What to do: see to what scoring asks for"
        in message
    )


def test_preflight_of_an_unknown_data_source_names_the_known_ones() -> None:
    message = preflight_error(RewardConfig(num_workers=1), make_prompt(data_source="my/data"))
    assert (
        "no built-in scorer for data_source 'my/data'; known: DigitalLearningGmbH/MATH-lighteval" in message
    )
    assert "set reward.path" in message


def test_preflight_passes_when_one_probe_is_scored(tmp_path: Path) -> None:
    config = RewardConfig(path=write_reward(tmp_path, FAULTS), num_workers=1)

    async def run() -> list[str]:
        async with RewardPool(config) as pool:
            outcomes = await probe_answers(pool, [make_prompt()] * 3, ["raise", "7", "exit"])
            return [outcome.kind for outcome in outcomes]

    assert asyncio.run(run()) == ["error", "score", "error"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_workers": 0}, "reward.num_workers is 0"),
        ({"timeout_s": 0.0}, "reward.timeout_s is 0.0"),
        ({"start_timeout_s": float("nan")}, "reward.start_timeout_s is nan"),
        ({"max_memory_gib": -1.0}, "reward.max_memory_gib is -1.0"),
        ({"max_failed_share": 20.0}, "reward.max_failed_share is 20.0.*use 0.2 for 20 %"),
        ({"name": "compute-score", "path": "a.py"}, "cannot be the name of a Python function"),
        ({"name": "grade"}, "reward.name is 'grade', but reward.path is empty"),
    ],
)
def test_config_refuses_values_without_meaning(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RewardConfig(**fields)


def test_a_path_may_name_the_function() -> None:
    made = RewardConfig(path="./r.py:score")
    assert (made.path, made.name) == ("./r.py", "score")
    (one,) = RewardConfig(functions=(FunctionConfig(path="r.py:exact"),)).functions
    assert (one.path, one.name, one.part) == ("r.py", "exact", "exact")
    assert RewardConfig(path="r.py:score", name="other").path == "r.py:score"  # two names: no such file


def test_functions_import_modules_beside_them(tmp_path: Path) -> None:
    (tmp_path / "grading_helpers.py").write_text("def points(text):\n    return len(text) / 4\n")
    path = write_reward(
        tmp_path,
        "from grading_helpers import points\ndef compute_score(solution_str): return points(solution_str)",
    )

    async def run() -> float | None:
        async with RewardPool(RewardConfig(path=path)) as pool:
            return (await pool.score_text(make_prompt(), "abc")).score

    assert asyncio.run(run()) == 0.75


def test_a_file_knows_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "points.txt").write_text("0.25")
    path = write_reward(
        tmp_path,
        "import os, sys\nfolder = os.path.dirname(os.path.abspath(__file__))\n"
        "sys.path = [one for one in sys.path if one != folder]\n"
        "def compute_score(): return float(open(os.path.join(folder, 'points.txt')).read())",
    )

    async def run() -> float | None:
        async with RewardPool(RewardConfig(path=path)) as pool:
            return (await pool.score_text(make_prompt(), "abc")).score

    assert asyncio.run(run()) == 0.25


def test_two_functions_do_not_share_a_module_of_one_name(tmp_path: Path) -> None:
    functions = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "grading_helpers.py").write_text(f"x = {number}")
        path = write_reward(folder, "from grading_helpers import x\ndef compute_score(): return x")
        functions.append(FunctionConfig(path=path, key=f"f{number}"))

    async def run() -> None:
        await RewardPool(RewardConfig(functions=tuple(functions))).start()

    sentence = (
        f"imports grading_helpers, which is {tmp_path}/2/grading_helpers.py, but another module of that name"
    )
    with pytest.raises(RewardError, match=sentence):
        asyncio.run(run())
