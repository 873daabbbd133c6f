"""Episodes in processes of their own: the same tokens, every agent's facts, and what happens when a process dies."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.agents.spans import SPANS, Span
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import Media, Prompt, Trajectory
from strop.rollout.client import RolloutTimeout
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.utils.rng import random_key
from strop.workers.agent_pool import pool as agent_workers
from strop.workers.agent_pool.pool import AgentWorkers, WorkerLost
from strop.workers.agent_pool.wire import line, prompt_in, prompt_out, read_line, sequence_in, sequence_out
from strop.workers.episodes import Episode
from strop.workers.player import EpisodeRunner

AGENTS = """
import asyncio, os, time
import numpy as np
from strop.agents import register


@register("two_answers")
async def two_answers(prompt, trajectory, generate):
    for _ in range(2):
        output = await generate(trajectory.token_ids)
        trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
        trajectory = trajectory.with_given((7, 8))
    trajectory = trajectory.finish("done")
    facts = {"pid": os.getpid(), "array": np.arange(2), "parts": (1, 2)}
    return type(trajectory)(**{
        **{name: getattr(trajectory, name) for name in trajectory.__dataclass_fields__},
        "extra": facts, "numbers": {"steps": 2.0, "unknown": float("nan")}, "reward_score": 0.5,
    })


@register("hears")
async def hears(prompt, trajectory, generate):
    heard = []
    output = await generate(trajectory.token_ids, on_token=lambda *token: heard.append(token))
    assert heard == list(zip(output.token_ids, output.log_probs, output.versions)), heard
    return trajectory.with_sampled(output.token_ids, output.log_probs, output.versions).finish("heard")


@register("fails")
async def fails(prompt, trajectory, generate):
    raise LookupError("the world is gone")


@register("refused")
async def refused(prompt, trajectory, generate):
    try:
        await generate((666,))
    except ValueError as error:
        return trajectory.finish(f"ValueError {error}")


@register("dies_once")
async def dies_once(prompt, trajectory, generate):
    output = await generate(trajectory.token_ids)
    if trajectory.sample_index == 0 and not os.path.exists(prompt.extra_info["marker"]):
        open(prompt.extra_info["marker"], "w").close()
        os.kill(os.getpid(), 9)
    return trajectory.with_sampled(output.token_ids, output.log_probs, output.versions).finish("alive")


@register("dies")
async def dies(prompt, trajectory, generate):
    os._exit(3)


@register("holds_the_loop")
async def holds_the_loop(prompt, trajectory, generate):
    time.sleep(60)


@register("waits")
async def waits(prompt, trajectory, generate):
    await asyncio.sleep(600)
"""
SAMPLING = Sampling(key=0, max_tokens=20)
Loaded = tuple[AgentConfig, ModelConfig, Any]


class Engine:
    """Tokens that depend on the key, the position and the prompt alone; notes which requests it ended."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        self.begun.append(request_id)
        if 666 in prompt_ids:
            raise ValueError("no such token")
        if 667 in prompt_ids:
            raise RolloutTimeout("too slow")
        try:
            await asyncio.sleep(30.0 if 668 in prompt_ids else 0.001)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        count = 1 + (sampling.key + len(prompt_ids)) % 3
        ids = tuple(random_key(sampling.key, sampling.position + i) % 60 for i in range(count))
        log_probs = tuple(-math.log(2 + one) for one in ids)
        for token, log_prob in zip(ids, log_probs, strict=True):
            if on_token is not None:
                on_token(token, log_prob, 3)
        return TokenOutput(token_ids=ids, log_probs=log_probs, versions=(3,) * count, stop_reason="length")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Loaded:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    model = ModelConfig(path=str(tiny_model))
    return AgentConfig(files=(str(path),), num_workers=2), model, load_tokenizer(model)


def asked(agent: str, number: int = 0, **extra_info: Any) -> Prompt:
    return Prompt(
        uid=f"e0-{number:06d}", row=number, token_ids=(1, 2, number + 3), messages=({"role": "user", "content": "x"},),
        data_source="test", ground_truth={"a": (1, 2.5, None)}, agent_name=agent, extra_info=extra_info,
    )  # fmt: skip


class Shared:
    """Two workers on a loop that is kept."""

    def __init__(self, loaded: Loaded) -> None:
        config, model, tokenizer = loaded
        self.runner, self.tokenizer, self.engine = asyncio.Runner(), tokenizer, Engine()
        self.setup = AgentSetup(config, tokenizer)
        self.workers = AgentWorkers(self.setup, self.engine, model, reward=None, seed=5)

    def played(
        self, prompts: Sequence[Prompt], *, observers: Sequence[Any] = (), here: bool = False
    ) -> list[Episode]:
        """Two episodes of each, in the workers, or in this process."""
        player = EpisodeRunner(
            self.engine, self.tokenizer, None, seed=5, setup=self.setup, observers=observers,
            workers=None if here else self.workers,
        )  # fmt: skip
        return self.runner.run(player.run(prompts, samples_per_prompt=2, sampling=SAMPLING))


