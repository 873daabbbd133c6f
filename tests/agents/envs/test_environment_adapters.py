"""Adapters of environments, each with the real package."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from strop.agents.envs import EnvironmentChoice, EnvironmentFailed, Observation, PlayedEnvironment, Step

pytestmark = pytest.mark.timeout(120)


def episode(
    name: str, said: Sequence[str], /, *, seed: int = 0, **kwargs: Any
) -> tuple[Observation, list[Step]]:
    async def run() -> tuple[Observation, list[Step]]:
        choice = EnvironmentChoice(name=name, kwargs=kwargs)
        async with PlayedEnvironment(choice, timeout_s=60) as environment:
            first = await environment.reset(seed, {})
            return first, [await environment.step(action) for action in said]

    return asyncio.run(run())


# ---------------------------------------------------------------------------------------------------- gymnasium

CORRIDOR = '''
import gymnasium
from gymnasium import spaces

class Corridor(gymnasium.Env):
    """Three steps to the right end it."""

    def __init__(self, space="discrete"):
        self.action_space = spaces.Discrete(2, seed=0) if space == "discrete" else spaces.Text(max_length=5)
        self.observation_space = spaces.Text(max_length=40)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(0, 2))
        return f"at {self.at}", {}

    def step(self, action):
        self.at += 1 if action in (1, "right") else -1
        return f"at {self.at}", float(self.at), self.at >= 3, self.at <= -2, {"place": self.at, "odd": object()}

gymnasium.register("strop/Corridor-v0", entry_point=Corridor)
'''


@pytest.fixture(scope="module")
def corridor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gymnasium", reason="needs the gymnasium package")
    folder = tmp_path_factory.mktemp("gym")
    (folder / "corridor_for_strop.py").write_text(CORRIDOR, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield "corridor_for_strop"
    sys.path.remove(str(folder))


def test_a_gymnasium_environment_is_played_in_words_and_numbers(corridor: str) -> None:
    first, steps = episode(
        "gymnasium", ["I go right.", "1", "jump", "right"], id="strop/Corridor-v0", imports=corridor,
        actions={"right": 1, "left": 0}, instructions="Walk.",
    )  # fmt: skip
    place = int(first.text[-1])
    assert first.text == f"Walk.\nat {place}"
    assert [step.observation for step in steps[:2]] == [f"at {place + 1}", f"at {place + 2}"]
    assert steps[1].reward == place + 2
    assert steps[1].info == {"place": place + 2}
    if not steps[1].is_done:
        assert (steps[2].observation, steps[2].reward) == ("Invalid action: say one of right, left", 0.0)
        assert steps[3].is_done


def test_gymnasium_answers_that_are_no_action_end_an_episode_only_in_a_row(corridor: str) -> None:
    settings = {"id": "strop/Corridor-v0", "imports": corridor, "max_invalid": 2, "invalid_reward": -0.5}
    _, steps = episode("gymnasium", ["?", "0", "2", "-1"], **settings)
    # No number; a step; a number above the last action, and one below the first: the second in a row.
    assert [(step.reward, step.is_done) for step in steps[:1] + steps[2:]] == [
        (-0.5, False), (-0.5, False), (-0.5, True),
    ]  # fmt: skip
    assert steps[2].observation == "Invalid action: say a whole number from 0 to 1"


def test_a_gymnasium_episode_ends_too_when_it_is_truncated(corridor: str) -> None:
    _, steps = episode("gymnasium", ["0"] * 3, id="strop/Corridor-v0", imports=corridor, seed=1)
    assert [step.is_done for step in steps].count(True) >= 1


def test_a_gymnasium_text_space_takes_the_answer_as_it_is(corridor: str) -> None:
    _, steps = episode(
        "gymnasium", ["right", "much too long"], id="strop/Corridor-v0", imports=corridor, space="text"
    )
    assert steps[0].observation.startswith("at ")
    assert steps[1].observation == "Invalid action: the answer must have 1 to 5 of the characters allowed"


def test_a_gymnasium_environment_that_ships_with_the_package_is_shown_as_json() -> None:
    pytest.importorskip("gymnasium", reason="needs the gymnasium package")
    first, steps = episode("gymnasium", ["0"], id="CartPole-v1", seed=3)
    again, _ = episode("gymnasium", ["0"], id="CartPole-v1", seed=3)
    assert first == again
    assert len(json.loads(first.text)) == 4
    assert steps[0].reward == 1.0


# ------------------------------------------------------------------------------------------------ reasoning-gym


def test_a_reasoning_gym_task_scores_its_own_answer() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the reasoning-gym package")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)[0]
    first, steps = episode("reasoning_gym", [f" {entry['answer']} "], seed=5, task="chain_sum")
    assert first.text == entry["question"]
    assert (steps[0].reward, steps[0].is_done, steps[0].info["acc"]) == (1.0, True, True)
    _, tries = episode("reasoning_gym", ["no", entry["answer"]], seed=5, task="chain_sum", max_tries=2)
    assert [(step.reward, step.is_done) for step in tries] == [(0.0, False), (1.0, True)]
    assert tries[0].observation == "That is not right. Try again."
    _, tries = episode("reasoning_gym", ["no", "no"], seed=5, task="chain_sum", max_tries=2)
    assert [(step.reward, step.is_done) for step in tries] == [(0.0, False), (0.0, True)]


def test_a_reasoning_gym_task_that_evaluates_answers_is_refused() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the reasoning-gym package")
    from strop.agents.envs.reasoning_gym_env import ReasoningGymEnvironment
    from strop.rewards.scorers import reasoning_gym as scorer

    lists = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
    assert lists | scorer.EXPRESSION_TASKS == ReasoningGymEnvironment.EVALUATING
    with pytest.raises(ValueError, match="evaluates the answer as a program"):
        ReasoningGymEnvironment("countdown")


# ---------------------------------------------------------------------------------------------------- verifiers

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield SumTask(SumData(prompt=f"{n} + 1 = ?", system_prompt="Add.", answer=str(n + 1)))

class NeedsSetUp(SumTask):
    async def setup(self, trace, runtime):
        pass

class Prepared(vf.Taskset[NeedsSetUp, vf.TasksetConfig]):
    def load(self):
        yield NeedsSetUp(SumData(prompt="?", answer="1"))
"""


