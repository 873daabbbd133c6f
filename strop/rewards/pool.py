"""Reward pool: scores in worker processes; `await pool.score(...)` always comes back with an outcome.

Functions run in worker processes (worker_pool.py): the caller waits for one future per sample, which the thread that
owns them resolves when the worker answers, when the sample's deadline ends, or when the pool is closed. Where services
score as well, strop.rewards.judges asks all of them. Samples that could not be scored are scored again, or given a
score in its place, as reward.on_failure says; where a service was not there, after a pause that grows from one retry to
the next. The pauses for a sample last no longer than a call of a function may (reward.timeout_s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.config.sections import code_of
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.judges.services import Services
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.passing import with_verdict
from strop.rewards.worker_pool import Workers
from strop.utils.http_client import backoff_s
from strop.utils.trust import ask

_FIRST_PAUSE_S = 0.5
"""Longest wait before the first retry, in seconds."""


async def try_loading(config: RewardConfig) -> bool:
    """Load the functions of a reward in a process that ends at once. Of a reward manager, which needs a tokenizer, the
    file is looked at alone.

    Returns:
        True if a function takes lists, and so all answers to a prompt at once.

    Raises:
        RewardError: a file is missing, cannot be imported, or has no such function.
        UntrustedCode: received settings name a file.
    """
    for reference in code_of(config, "reward"):
        ask(reference.key, reference.value)
    workers = Workers(replace(config, num_workers=1), tokenizer="", log_file=None, shows=False)
    if config.manager:
        workers.check_files()
        return False
    await workers.start()
    await workers.close()
    return workers.takes_groups


class _Pauses:
    """Pauses before the retries of one sample, or group, for which a service was not there."""

    def __init__(self, config: RewardConfig) -> None:
        self._left_s, self._count = config.timeout_s, 0

    async def wait(self) -> None:
        """Wait, longer each time, and no longer in all than a call may take."""
        pause_s = min(backoff_s(self._count, _FIRST_PAUSE_S), self._left_s)
        self._left_s -= pause_s
        self._count += 1
        await asyncio.sleep(pause_s)


class RewardPool:
    """Scores the samples of a run with functions and services; use as `async with RewardPool(config) as pool:`."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        tokenizer: str = "",
        rank: int = 0,
        count: int = 1,
        logs: Path | None = None,
    ) -> None:
        """Args:
        config: of the reward.
        tokenizer: folder of the policy's tokenizer, which a reward manager is given.
        rank, count: which of how many pools this is that score for one run; they share the limits of services.
        logs: folder for what the functions print; None keeps only what is shown.

        Raises:
            ValueError: the limits cannot be shared by so many.
        """
        self.config = config
        self._has_tokenizer = bool(tokenizer)
        log_file = None if logs is None else logs / (f"reward-{rank}.log" if rank else "reward.log")
        self._workers = (
            Workers(config, tokenizer=tokenizer, log_file=log_file) if config.uses_functions else None
        )
        self._services: Services | None = None
        if config.services:
            self._services = Services(config, self._workers, rank=rank, count=count)
        self._is_running = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and load the function in each.

        Raises:
            RewardError: the file is missing, cannot be imported, or has no such function; or a service needs a key
                that the environment does not have.
            UntrustedCode: received settings name a file or a service.
        """
        if self._is_running:
            raise RuntimeError("the reward pool runs already; call start once")
        if self.config.manager and not self._has_tokenizer:
            raise RewardError(
                "reward.manager needs the tokenizer of a model, and there is none here: set model.path"
            )
        for reference in code_of(self.config, "reward"):
            ask(reference.key, reference.value)
        self._is_running = True
        try:
            if self._services is not None:
                self._services.start()
            if self._workers is not None:
                await self._workers.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the workers. Samples still being scored get an outcome without a score."""
        self._is_running = False
        if self._services is not None:
            await self._services.close()
        if self._workers is not None:
            await self._workers.close()

    def cost(self) -> dict[str, float]:
        """Cost in this process of each service that has a price."""
        return {} if self._services is None else self._services.cost()

    def set_cost(self, run_cost: Mapping[str, float]) -> None:
        """Set the cost of services for the run so far, in all its processes and starts."""
        if self._services is not None:
            self._services.set_cost(run_cost)

    async def score_text(self, prompt: Prompt, solution_str: str) -> Outcome:
        """Score an answer that comes from no trajectory, such as a probe."""
        bare = Trajectory(uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids)
        return await self.score(prompt, bare, solution_str)

    @property
    def compares(self) -> bool:
        """Answers to a prompt are scored together, once all of them are there (`compare`): a service compares them, or
        a function takes lists. Known from the start on."""
        return self.config.compares or self.takes_groups

    @property
    def takes_groups(self) -> bool:
        """A function takes lists, and so all answers to a prompt at once. Known from the start on."""
        return self._workers is not None and self._workers.takes_groups

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, solution_str: str, *, in_group: bool = False
    ) -> Outcome:
        """Score one trajectory.

        Args:
            prompt: the row it answers; its ground truth, columns and extra_info reach the function.
            trajectory: its turn count and extra facts are added to extra_info.
            solution_str: the decoded response.
            in_group: `compare` follows, and calls the functions that take lists.
        """
        if not self._is_running:
            raise RuntimeError("the reward pool is not running; use `async with RewardPool(config) as pool:`")
        waits = in_group and self.takes_groups
        usage: dict[str, float] = {}
        pauses = _Pauses(self.config)
        for attempt in range(self.config.retries + 1):
            if self._services is not None:
                outcome: Outcome = await self._services.score(
                    prompt, trajectory, solution_str, fresh=attempt > 0, with_functions=not waits
                )
            elif waits:
                return Outcome(kind="score", score=0.0)
            else:
                assert self._workers is not None, "functions score where no service does"
                outcome = await self._workers.score(prompt, trajectory, solution_str)
            for name, value in outcome.usage.items():
                usage[name] = usage.get(name, 0.0) + value
            if not await self._is_tried_again([outcome], attempt, pauses):
                break
        outcome = self._with_fallback(outcome)
        if usage != outcome.usage:
            outcome = replace(outcome, usage=usage)
        return outcome if waits else with_verdict(outcome, self.config)

    async def compare(
        self,
        prompt: Prompt,
        answers: Sequence[tuple[str, Outcome]],
        trajectories: Sequence[Trajectory] = (),
    ) -> list[Outcome]:
        """The outcomes of all answers to a prompt with the scores of functions and services that take them together;
        unchanged where none does.

        Args:
            prompt: the row.
            answers: the decoded response of each, and its outcome so far (`score`, with in_group).
            trajectories: of each, for functions that take lists.
        """
        outcomes = [outcome for _, outcome in answers]
        if self.takes_groups and trajectories:
            outcomes = await self._score_group(prompt, answers, trajectories)
        if self._services is not None:
            texts = [text for text, _ in answers]
            outcomes = await self._services.compare(prompt, list(zip(texts, outcomes, strict=True)))
        by_agents = {
            index for index, trajectory in enumerate(trajectories) if trajectory.reward_score is not None
        }
        return [
            outcome if index in by_agents else with_verdict(outcome, self.config)
            for index, outcome in enumerate(outcomes)
        ]

    async def _score_group(
        self, prompt: Prompt, answers: Sequence[tuple[str, Outcome]], trajectories: Sequence[Trajectory]
    ) -> list[Outcome]:
        """Scores of the functions for all answers to a prompt, added to the outcome of each. Answers that their agent
        has scored, and those that could not be scored, stay as they are."""
        assert self._workers is not None, "functions take the answers"
        outcomes = [outcome for _, outcome in answers]
        indices = [
            index
            for index, trajectory in enumerate(trajectories)
            if trajectory.reward_score is None and outcomes[index].kind == "score"
        ]
        if not indices:
            return outcomes
        group = [(trajectories[index], answers[index][0]) for index in indices]
        pauses = _Pauses(self.config)
        for attempt in range(self.config.retries + 1):
            scored = await self._workers.score_group(prompt, group)
            if not await self._is_tried_again(scored, attempt, pauses):
                break
        for index, outcome in zip(indices, scored, strict=True):
            outcomes[index] = self._merge(outcomes[index], self._with_fallback(outcome))
        return outcomes

    def _merge(self, services: Outcome, functions: Outcome) -> Outcome:
        """One outcome from those of the services and of the functions for the same answer."""
        if functions.score is None or self._services is None:
            return replace(functions, usage=services.usage)
        own_part = {} if self.config.functions else {self.config.part: functions.score}
        score = (services.score or 0.0) + functions.score
        parts = {**services.parts, **own_part, **functions.parts}
        return replace(functions, score=score, parts=parts, usage=services.usage)

    async def _is_tried_again(self, outcomes: Sequence[Outcome], attempt: int, pauses: _Pauses) -> bool:
        """True where these outcomes of an attempt call for another one, after the pause before it."""
        retried = [outcome for outcome in outcomes if self._on_failure(outcome) == "retry"]
        if not retried or attempt == self.config.retries or not self._is_running:
            return False
        if any(outcome.kind == "infrastructure" for outcome in retried):
            await pauses.wait()
        return self._is_running

    def _on_failure(self, outcome: Outcome) -> str:
        """Setting of reward.on_failure for an outcome; empty where it has a score."""
        return "" if outcome.kind == "score" else str(getattr(self.config.on_failure, outcome.kind))

    def _with_fallback(self, outcome: Outcome) -> Outcome:
        """The outcome with reward.failed_score where reward.on_failure says `fixed`."""
        if self._on_failure(outcome) != "fixed":
            return outcome
        return replace(outcome, fallback_score=self.config.failed_score)