@pytest.fixture(scope="module")
def shared(loaded: Loaded) -> Iterator[Shared]:
    made = Shared(loaded)
    yield made
    made.workers.close()
    made.runner.close()


def processes(workers: AgentWorkers) -> list[subprocess.Popen[bytes]]:
    return [worker._process for worker in workers._workers]


def test_the_episodes_are_those_of_one_process_and_their_facts_arrive(shared: Shared) -> None:
    prompts = [asked("two_answers", i) for i in range(4)] + [
        asked("single_turn_agent", 9),
        asked("hears", 10),
    ]
    there, here = shared.played(prompts), shared.played(prompts, here=True)
    columns = ("response_ids", "sampled", "log_probs", "versions", "stop_reason", "num_turns", "reward_score")
    for one, other in zip(there, here, strict=True):
        assert one.trajectory is not None, one.failure
        assert other.trajectory is not None, other.failure
        for column in columns:
            assert getattr(one.trajectory, column) == getattr(other.trajectory, column)
    first = [episode.trajectory for episode in there[:8]]
    assert {one.extra["pid"] for one in first if one} == {one.pid for one in processes(shared.workers)}
    one = first[0]
    assert one is not None
    assert one.extra["array"] == [0, 1]
    assert one.extra["parts"] == (1, 2)
    assert one.numbers["steps"] == 2.0
    assert math.isnan(one.numbers["unknown"])
    assert there[-1].trajectory is not None
    assert there[-1].trajectory.stop_reason == "heard"


def test_a_failure_and_a_refusal_are_told_as_in_one_process(shared: Shared) -> None:
    prompts = [asked("fails"), asked("refused", 1)]
    there, here = shared.played(prompts), shared.played(prompts, here=True)
    assert [one.failure for one in there] == [one.failure for one in here]
    assert there[0].failure == "LookupError: the world is gone"
    reasons = [one.trajectory.stop_reason for one in there[2:] if one.trajectory is not None]
    assert reasons == ["ValueError no such token"] * 2


def test_what_happened_is_heard(shared: Shared) -> None:
    heard: list[tuple[Episode, list[Span]]] = []

    class Observer:
        listens = True

        def start(self) -> None: ...

        def on_episode_end(
            self, episode: Episode, spans: Sequence[Span], start_s: float, end_s: float
        ) -> None:
            heard.append((episode, list(spans)))

        def close(self) -> None: ...

    shared.played([asked("two_answers")], observers=[Observer()])
    episode, spans = heard[0]
    assert [(span.kind, span.name) for span in spans] == [("answer", "0"), ("answer", "1")]
    assert episode.trajectory is not None
    first = spans[0].facts["token_ids"]
    assert first
    assert episode.trajectory.response_ids[: len(first)] == first
    assert spans[0].facts["num_prompt_tokens"] == 3
    assert SPANS.get() is None


def test_an_episode_that_nobody_waits_for_ends_its_request(shared: Shared) -> None:
    prompt = dataclasses.replace(asked("hears"), token_ids=(668,))

    async def run() -> None:
        await shared.workers.start()
        episode = asyncio.create_task(shared.workers.play(prompt, 0, SAMPLING))
        while "e0-000000/0#0" not in shared.engine.begun:
            await asyncio.sleep(0.01)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        while not shared.engine.cancelled:
            await asyncio.sleep(0.01)
        assert shared.engine.cancelled == ["e0-000000/0#0"]

    shared.engine.begun.clear()
    shared.runner.run(asyncio.wait_for(run(), 20))


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_episodes_are_played_again(
    shared: Shared, tmp_path: Path
) -> None:
    rest = [asked("two_answers", i) for i in (1, 2, 3)]
    prompts = [asked("dies_once", 0, marker=str(tmp_path / "marker")), *rest]
    shared.played(rest)
    before = {one.pid for one in processes(shared.workers)}
    there, here = shared.played(prompts), shared.played(prompts, here=True)
    for one, other in zip(there, here, strict=True):
        assert one.trajectory is not None, one.failure
        assert other.trajectory is not None, other.failure
        assert one.trajectory.response_ids == other.trajectory.response_ids
    assert len(before - {one.pid for one in processes(shared.workers)}) == 1


