"""Episodes: what an agent is given, and what is asked of the trajectory that it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from strop.agents.config import AgentConfig
from strop.agents.episodes import EpisodeTimeout, play_episode, sample_key
from strop.agents.registry import Agent, Generate, agents
from strop.agents.setup import AgentSetup
from strop.protocol.routed_experts import RoutedExperts
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.types import OnToken, Sampling, TokenOutput

SAMPLING = Sampling(key=0, temperature=0.7, max_tokens=10, stop_token_ids=(2,))


class ScriptedClient:
    """Answers each request with three tokens and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, tuple[int, ...], Sampling]] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        self.requests.append((request_id, tuple(prompt_ids), sampling))
        await asyncio.sleep(0)
        return TokenOutput(
            token_ids=(7, 8, 9), log_probs=(-0.1, -0.2, -0.3), versions=(4, 4, 4), stop_reason="stop"
        )


def prompt(uid: str = "e0-000003", agent_name: str = "single_turn_agent") -> Prompt:
    return Prompt(
        uid=uid, row=3, token_ids=(5, 6), messages=(), data_source="test", ground_truth="", agent_name=agent_name
    )  # fmt: skip


def play(
    client: ScriptedClient,
    asked: Prompt | None = None,
    sample_index: int = 1,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> Trajectory:
    setup = AgentSetup(AgentConfig(timeout_s=timeout_s), None)
    (played,) = asyncio.run(
        play_episode(asked or prompt(), sample_index, SAMPLING, client=client, seed=seed, setup=setup)
    )
    return played


@pytest.fixture
def registered() -> Iterator[dict[str, Agent]]:
    """The registry, without the agents of files that earlier tests read; as it was before at the end."""
    before = dict(agents)
    for name, agent in before.items():
        if not agent.__module__.startswith("strop."):
            del agents[name]
    yield agents
    agents.clear()
    agents.update(before)


def test_a_single_turn_is_one_generation() -> None:
    client = ScriptedClient()
    trajectory = play(client)
    assert trajectory.id == "e0-000003/1"
    assert trajectory.token_ids == (5, 6, 7, 8, 9)
    assert trajectory.sampled == (True, True, True)
    assert trajectory.log_probs == (-0.1, -0.2, -0.3)
    assert trajectory.versions == (4, 4, 4)
    assert trajectory.stop_reason == "stop"
    assert trajectory.timings["generate_s"] >= 0
    ((request_id, prompt_ids, sampling),) = client.requests
    assert (request_id, prompt_ids) == ("e0-000003/1#0", (5, 6))
    assert (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids) == (0.7, 10, (2,))


def test_each_sample_of_each_visit_and_seed_has_its_own_random_stream() -> None:
    keys = set()
    for uid in ("e0-000003", "e1-000003", "e0-000004"):
        for index in (0, 1):
            for seed in (0, 1):
                client = ScriptedClient()
                play(client, prompt(uid), index, seed)
                keys.add(client.requests[0][2].key)
                assert client.requests[0][2].key == sample_key(seed, uid, index)
    assert len(keys) == 12


@pytest.mark.usefixtures("registered")
def test_later_turns_go_on_in_the_random_stream_and_the_token_budget() -> None:
    @agents.register("two_turns")
    async def two_turns(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        for _ in range(2):
            output = await generate(trajectory.token_ids)
            trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
            trajectory = trajectory.with_given((11,))
        return trajectory.finish("done")

    client = ScriptedClient()
    trajectory = play(client, prompt(agent_name="two_turns"))
    assert trajectory.response_ids == (7, 8, 9, 11, 7, 8, 9, 11)
    assert trajectory.sampled == (True, True, True, False) * 2
    (first, _, early), (second, prompt_ids, late) = client.requests
    assert (first, second) == ("e0-000003/1#0", "e0-000003/1#1")
    assert prompt_ids == (5, 6, 7, 8, 9, 11)
    assert early.key == late.key
    assert (early.position, late.position) == (0, 3)
    # 10 tokens in all, of which three were sampled and one was given before the second answer.
    assert (early.max_tokens, late.max_tokens) == (10, 6)


class Talking:
    """Says 7, 8, 9, 7, 8, 9, ... one token at a time, as many as it may."""

    def __init__(self) -> None:
        self.requests: list[Sampling] = []
        self.num_said = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        self.requests.append(sampling)
        said = [(7 + number % 3, -0.5, 4) for number in range(sampling.max_tokens)]
        for token in said:
            self.num_said += 1
            if on_token is not None:
                on_token(*token)
            await asyncio.sleep(0)
        ids, log_probs, versions = zip(*said, strict=True)
        routed = RoutedExperts(
            num_layers=1,
            num_chosen=1,
            tokens=tuple(bytes([n, 0]) for n in range(len(prompt_ids) + len(ids) - 1)),
        )
        return TokenOutput(
            token_ids=ids, log_probs=log_probs, versions=versions, stop_reason="length", routed_experts=routed
        )  # fmt: skip


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("records_routing", [False, True])
def test_tokens_behind_the_stop_of_an_agent_are_neither_sampled_nor_counted(records_routing: bool) -> None:
    @agents.register("stops")
    async def stops(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        for _ in range(2):
            output = await generate(trajectory.token_ids, should_stop=lambda token: token == 8)
            assert (output.token_ids, output.stop_reason) == ((7, 8), "stop")
            trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
        return trajectory.finish("stop")

    client = Talking()
    setup = AgentSetup(AgentConfig(), None, records_routing=records_routing)
    (played,) = asyncio.run(
        play_episode(prompt(agent_name="stops"), 1, SAMPLING, client=client, seed=0, setup=setup)
    )
    assert played.response_ids == (7, 8, 7, 8)
    # 10 tokens may be sampled: two of them are used before the second answer, in the stream of numbers too.
    assert [(asked.max_tokens, asked.position) for asked in client.requests] == [(10, 0), (8, 2)]
    if records_routing:  # which is told with the end of a request
        assert client.num_said == 18
        assert played.routed_experts is not None
        assert played.routed_experts.tokens == tuple(bytes([n, 0]) for n in range(5))
    else:
        assert client.num_said == 4


@pytest.mark.usefixtures("registered")
def test_the_deadline_ends_an_answer_with_a_stop_of_the_agent() -> None:
    @agents.register("waits")
    async def waits(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        await generate(trajectory.token_ids, should_stop=lambda token: False)
        raise AssertionError("it has no end")

    class Silent(ScriptedClient):
        async def generate(self, *asked: Any, on_token: Any = None) -> TokenOutput:  # type: ignore[override]
            await asyncio.sleep(60)
            raise AssertionError("it was cancelled")

    with pytest.raises(EpisodeTimeout):
        play(Silent(), prompt(agent_name="waits"), timeout_s=0.05)


@pytest.mark.usefixtures("registered")
def test_an_unfinished_trajectory_is_refused() -> None:
    @agents.register("lazy")
    async def lazy(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        return trajectory

    with pytest.raises(ValueError, match="agent 'lazy' returned trajectory e0-000003/1 unfinished"):
        play(ScriptedClient(), prompt(agent_name="lazy"))


@pytest.mark.usefixtures("registered")
def test_a_trajectory_of_another_sample_is_refused() -> None:
    @agents.register("mixed_up")
    async def mixed_up(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        return Trajectory(uid=asked.uid, sample_index=0, prompt_ids=asked.token_ids).finish("stop")

    with pytest.raises(ValueError, match="returned trajectory e0-000003/0 for the sample e0-000003/1"):
        play(ScriptedClient(), prompt(agent_name="mixed_up"))


@pytest.mark.usefixtures("registered")
def test_two_agents_cannot_have_one_name() -> None:
    async def other(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        return trajectory.finish("stop")

    with pytest.raises(ValueError, match="agent 'single_turn_agent' is already registered"):
        agents.register("single_turn_agent")(other)
    assert agents.register("other")(other) is agents.register("other")(other)


def test_an_unknown_agent_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match="unknown agent 'singl_turn'; known: .*env_agent, .*openai_agent, .*single_turn_agent",
    ):
        play(ScriptedClient(), prompt(agent_name="singl_turn"))


@pytest.mark.usefixtures("registered")
def test_an_agent_gets_an_empty_answer_when_the_budget_is_used_and_an_error_when_it_goes_on() -> None:
    @agents.register("greedy")
    async def greedy(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        while True:
            output = await generate(trajectory.token_ids)
            if output.stop_reason == "length" and asked.uid == "polite":
                return trajectory.finish("length")
            trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)

    client = ScriptedClient()
    assert len(play(client, prompt("polite", "greedy")).response_ids) == 10
    assert [sampling.max_tokens for _, _, sampling in client.requests] == [10, 7, 4, 1]
    with pytest.raises(ValueError, match="asks for tokens again after an answer with stop reason 'length'"):
        play(ScriptedClient(), prompt("rude", "greedy"))


@pytest.mark.usefixtures("registered")
def test_a_response_over_the_budget_is_cut() -> None:
    @agents.register("talkative")
    async def talkative(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        output = await generate(trajectory.token_ids)
        trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
        return trajectory.with_given((11,) * 20).finish("done")

    trajectory = play(ScriptedClient(), prompt(agent_name="talkative"))
    assert trajectory.response_ids == (7, 8, 9, *(11,) * 7)
    assert trajectory.stop_reason == "length"


@pytest.mark.usefixtures("registered")
def test_an_episode_has_a_deadline() -> None:
    @agents.register("slow")
    async def slow(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        await generate(trajectory.token_ids)
        await asyncio.sleep(3600)
        return trajectory.finish("stop")

    with pytest.raises(EpisodeTimeout, match=r"longer than agent.timeout_s = 0.05 s, after 1 answers"):
        play(ScriptedClient(), prompt(agent_name="slow"), timeout_s=0.05)


@pytest.mark.usefixtures("registered")
def test_answers_asked_for_at_the_same_time_have_random_streams_of_their_own() -> None:
    @agents.register("parallel")
    async def parallel(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        output, _ = await asyncio.gather(generate(trajectory.token_ids), generate(trajectory.token_ids))
        return trajectory.with_sampled(output.token_ids, output.log_probs, output.versions).finish("stop")

    keys = []
    for _ in range(2):
        client = ScriptedClient()
        play(client, prompt(agent_name="parallel"))
        keys.append([(sampling.key, sampling.position) for _, _, sampling in client.requests])
    (first, second) = keys[0]
    assert first[0] != second[0]
    assert keys[0] == keys[1]
