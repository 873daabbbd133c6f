"""All services of a reward pool: asked together with its functions, and what they say as one outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.combine import Part, combine
from strop.rewards.config import RewardConfig
from strop.rewards.judges.client import CallFailed
from strop.rewards.judges.judge import Judge
from strop.rewards.judges.server import RewardServer
from strop.rewards.outcome import Outcome
from strop.rewards.worker_pool import Workers
from strop.utils.json_lines import plain
from strop.utils.sanitize import encodable, usable
from strop.utils.sanitize.values import MAX_NUMBER


class RewardService(Protocol):
    """One process's way to a service."""

    @property
    def spent(self) -> float:
        """What it has cost in this process."""
        ...

    def tell_spent(self, run_spent: float) -> None:
        """What it has cost the run so far, in all its processes and starts."""
        ...

    def start(self) -> None:
        """Get ready; RewardError where that is impossible."""
        ...

    async def close(self) -> None:
        """End what is under way, which fails with CallFailed."""
        ...

    @property
    def compares(self) -> bool:
        """It scores no answer by itself, but compares those to a prompt (`ComparingService`)."""
        ...

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The score of one answer under the name of the section, and what it used up, by name (`judge/requests`).

        Args:
            item: prompt (as text), messages, response, data_source and ground_truth; plain data.
            fresh: do not take it from a cache.

        Raises:
            CallFailed: there is none.
        """
        ...


class ComparingService(RewardService, Protocol):
    """A service that compares the answers to a prompt."""

    async def compare(
        self, items: Sequence[Mapping[str, Any]], *, fresh: bool
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        """Of each answer the score or why it has none, and its share of what was used up.

        Args:
            items: as of `score`, all answers to one prompt.
            fresh: do not take it from a cache.
        """
        ...


SERVICES: Mapping[str, Callable[..., RewardService]] = {"judge": Judge, "server": RewardServer}
"""By the name of a section below reward."""


class Services:
    """All services of a pool, which ask its functions too."""

    def __init__(self, config: RewardConfig, functions: Workers | None, *, rank: int, count: int) -> None:
        """Args:
        config: of the reward.
        functions: its functions, which the caller starts and closes; None: there are none.
        rank, count: which of how many pools this is that score for one run; they share the limits of services.

        Raises:
            ValueError: the limits cannot be shared by so many.
        """
        self._config, self._functions = config, functions
        self._services: dict[str, RewardService] = {
            name: SERVICES[name](section, rank=rank, count=count) for name, section in config.services.items()
        }

    def start(self) -> None:
        """Get ready; RewardError where that is impossible."""
        for service in self._services.values():
            service.start()

    async def close(self) -> None:
        """End what is under way, which fails."""
        for service in self._services.values():
            await service.close()

    def spent(self) -> dict[str, float]:
        """What each service that has a price has cost in this process."""
        sections = self._config.services
        return {name: one.spent for name, one in self._services.items() if sections[name].has_price}

    def tell_spent(self, run_spent: Mapping[str, float]) -> None:
        """What services have cost the run so far, in all its processes and starts."""
        for name, amount in run_spent.items():
            self._services[name].tell_spent(amount)

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str, *, fresh: bool, with_functions: bool = True
    ) -> Outcome:
        """What services and functions say of one answer, asked at the same time; the first of them that fails decides.
        What compares speaks once all answers to the prompt are there. `fresh`: nothing is taken from a cache."""
        services = [one for one in self._services.values() if not one.compares]
        functions = self._functions if with_functions else None
        if not services:
            if functions is None:
                return Outcome(kind="score", score=0.0)
            return await functions.score(prompt, trajectory, text)
        started = time.monotonic()
        asked: list[Coroutine[Any, Any, Outcome | tuple[Part, dict[str, float]]]] = []
        if functions is not None:
            asked.append(functions.score(prompt, trajectory, text))
        item = item_of(prompt, text)
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
                named = {} if self._config.functions else {self._config.part: one.score}
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
        """The outcomes of all answers to a prompt with what comparisons add; those without a score are compared with
        nobody."""
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
        for attempt in range(self._config.retries + 1):
            said = await service.compare(items, fresh=attempt > 0)
            for total, (_, usage) in zip(used, said, strict=True):
                _add(total, usage)
            failed = [found for found, _ in said if isinstance(found, CallFailed)]
            if not any(getattr(self._config.on_failure, one.kind) == "retry" for one in failed):
                break
        return [(found, total) for (found, _), total in zip(said, used, strict=True)]

    def _added(self, outcome: Outcome, found: Part | CallFailed, usage: Mapping[str, float]) -> Outcome:
        total = dict(outcome.usage)
        _add(total, usage)
        if isinstance(found, CallFailed):
            is_fixed = getattr(self._config.on_failure, found.kind) == "fixed"
            stand_in = self._config.failed_score if is_fixed else None
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


def item_of(prompt: Prompt, text: str) -> dict[str, Any]:
    """What a service is given; see RewardService.score."""
    return {
        "prompt": _question(prompt), "messages": plain(prompt.messages), "response": text,
        "data_source": prompt.data_source, "ground_truth": plain(prompt.ground_truth),
    }  # fmt: skip


def _question(prompt: Prompt) -> str:
    """A prompt as one text; several messages are named by their roles."""
    messages = [
        (str(message.get("role", "")), _content(message.get("content"))) for message in prompt.messages
    ]
    is_plain = len(messages) == 1
    return encodable(
        messages[0][1] if is_plain else "\n\n".join(f"{role}: {text}" for role, text in messages)
    )


def _content(content: Any) -> str:
    """Text of a message; other kinds of content are named."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [
        str(part.get("text") or f"<{part.get('type', 'part')}>")
        for part in parts
        if isinstance(part, Mapping)
    ]
    return " ".join(texts)


def _add(total: dict[str, float], usage: Mapping[str, float]) -> None:
    for name, value in usage.items():
        total[name] = total.get(name, 0.0) + value
