"""The reward behind a process border: `await pool.score(...)` always comes back with an outcome.

Functions run in worker processes (workers.py): the caller waits for one future per sample, which the thread that owns
them resolves when the worker answers, when the sample's deadline ends, or when the pool is closed. Services are asked
at the same time (service.py). What could not be scored is scored again, or given a score in its place, as
reward.on_failure says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from strop.base.guests import joined
from strop.base.trust import ask
from strop.border import usable
from strop.border.values import MAX_NUMBER
from strop.rewards.answer import item_of
from strop.rewards.combining import Part, combine
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import CallFailed, Outcome, RewardError
from strop.rewards.service import ComparingService, RewardService
from strop.rewards.workers import Workers
from strop.trajectory import Prompt, Trajectory

_MAX_PROBES = 4
"""Samples that the preflight scores; enough to tell a broken function from a bad answer."""


class RewardPool:
    """Everything that scores the samples of a run; use as `async with RewardPool(config) as pool:`."""

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
        self._services: dict[str, RewardService] = {
            name: joined("reward service", f"reward.{name}")(section, rank=rank, count=count)
            for name, section in config.services.items()
        }
        self._has_tokenizer = bool(tokenizer)
        log_file = None if logs is None else logs / (f"reward-{rank}.log" if rank else "reward.log")
        self._workers = (
            Workers(config, tokenizer=tokenizer, log_file=log_file) if config.uses_functions else None
        )
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
        for named in self.config.code_named():
            ask(named.key, named.value)
        self._is_running = True
        try:
            for service in self._services.values():
                service.start()
            if self._workers is not None:
                await self._workers.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the workers. Samples still being scored get an outcome without a score."""
        self._is_running = False
        for service in self._services.values():
            await service.close()
        if self._workers is not None:
            await self._workers.close()

    def spent(self) -> dict[str, float]:
        """What each service that has a price has cost in this process."""
        services = self.config.services
        return {name: one.spent for name, one in self._services.items() if services[name].has_price}

    def tell_spent(self, run_spent: Mapping[str, float]) -> None:
        """What services have cost the run so far, in all its processes and starts."""
        for name, amount in run_spent.items():
            self._services[name].tell_spent(amount)

    async def score_text(self, prompt: Prompt, solution_str: str) -> Outcome:
        """Score an answer that comes from no trajectory, such as a probe."""
        bare = Trajectory(uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids)
        return await self.score(prompt, bare, solution_str)

    async def score(self, prompt: Prompt, trajectory: Trajectory, solution_str: str) -> Outcome:
        """Score one trajectory.

        Args:
            prompt: the row it answers; its ground truth, columns and extra_info reach the function.
            trajectory: its turn count and extra facts are added to extra_info.
            solution_str: the decoded response.
        """
        if not self._is_running:
            raise RuntimeError("the reward pool is not running; use `async with RewardPool(config) as pool:`")
        on_failure, usage = self.config.on_failure, dict[str, float]()
        for attempt in range(self.config.retries + 1):
            if services := [one for one in self._services.values() if not one.compares]:
                outcome = await self._asked(services, prompt, trajectory, solution_str, fresh=attempt > 0)
            elif self._workers is not None:
                outcome = await self._workers.score(prompt, trajectory, solution_str)
            else:  # what compares speaks once all answers to the prompt are there
                outcome = Outcome(kind="score", score=0.0)
            _add(usage, outcome.usage)
            then = "" if outcome.kind == "score" else getattr(on_failure, outcome.kind)
            if then != "retry" or not self._is_running:
                break
        stand_in = self.config.failed_score if then == "fixed" else None
        return replace(outcome, stand_in=stand_in, usage=usage)

    async def _asked(
        self,
        services: Sequence[RewardService],
        prompt: Prompt,
        trajectory: Trajectory,
        solution_str: str,
        *,
        fresh: bool,
    ) -> Outcome:
        """Ask services and functions, at the same time; the first of them that fails decides."""
        started = time.monotonic()
        asked: list[Coroutine[Any, Any, Outcome | tuple[Part, dict[str, float]]]] = []
        if self._workers is not None:
            asked.append(self._workers.score(prompt, trajectory, solution_str))
        item = item_of(prompt, solution_str)
        asked += [service.score(item, fresh=fresh) for service in services]
        said = await asyncio.gather(*asked, return_exceptions=True)
        return self._joined(said, time.monotonic() - started)

    def _joined(
        self, said: Sequence[Outcome | tuple[Part, dict[str, float]] | BaseException], seconds: float
    ) -> Outcome:
        """One outcome from those of all that score."""
        usage: dict[str, float] = {}
        failure: Outcome | None = None
        parts: list[Part] = []
        for one in said:
            if isinstance(one, CallFailed):
                _add(usage, one.usage)
                failure = failure or Outcome(kind=one.kind, error=str(one), seconds=seconds)
            elif isinstance(one, BaseException):
                raise one
            elif isinstance(one, tuple):
                _add(usage, one[1])
                parts.append(one[0])
            elif one.score is None:
                failure = failure or one
            else:
                named = {} if self.config.functions else {self.config.part: one.score}
                parts.append(Part(key="", score=one.score, parts={**named, **one.parts}))
        if failure is not None:
            return replace(failure, usage=usage)
        score, merged = combine(parts)
        assert score is not None, "services always give a number, and functions that give none have failed"
        if usable(score) is None:
            sentence = f"the sum of the scores is {score}, beyond {MAX_NUMBER:g}"
            return Outcome(kind="error", error=sentence, seconds=seconds, usage=usage)
        return Outcome(kind="score", score=score, parts=merged, seconds=seconds, usage=usage)

    async def compare(self, prompt: Prompt, answers: Sequence[tuple[str, Outcome]]) -> list[Outcome]:
        """The outcomes of all answers to a prompt with what comparisons add; as they are where nothing compares.

        Answers without a score are compared with nobody.

        Args:
            prompt: the row.
            answers: the decoded response of each, and its outcome so far.
        """
        outcomes = [outcome for _, outcome in answers]
        scored = [place for place, outcome in enumerate(outcomes) if outcome.kind == "score"]
        for service in self._services.values():
            if service.compares and scored:
                items = [item_of(prompt, answers[place][0]) for place in scored]
                said = await self._compared(cast(ComparingService, service), items)
                for place, (found, usage) in zip(scored, said, strict=True):
                    outcomes[place] = self._added(outcomes[place], found, usage)
                scored = [place for place in scored if outcomes[place].kind == "score"]
        return outcomes

    async def _compared(
        self, service: ComparingService, items: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        """What a service says of these answers, asked again as reward.on_failure says."""
        used: list[dict[str, float]] = [{} for _ in items]
        for attempt in range(self.config.retries + 1):
            said = await service.compare(items, fresh=attempt > 0)
            for total, (_, usage) in zip(used, said, strict=True):
                _add(total, usage)
            failed = [found for found, _ in said if isinstance(found, CallFailed)]
            if not any(getattr(self.config.on_failure, one.kind) == "retry" for one in failed):
                break
        return [(found, total) for (found, _), total in zip(said, used, strict=True)]

    def _added(self, outcome: Outcome, found: Part | CallFailed, usage: Mapping[str, float]) -> Outcome:
        total = dict(outcome.usage)
        _add(total, usage)
        if isinstance(found, CallFailed):
            is_fixed = getattr(self.config.on_failure, found.kind) == "fixed"
            stand_in = self.config.failed_score if is_fixed else None
            return Outcome(
                kind=found.kind, error=str(found), seconds=outcome.seconds, usage=total, stand_in=stand_in
            )
        score, merged = combine([found])
        return replace(
            outcome,
            score=(outcome.score or 0.0) + (score or 0.0),
            parts={**outcome.parts, **merged},
            usage=total,
        )

    async def preflight(self, prompts: Sequence[Prompt], solutions: Sequence[str]) -> list[Outcome]:
        """Score a few probes before training; at most four are used.

        Returns:
            The outcomes; one that failed among others that did not is the caller's to report.

        Raises:
            RewardError: every probe failed; the sentence says what the function did.
        """
        probes = list(zip(prompts, solutions, strict=True))[:_MAX_PROBES]
        if not probes:
            raise ValueError("the reward preflight needs at least one prompt and one answer")
        outcomes = await asyncio.gather(*(self.score_text(prompt, text) for prompt, text in probes))
        if all(outcome.kind != "score" for outcome in outcomes):
            raise RewardError(_verdict(outcomes, self.config.path))
        return list(outcomes)


def _verdict(outcomes: Sequence[Outcome], path: str) -> str:
    count = "the one probe" if len(outcomes) == 1 else f"all {len(outcomes)} probes"
    where = f" ({path})" if path else ""
    if all(outcome.kind == "timeout" for outcome in outcomes):
        advice = "make it faster, or raise reward.timeout_s"
    elif path:
        advice = "repair the function; training has not started"
    else:
        advice = "repair the data, or set reward.path to a scorer of your own; training has not started"
    return f"the reward function failed on {count}{where}: {outcomes[0].error}. What to do: {advice}"


def _add(total: dict[str, float], usage: Mapping[str, float]) -> None:
    for name, value in usage.items():
        total[name] = total.get(name, 0.0) + value