@pytest.mark.slow
def test_an_episode_that_ends_every_worker_fails_with_the_cause(shared: Shared) -> None:
    for episode in shared.played([asked("dies")]):
        assert episode.failure is not None
        assert "was lost with 3 agent workers" in episode.failure
        assert "exit status 3" in episode.failure


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "held"])
def test_a_worker_that_says_nothing_is_killed(loaded: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(agent_workers, "_MIN_SILENCE_S", 0.6)
    monkeypatch.setattr(agent_workers, "_PING_S", 0.1)
    config, model, tokenizer = loaded

    async def run() -> None:
        setup = AgentSetup(AgentConfig(files=config.files, num_workers=1, timeout_s=0.6), tokenizer)
        workers = AgentWorkers(setup, Engine(), model, reward=None, seed=0)
        await workers.start()
        first = workers._workers[0]
        episode = asyncio.create_task(
            workers.play(asked("waits" if how == "stopped" else "holds_the_loop"), 0, SAMPLING)
        )
        await asyncio.sleep(0.2)
        if how == "stopped":
            os.kill(first._process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        while not first.lost:
            assert time.monotonic() - begun < 10
            await asyncio.sleep(0.05)
        assert "it said nothing for 0.6 s" in first.lost
        assert first._process.returncode == -signal.SIGKILL
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        workers.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.slow
def test_agents_that_cannot_be_loaded_there_end_the_run(loaded: Any, tmp_path: Path) -> None:
    config, model, tokenizer = loaded
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    loaded_here = AgentSetup(config, tokenizer)
    loaded_here.config = AgentConfig(files=(str(path),), num_workers=1)
    path.write_text("raise ImportError('no such world')")
    workers = AgentWorkers(loaded_here, Engine(), model, reward=None, seed=0)
    player = EpisodeRunner(Engine(), tokenizer, None, seed=0, setup=loaded_here, workers=workers)
    with pytest.raises(ValueError, match="no such world"):
        asyncio.run(player.run([asked("single_turn_agent")], samples_per_prompt=1, sampling=SAMPLING))
    player.close()


@pytest.mark.slow
def test_a_worker_ends_with_its_owner(loaded: Any, tmp_path: Path) -> None:
    config, model, _ = loaded
    script = tmp_path / "owner.py"
    script.write_text(
        f"""
import asyncio, os, signal
from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.workers.agent_pool.pool import AgentWorkers

async def run():
    model = ModelConfig(path={model.path!r})
    setup = AgentSetup(AgentConfig(files={config.files!r}, num_workers=1), load_tokenizer(model))
    workers = AgentWorkers(setup, None, model, reward=None, seed=0)
    await workers.start()
    print(workers._workers[0]._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    begun = time.monotonic()
    while time.monotonic() - begun < 15:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its owner")


def test_records_come_back_as_they_were() -> None:
    prompt = asked("two_answers", 3, nested={"a": [1, {"b": float("inf")}], "t": (1, (2,))})
    assert prompt_in(read_line(line(prompt_out(prompt) and "x", prompt_out(prompt)))[1]) == prompt
    made = Trajectory(uid=prompt.uid, sample_index=1, prompt_ids=(1, 2), turn_rewards=((1, 0.25),))
    made = made.with_sampled((5, 6), (-0.1, -1e-17), (0, 1)).with_given((9,)).finish("stop")
    assert sequence_in(read_line(line("x", sequence_out(made)))[1], prompt, 1) == made
    with pytest.raises(ValueError, match="no finished one of e0-000003/0"):
        sequence_in(sequence_out(made), prompt, 0)
    with pytest.raises(ValueError, match="cannot be handed to an agent worker: extra_info"):
        prompt_out(asked("two_answers", 3, odd=object()))
    image = Media(kind="image", parts=("a.png",), size=(2, 2), grid=(1, 1, 1), start=0, num_tokens=1, key="k")
    with pytest.raises(ValueError, match="set agent.num_workers=0"):
        prompt_out(
            Prompt(
                uid="u", row=0, token_ids=(1, 2), messages=(), data_source="", ground_truth="", media=(image,)
            )
        )
    with pytest.raises(ValueError, match="expected a JSON array"):
        read_line(b'{"a": 1}\n')


@pytest.mark.parametrize(
    "said", [b"no json\n", line("played", 0), line("played", 0, [{"uid": 3}], []), line("evil")]
)
def test_a_worker_that_says_nonsense_is_lost(said: bytes) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
            worker = agent_workers._Worker(process, ours, Engine(), b"begin\n", silence_s=60.0)
            theirs.sendall(line("ready") + said)
            await worker.start()
            with pytest.raises(WorkerLost, match="it said what no agent worker says"):
                await worker.play(asked("waits"), 0, SAMPLING, listens=False)
            assert process.poll() == -signal.SIGKILL
            theirs.close()

    asyncio.run(run())
