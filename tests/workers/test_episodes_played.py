"""Playing prompts: order, failed agents, and what the scorer is given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from strop.agents.registry import Agent, Generate, agents
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig, RewardError
from strop.rollout.types import Sampling, TokenOutput
from strop.trainer.records import untrained_fate
from strop.trainer.rollout_batch import RolloutBatch
from strop.workers.episodes import Episode
from strop.workers.player import EpisodeRunner
from strop.workers.reports import EpisodesFailed, check_failed_episodes, episode_report

SAMPLING = Sampling(key=0, max_tokens=4)


class Client:
    """Answers with the number of the sample, the later ones first."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        sample = int(request_id.split("/")[1].split("#")[0])
        for _ in range(10 - sample):
            await asyncio.sleep(0)
        reason = "aborted" if prompt_ids[0] == 66 else "stop"
        return TokenOutput(token_ids=(sample + 1,), log_probs=(-1.0,), versions=(0,), stop_reason=reason)


class Tokenizer:
    """Writes tokens as numbers."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return " ".join(map(str, token_ids))


class Pool:
    """Scores an answer with its length, or raises."""

    config = RewardConfig()
    compares = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.scored: list[tuple[str, str]] = []

    async def score(self, prompt: Prompt, trajectory: Trajectory, solution_str: str) -> Outcome:
        if self.error is not None:
            raise self.error
        self.scored.append((trajectory.id, solution_str))
        return Outcome(kind="score", score=float(len(solution_str)))


def prompt(uid: str, agent_name: str = "single_turn_agent", token: int = 1) -> Prompt:
    return Prompt(
        uid=uid, row=0, token_ids=(token,), messages=(), data_source="", ground_truth="", agent_name=agent_name
    )  # fmt: skip


def play(prompts: Sequence[Prompt], pool: Pool, *, samples_per_prompt: int = 3) -> list[Episode]:
    player = EpisodeRunner(Client(), Tokenizer(), pool, seed=0)  # type: ignore[arg-type]
    return asyncio.run(player.run(prompts, samples_per_prompt=samples_per_prompt, sampling=SAMPLING))


@pytest.fixture
def registered() -> Iterator[dict[str, Agent]]:
    """The registry with agents that fail always, or at the first sample."""
    before = dict(agents)

    @agents.register("always_fails")
    async def always_fails(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        raise RuntimeError("the tool is gone")

    @agents.register("fails_first")
    async def fails_first(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        if trajectory.sample_index == 0:
            raise RuntimeError("not this one")
        return await agents["single_turn_agent"](asked, trajectory, generate)

    yield agents
    agents.clear()
    agents.update(before)


def test_episodes_come_in_the_order_of_the_prompts_whatever_ends_first() -> None:
    pool = Pool()
    episodes = play([prompt("a"), prompt("b")], pool)
    assert [episode.id for episode in episodes] == ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2"]
    assert [episode.text for episode in episodes] == ["1", "2", "3"] * 2
    assert [episode_report(episode).score for episode in episodes] == [1.0] * 6
    assert pool.scored[0] == ("a/2", "3"), "the last sample ended first"


@pytest.mark.parametrize(
    ("extra", "path", "is_named"),
    [
        ({"tool_rewards": [0.0, 0.5]}, "", True),
        ({"rollout_reward_scores": {"a": 1.0}}, "", True),
        ({"tool_rewards": [0.0], "turn_scores": [], "rollout_reward_scores": {"a": 0.0}}, "", False),
        ({"tool_rewards": 0.5}, "", False),
        ({"tool_rewards": [0.5]}, "reward.py", False),
    ],
)
@pytest.mark.usefixtures("registered")
def test_rewards_that_no_scorer_reads_are_named_once(
    extra: dict[str, object], path: str, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @agents.register("rewarded")
    async def rewarded(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        played = await agents["single_turn_agent"](asked, trajectory, generate)
        return replace(played, extra=extra)

    pool = Pool()
    pool.config = RewardConfig(path=path)
    play([prompt("a", "rewarded"), prompt("b", "rewarded")], pool)
    named = [one.message for one in caplog.records if "does not read" in one.message]
    assert len(named) == is_named
    assert all(one.startswith(f"an episode has {next(iter(extra))}") for one in named)


class SlowFirst(Client):
    """Keeps the samples of prompt 1 waiting."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.open = 0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        self.open += 1
        try:
            if prompt_ids[0] == 1:
                await self.may_end.wait()
            return await super().generate(request_id, prompt_ids, sampling)
        finally:
            self.open -= 1