@pytest.fixture
def taskset(tmp_path: Path) -> str:
    pytest.importorskip("verifiers.v1", reason="needs the verifiers package", exc_type=ImportError)
    (tmp_path / "sums.py").write_text(TASKSET, encoding="utf-8")
    return str(tmp_path / "sums.py")


def test_a_verifiers_task_is_asked_and_scored_by_its_rewards(taskset: str) -> None:
    first, steps = episode("verifiers", ["3"], seed=6, taskset=f"{taskset}:Sums")
    # Seed 6 of four tasks: the one with n = 2. A right short answer is worth 1 + 0.5.
    assert list(first.messages) == [
        {"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 1 = ?"},
    ]  # fmt: skip
    assert (steps[0].reward, steps[0].is_done) == (1.5, True)
    assert steps[0].info == {"length": 1, "right": 1.0, "short": 0.5}
    _, steps = episode("verifiers", ["a long answer"], index=1, taskset=f"{taskset}:Sums")
    assert steps[0].reward == 0.0


def test_verifiers_tasks_that_need_a_runtime_are_refused(taskset: str) -> None:
    with pytest.raises(ValueError, match="have a method setup, which needs the package's own runtime"):
        EnvironmentChoice(name="verifiers", kwargs={"taskset": f"{taskset}:Prepared"}).make()


def test_an_old_verifiers_is_told_which_version_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setattr(metadata, "version", lambda package: "0.1.14")
    with pytest.raises(
        ValueError, match=r"needs verifiers 0.4 or newer, and 0.1.14 is installed: pip install"
    ):
        EnvironmentChoice(name="verifiers", kwargs={"taskset": "old"}).make()


# ------------------------------------------------------------------------------------------------------ openenv

