"""One episode: an agent playing one sample of one prompt."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.context import ShouldStop
from strop.agents.episode_routing import EpisodeRouting
from strop.agents.registry import agent_named
from strop.agents.setup import AgentSetup
from strop.agents.spans import SPANS, add_span
from strop.agents.user_code import contained
from strop.protocol.trajectory import MediaTokens, Prompt, Trajectory, media_of
from strop.rollout.client import GenerateClient
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.utils.rng import random_key
from strop.utils.sanitize import storable_text, usable

_MAX_TURNS = 1 << 30
_MAX_NAME_CHARS = 200
"""Of the name of a number, which becomes part of the name of a metric."""


class EpisodeTimeout(RuntimeError):
    """An episode took longer than agent.timeout_s."""


def sample_key(seed: int, uid: str, sample_index: int) -> int:
    """Key of the random stream of one sample: depends on seed, prompt visit and sample index alone."""
    return random_key(seed, "rollout", uid, sample_index)


async def play_episode(
    prompt: Prompt,
    sample_index: int,
    sampling: Sampling,
    *,
    client: GenerateClient,
    seed: int,
    setup: AgentSetup,
) -> tuple[Trajectory, ...]:
    """Play the prompt's agent once.

    Args:
        prompt: the prompt; `prompt.agent_name` names the agent.
        sample_index: number of the sample within its group.
        sampling: options of every sample; the key and the remaining token budget are filled in here. max_tokens
            bounds the whole response, tokens of tools included.
        client: generates tokens.
        seed: seed of the run.
        setup: agents and limits.

    Returns:
        The finished training sequences in order, usually one; none when the agent gave none. The last one holds
        the facts of the episode, `timings["generate_s"]` being the time spent waiting for tokens.

    Raises:
        EpisodeTimeout: it took longer than agent.timeout_s.
        ValueError: the agent returned something else than finished sequences of this sample.
    """
    episode = _Episode(prompt, sample_index, client, sampling, seed, cuts_answers=setup.records_routing)
    empty = Trajectory(
        uid=prompt.uid, sample_index=sample_index, prompt_ids=prompt.token_ids, media=prompt.media
    )
    timeout_s = setup.config.timeout_s
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            deadline_s = deadline.when()
            assert deadline_s is not None, "the limit is a number"

            def keep_deadline() -> None:  # a reward per tool, and three calls that release
                calls = len(context.tool_schemas) + 3
                deadline.reschedule(deadline_s + 1.0 + calls * setup.config.tool_timeout_s)

            context = setup.context(prompt, sampling, deadline=deadline_s, keep_deadline=keep_deadline)
            agent, takes_context = agent_named(prompt.agent_name)
            with contained():
                returned = await agent(prompt, empty, episode.generate, *([context] if takes_context else []))
    except TimeoutError:
        if not deadline.expired():
            raise
        raise EpisodeTimeout(
            f"the episode took longer than agent.timeout_s = {timeout_s:g} s, after {episode.calls} answers"
        ) from None
    sequences = [returned] if isinstance(returned, Trajectory) else list(() if returned is None else returned)
    if not sequences:
        return ()
    num_prompt = len(prompt.token_ids)
    limit = num_prompt + sampling.max_tokens
    for index, sequence in enumerate(sequences):
        _check_sequence(sequence, empty, prompt.agent_name)
        if prompt.media and not sequence.media and sequence.prompt_ids[:num_prompt] == prompt.token_ids:
            sequence = dataclasses.replace(sequence, media=prompt.media)  # made from token ids alone
        if len(sequence.prompt_ids) + len(sequence.response_ids) > limit:
            sequence = _truncate(sequence, limit)
        elif sequence.media:  # it does not end with an image
            sequence = sequence.truncate(len(sequence.response_ids))
        sequences[index] = episode.routing.added_to(sequence)
    _check_rewards(sequences, prompt.agent_name)
    timings = {**sequences[-1].timings, "generate_s": episode.seconds}
    if episode.calls > 1 or len(timings) > 1:
        timings["episode_s"] = time.perf_counter() - start
    last = sequences[-1]
    return (
        *sequences[:-1],
        dataclasses.replace(
            last, timings=_for_metrics(timings), numbers=_for_metrics(last.numbers),
            num_turns=min(last.num_turns, _MAX_TURNS),
        ),
    )  # fmt: skip


class _Episode:
    """Generation of one episode, with its token budget, time and calls."""

    def __init__(
        self, prompt: Prompt, sample_index: int, client: GenerateClient, sampling: Sampling, seed: int,
        *, cuts_answers: bool,
    ) -> None:  # fmt: skip
        self._prompt, self._sample_index = prompt, sample_index
        self._client, self._sampling = client, sampling
        self._cuts_answers = cuts_answers
        """An answer that the agent stops is cut when it is whole, since its end says more than its tokens."""
        self._key, self._seed = sample_key(seed, prompt.uid, sample_index), seed
        self._used = 0
        self._num_open = 0
        self._was_full = False
        self.seconds, self.calls = 0.0, 0
        self.routing = EpisodeRouting()
        self._spans = SPANS.get()

    async def generate(
        self,
        token_ids: Sequence[int],
        /,
        *,
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
        on_token: OnToken | None = None,
        should_stop: ShouldStop | None = None,
    ) -> TokenOutput:
        """As `Generate`. Without room for a token the answer is empty, with stop reason `length`.

        Raises:
            ValueError: the agent goes on asking after that.
        """
        num_context = len(token_ids) - len(self._prompt.token_ids)
        room_of_run = self._sampling.max_tokens - max(num_context, self._used)
        room = room_of_run if max_tokens is None else min(room_of_run, max_tokens)
        if room < 1:
            if self._was_full:
                raise ValueError(
                    f"agent {self._prompt.agent_name!r} asks for tokens again after an answer with stop reason "
                    f"'length': data.max_response_tokens={self._sampling.max_tokens} are used, all tokens behind the "
                    f"prompt of the row counted; end the episode there"
                )
            self._was_full = True
            return TokenOutput(token_ids=(), log_probs=(), versions=(), stop_reason="length")
        options = dataclasses.replace(self._sampling, key=self._key, position=self._used, max_tokens=room)
        if self._num_open:  # a stream of its own: how many numbers the others take is not known yet
            key = random_key(self._seed, "rollout", self._prompt.uid, self._sample_index, self.calls)
            options = dataclasses.replace(options, key=key, position=0)
        if stop_token_ids:
            stops = {*self._sampling.stop_token_ids, *stop_token_ids}
            options = dataclasses.replace(options, stop_token_ids=tuple(sorted(stops)))
        token_ids = self._with_media(token_ids)
        start = time.perf_counter()
        number = self.calls
        name = f"{self._prompt.uid}/{self._sample_index}#{number}"
        self.calls += 1
        self._num_open += 1
        try:
            output = await self._answer(name, token_ids, options, on_token, should_stop)
        finally:
            self._num_open -= 1
        self._used += len(output.token_ids)
        self.routing.note(token_ids, output)
        seconds = time.perf_counter() - start
        self.seconds += seconds
        add_span(
            self._spans,
            "answer",
            str(number),
            seconds,
            num_prompt_tokens=len(token_ids),
            token_ids=output.token_ids,
            stop_reason=output.stop_reason,
        )
        is_cut = output.stop_reason == "length" and len(output.token_ids) >= room
        return dataclasses.replace(output, is_own_limit=True) if is_cut and room < room_of_run else output

    def _with_media(self, token_ids: Sequence[int]) -> Sequence[int]:
        """With the prompt's media, where the ids begin with the prompt's: agents see plain ids."""
        prompt_ids, media = self._prompt.token_ids, self._prompt.media
        if media and not media_of(token_ids) and tuple(token_ids[: len(prompt_ids)]) == prompt_ids:
            return MediaTokens(token_ids, media)
        return token_ids

    async def _answer(
        self,
        name: str,
        token_ids: Sequence[int],
        options: Sampling,
        on_token: OnToken | None,
        should_stop: ShouldStop | None,
    ) -> TokenOutput:
        if should_stop is not None:
            return await self._answer_until(should_stop, name, token_ids, options, on_token)
        callbacks = {} if on_token is None else {"on_token": on_token}
        return await self._client.generate(name, token_ids, options, **callbacks)

    async def _answer_until(
        self,
        should_stop: ShouldStop,
        name: str,
        token_ids: Sequence[int],
        options: Sampling,
        on_token: OnToken | None,
    ) -> TokenOutput:
        """The answer up to the token at which `should_stop` says so, where the request ends."""
        heard: list[tuple[int, float, int]] = []
        has_stopped = False

        def hear(token: int, log_prob: float, version: int) -> None:
            nonlocal has_stopped
            if has_stopped:
                return
            heard.append((token, log_prob, version))
            if on_token is not None:
                on_token(token, log_prob, version)
            has_stopped = should_stop(token)
            if has_stopped and not self._cuts_answers:
                request.cancel()

        request = asyncio.ensure_future(self._client.generate(name, token_ids, options, on_token=hear))
        routed_experts = None
        try:
            output = await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not has_stopped or (task is not None and task.cancelling()):
                raise
        else:
            if not has_stopped:
                return output
            if output.routed_experts is not None:  # of all tokens but the last one
                routed_experts = output.routed_experts.first(len(token_ids) + len(heard) - 1)
        ids, log_probs, versions = zip(*heard, strict=True)
        return TokenOutput(
            token_ids=ids,
            log_probs=log_probs,
            versions=versions,
            stop_reason="stop",
            routed_experts=routed_experts,
        )


def _check_sequence(sequence: object, empty: Trajectory, name: str) -> None:
    """Refuse anything but a finished sequence of this sample."""
    if not isinstance(sequence, Trajectory):
        raise TypeError(
            f"agent {name!r} returned a {type(sequence).__name__}; return the trajectory that it was given, with "
            f"tokens appended, or a list of trajectories"
        )
    if not sequence.is_finished:
        raise ValueError(f"agent {name!r} returned trajectory {sequence.id} unfinished; call finish")
    for field in ("extra", "numbers", "timings"):
        if not isinstance(value := getattr(sequence, field), Mapping):
            raise TypeError(
                f"agent {name!r} returned a {type(value).__name__} as {field}; return a dictionary"
            )
    facts: tuple[object, object] = sequence.num_turns, sequence.stop_reason
    if not isinstance(facts[0], int) or not isinstance(facts[1], str):
        raise TypeError(
            f"agent {name!r} returned num_turns {storable_text(sequence.num_turns):.60} and stop_reason "
            f"{storable_text(sequence.stop_reason):.60}; return an integer and a word"
        )
    if sequence.id != empty.id:
        raise ValueError(
            f"agent {name!r} returned trajectory {sequence.id} for the sample {empty.id}; return the "
            f"trajectory that it was given, with tokens appended"
        )


def _check_rewards(sequences: Sequence[Trajectory], name: str) -> None:
    """Refuse rewards of earlier sequences that are not that of the episode, which the last one has."""
    reward = sequences[-1].reward_score
    others = [
        sequence.reward_score
        for sequence in sequences
        if sequence.reward_score is not None and usable(sequence.reward_score) != usable(reward)
    ]
    if others:
        raise ValueError(
            f"agent {name!r} gave one of its {len(sequences)} sequences the reward {storable_text(others[0]):.60} and "
            f"the last one {storable_text(reward):.60}; the sequences of an episode share one reward: give it to the "
            f"last one"
        )


def _for_metrics(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of an agent as metrics; NaN for a value that cannot be averaged."""
    values = {
        storable_text(name, max_chars=_MAX_NAME_CHARS): usable(value) for name, value in numbers.items()
    }
    return {name: math.nan if value is None else value for name, value in values.items()}


def _truncate(sequence: Trajectory, limit: int) -> Trajectory:
    """The first `limit` tokens of a sequence that is longer than prompt and response may be together."""
    room = limit - len(sequence.prompt_ids)
    if room < 1 and sequence.response_ids:
        raise ValueError(
            f"a sequence of {sequence.id} has a prompt of {len(sequence.prompt_ids)} tokens, but prompt and response "
            f"may have {limit}; raise data.max_response_tokens"
        )
    return dataclasses.replace(sequence.truncate(room), stop_reason="length")