def test_a_call_that_is_cancelled_ends_what_still_plays() -> None:
    async def run() -> int:
        client, quick_ended = SlowFirst(), asyncio.Event()
        player = EpisodeRunner(client, Tokenizer(), Pool(), seed=0)  # type: ignore[arg-type]
        prompts = [prompt("slow", token=1), prompt("quick", token=2)]
        playing = asyncio.create_task(
            player.run(
                prompts, samples_per_prompt=2, sampling=SAMPLING, on_episode=lambda one: quick_ended.set()
            )
        )
        await quick_ended.wait()
        assert client.open >= 2, "the slow prompt plays"
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return client.open

    assert asyncio.run(asyncio.wait_for(run(), 10)) == 0


@pytest.mark.usefixtures("registered")
def test_a_failed_agent_is_a_failed_episode_with_its_reason() -> None:
    pool = Pool()
    episodes = play([prompt("a", "fails_first")], pool, samples_per_prompt=5)
    assert [episode.trajectory is None for episode in episodes] == [True, False, False, False, False]
    assert episodes[0].failure == "RuntimeError: not this one"
    report = episode_report(episodes[0])
    assert (report.score, report.accuracy, report.reward()) == (None, None, None)
    assert len(pool.scored) == 4
    fate = untrained_fate(report, skipped="")
    assert (fate.name, fate.reason) == ("failed", "RuntimeError: not this one")


@pytest.mark.usefixtures("registered")
def test_too_many_failed_agents_end_the_run_with_the_first_reason() -> None:
    with pytest.raises(
        EpisodesFailed, match="3 of 9 episodes failed; the first one, b/0: RuntimeError: the tool"
    ):
        check_failed_episodes(
            [
                episode_report(one)
                for one in play([prompt("a"), prompt("b", "always_fails"), prompt("c")], Pool())
            ]
        )


def test_episodes_are_a_value_that_later_calls_take() -> None:
    played = play([prompt("a"), prompt("b")], Pool(), samples_per_prompt=2)
    columns = {"report": [episode_report(one) for one in played], "episode": played}
    made = DataProto.from_dict({}, non_tensors=columns)
    first, second = (
        RolloutBatch(rows=part, reports=tuple(part.non_tensor_batch["report"]))
        for part in (made.slice(0, 2), made.slice(2, 4))
    )
    both = RolloutBatch.concat([second, first])
    assert [one.id for one in both.reports] == ["b/0", "b/1", "a/0", "a/1"]
    chosen = both.take([3, 0])
    assert [one.id for one in chosen.reports] == ["a/1", "b/0"]
    episodes = chosen.rows.get().non_tensor_batch["episode"]
    assert [(one.id, one.text) for one in episodes] == [("a/1", "2"), ("b/0", "1")]
    assert not chosen.take([]).reports
    assert len(chosen.take([]).rows) == 0


def test_an_aborted_episode_is_not_scored() -> None:
    pool = Pool()
    (episode,) = play([prompt("a", token=66)], pool, samples_per_prompt=1)
    assert pool.scored == []
    report = episode_report(episode)
    assert report.score is None
    fate = untrained_fate(report, skipped="")
    assert (fate.name, fate.reason) == ("failed", "aborted")


def test_an_error_of_the_scorers_arrives_as_itself() -> None:
    with pytest.raises(RewardError, match="no worker is left"):
        play([prompt("a")], Pool(RewardError("no worker is left")))


@pytest.mark.parametrize(
    ("parts", "accuracy"), [({}, 0.25), ({"acc": True}, 1.0), ({"acc": 0.5}, 0.5), ({"acc": "yes"}, 0.25)]
)
def test_accuracy_is_the_scorers_number_or_its_score(parts: dict[str, float | str], accuracy: float) -> None:
    outcome = Outcome(kind="score", score=0.25, parts=parts)
    trajectory = Trajectory(uid="a", sample_index=0, prompt_ids=(1,)).finish("stop")
    episode = Episode(prompt=prompt("a"), sample_index=0, trajectory=trajectory, outcome=outcome)
    assert episode_report(episode).accuracy == accuracy


def test_fates_of_samples_that_were_not_trained() -> None:
    trajectory = Trajectory(uid="a", sample_index=0, prompt_ids=(1,)).with_given((5,)).finish("done")
    scored = Outcome(kind="score", score=1.0)
    failed = Outcome(kind="timeout", error="took longer than 2 s")

    def fate_of(trajectory: Trajectory, outcome: Outcome, skipped: str = "") -> tuple[str, str]:
        episode = Episode(prompt=prompt("a"), sample_index=0, trajectory=trajectory, outcome=outcome)
        fate = untrained_fate(episode_report(episode), skipped=skipped)
        return fate.name, fate.reason

    assert fate_of(trajectory, scored) == ("filtered", "no token of it was sampled")
    sampled = (
        Trajectory(uid="a", sample_index=0, prompt_ids=(1,)).with_sampled((5,), (-1.0,), (0,)).finish("stop")
    )
    assert fate_of(sampled, failed) == ("failed", "reward timeout: took longer than 2 s")
    assert fate_of(sampled, scored, "gradient norm is inf") == ("filtered", "gradient norm is inf")