SERVER = """
import os, random, sys, time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    text: str

class Hint(Observation):
    text: str = ""

class World(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self, seed=None, episode_id=None, largest=9, **kwargs):
        self.number = random.Random(seed).randint(1, largest)
        return Hint(text=f"1 to {largest}", reward=None, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        if action.text == "die":
            os._exit(3)
        if action.text == "break":
            raise RuntimeError("out of order")
        if action.text.startswith("sleep"):
            time.sleep(float(action.text.split()[1]))
        if action.text == "pass":
            return Hint(text="well", reward=None, done=False)
        right = action.text == str(self.number)
        return Hint(text="yes" if right else "no", reward=float(right), done=right)

    @property
    def state(self):
        return State()

sessions = {"max_concurrent_envs": int(sys.argv[2])} if len(sys.argv) > 2 else {}
app = create_fastapi_app(World, Guess, Hint, **sessions)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
"""


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    pytest.importorskip(
        "openenv.core.generic_client", reason="needs the openenv-core package", exc_type=ImportError
    )
    script = folder / "server.py"
    script.write_text(SERVER, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port), *options], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError("the server ended")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With room for eight sessions."""
    with served(tmp_path_factory.mktemp("openenv"), "8") as url:
        yield url


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """With room for one session, as servers have unless they are told."""
    with served(tmp_path_factory.mktemp("openenv_narrow")) as url:
        yield url


def guessing(url: str, **settings: Any) -> EnvironmentChoice:
    return EnvironmentChoice(
        name="openenv", kwargs={"url": url, "action_key": "text", "observation_key": "text", **settings}
    )


def test_an_openenv_server_is_played_in_sessions_of_its_own(server: str) -> None:
    settings = {"url": server, "action_key": "text", "observation_key": "text"}
    number = random.Random(4).randint(1, 9)
    first, steps = episode("openenv", ["0", str(number)], seed=4, **settings)
    assert first.text == "1 to 9"
    assert [(s.observation, s.reward, s.is_done) for s in steps] == [("no", 0.0, False), ("yes", 1.0, True)]
    _, steps = episode("openenv", ["not JSON", '{"word": 3}', f'{{"text": "{number}"}}'], seed=4, url=server)
    assert [step.observation[:14] for step in steps[:2]] == ["Invalid action", "Invalid action"]
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert json.loads(steps[2].observation) == {"text": "yes"}


def test_openenv_episodes_at_the_same_time_do_not_meet(server: str) -> None:
    async def one(seed: int) -> list[float | None]:
        async with PlayedEnvironment(guessing(server), timeout_s=60) as environment:
            await environment.reset(seed, {})
            return [(await environment.step(str(guess))).reward for guess in range(1, 10)]

    async def run() -> list[list[float | None]]:
        return await asyncio.gather(*(one(seed) for seed in range(6)))

    for seed, rewards in enumerate(asyncio.run(run())):
        right = random.Random(seed).randint(1, 9)
        assert rewards == [float(guess == right) for guess in range(1, 10)]


def test_openenv_options_of_reset_and_rewards_that_are_left_to_the_reward_function(server: str) -> None:
    settings = {"url": server, "action_key": "text", "observation_key": "text"}
    first, steps = episode("openenv", ["pass", "1"], **settings, reset_options={"largest": 1})
    assert first.text == "1 to 1"
    assert [step.reward for step in steps] == [0.0, 1.0], "an action without a reward is worth 0"
    _, steps = episode("openenv", ["pass", "1"], **settings, reset_options={"largest": 1}, rewards=False)
    assert [(step.reward, step.is_done) for step in steps] == [(None, False), (None, True)]
    _, steps = episode("openenv", ["what"], url=server, rewards=False)
    assert steps[0].reward is None
    with pytest.raises(EnvironmentFailed, match=r"has no field 'word'; it has text"):
        episode("openenv", [], url=server, observation_key="word")


def test_an_openenv_server_with_one_session_is_waited_for(narrow: str) -> None:
    async def one(seed: int, **settings: Any) -> float | None:
        async with PlayedEnvironment(guessing(narrow, **settings), timeout_s=60) as environment:
            await environment.reset(seed, {})
            return (await environment.step(str(random.Random(seed).randint(1, 9)))).reward

    async def run() -> list[Any]:
        together = await asyncio.gather(*(one(seed) for seed in range(4)))
        async with PlayedEnvironment(guessing(narrow), timeout_s=60) as holder:
            await holder.reset(0, {})
            return [*together, *await asyncio.gather(one(0, session_wait_s=0.3), return_exceptions=True)]

    *rewards, refused = asyncio.run(run())
    assert rewards == [1.0] * 4
    assert isinstance(refused, EnvironmentFailed)
    assert f"reset: server {narrow}: no session was free within 0.3 s; start the server with a larger" in str(
        refused
    )


@pytest.mark.parametrize(
    ("action", "settings", "timeout_s", "sentence"),
    [
        ("break", {}, 60, "Server error: out of order"),
        ("sleep 2", {"message_timeout_s": 0.3}, 60, "no answer within 0.3 s"),
        ("sleep 2", {}, 0.5, "step took longer than 0.5 s"),
    ],
)
def test_an_openenv_server_that_fails_or_is_silent_fails_the_episode(
    server: str, action: str, settings: dict[str, Any], timeout_s: float, sentence: str
) -> None:
    async def run() -> None:
        async with PlayedEnvironment(guessing(server, **settings), timeout_s=timeout_s) as environment:
            await environment.reset(0, {})
            await environment.step(action)

    with pytest.raises(EnvironmentFailed, match=sentence):
        asyncio.run(run())
    first, _ = episode("openenv", [], url=server, observation_key="text")
    assert first.text == "1 to 9", "the server lives on"


def test_an_openenv_server_that_dies_fails_the_episode_and_those_after_it(narrow: str) -> None:
    settings = {"url": narrow, "action_key": "text", "observation_key": "text"}
    with pytest.raises(EnvironmentFailed, match=f"step: server {narrow}: the connection ended: "):
        episode("openenv", ["die"], **settings)
    with pytest.raises(EnvironmentFailed, match=f"reset: server {narrow}: Failed to connect"):
        episode("openenv", [], **settings)
