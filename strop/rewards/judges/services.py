"""All services of a reward pool: asked together with its functions, their scores merged into one outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.combine import Part, combine, combined_token_rewards
from strop.rewards.config import RewardConfig
from strop.rewards.judges.client import CallFailed, add_usage
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
    def cost(self) -> float:
        """Cost in this process."""
        ...

    def set_cost(self, run_cost: float) -> None:
        """Set its cost for the run so far, in all its processes and starts."""
        ...

    def start(self) -> None:
        """Get ready; RewardError where that is impossible."""
        ...

    async def close(self) -> None:
        """End what is under way, which fails with CallFailed."""
        ...

    @property
    def compares(self) -> bool:
        """True if it scores no answer by itself, but compares those to a prompt (`ComparingService`)."""
        ...

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The score of one answer under the name of the section, and its usage, by name (`judge/requests`).

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
        """Score of each answer, or the reason why it has none, and its share of the usage.

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

    def cost(self) -> dict[str, float]:
        """Cost in this process of each service that has a price."""
        sections = self._config.services
        return {name: service.cost for name, service in self._services.items() if sections[name].has_price}

    def set_cost(self, run_cost: Mapping[str, float]) -> None:
        """Set the cost of services for the run so far, in all its processes and starts."""
        for name, amount in run_cost.items():
            self._services[name].set_cost(amount)

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str, *, fresh: bool, with_functions: bool = True
    ) -> Outcome:
        """Score one answer with services and functions at the same time; the first of them that fails decides. Services
        that compare follow once all answers to the prompt are there. `fresh`: nothing is taken from a cache."""
        services = {name: service for name, service in self._services.items() if not service.compares}
        functions = self._functions if with_functions else None
        if not services:
            if functions is None:
                return Outcome(kind="score", score=0.0)
            return await functions.score(prompt, trajectory, text)
        started = time.monotonic()
        calls: dict[str, Coroutine[Any, Any, Outcome | tuple[Part, dict[str, float]]]] = {}
        if functions is not None:
            calls[""] = functions.score(prompt, trajectory, text)
        item = item_of(prompt, text)
        calls |= {name: service.score(item, fresh=fresh) for name, service in services.items()}
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        return self._merge(dict(zip(calls, results, strict=True)), time.monotonic() - started)

    def _merge(
        self, results: Mapping[str, Outcome | tuple[Part, dict[str, float]] | BaseException], seconds: float
    ) -> Outcome:
        """One outcome from those of all that score, by the names of the services; "" is the functions."""
        usage: dict[str, float] = {}
        failure: Outcome | None = None
        parts: list[Part] = []
        for name, result in results.items():
            if isinstance(result, CallFailed):
                add_usage(usage, result.usage)
                failure = failure or Outcome(
                    kind=result.kind,
                    error=str(result),
                    seconds=seconds,
                    service=self._address(name),
                    remedy=result.remedy,
                )
            elif isinstance(result, BaseException):
                raise result
            elif isinstance(result, tuple):
                add_usage(usage, result[1])
                parts.append(result[0])
            elif result.score is None:
                failure = failure or result
            else:
                own_part = {} if self._config.functions else {self._config.part: result.score}
                merged_parts = {**own_part, **result.parts}
                parts.append(
                    Part(key="", score=result.score, parts=merged_parts, token_rewards=result.token_rewards)
                )
        if failure is not None:
            return replace(failure, usage=usage)
        score, merged = combine(parts)
        assert score is not None, "services always give a number, and functions that give none have failed"
        if usable(score) is None:
            sentence = f"the sum of the scores is {score}, beyond {MAX_NUMBER:g}"
            remedy = "make the scores or their weights smaller"
            return Outcome(kind="error", error=sentence, seconds=seconds, usage=usage, remedy=remedy)
        return Outcome(
            kind="score",
            score=score,
            parts=merged,
            token_rewards=combined_token_rewards(parts),
            seconds=seconds,
            usage=usage,
        )

    def _address(self, name: str) -> str:
        """Setting and address of a service, as in `Outcome.service`."""
        section = self._config.services[name]
        return f"{section.ADDRESS}={section.address}"

    async def compare(self, prompt: Prompt, answers: Sequence[tuple[str, Outcome]]) -> list[Outcome]:
        """The outcomes of all answers to a prompt with what comparisons add; those without a score are compared with
        nobody."""
        outcomes = [outcome for _, outcome in answers]
        scored = [index for index, outcome in enumerate(outcomes) if outcome.kind == "score"]
        for name, service in self._services.items():
            if service.compares and scored:
                items = [item_of(prompt, answers[index][0]) for index in scored]
                results = await self._compare(cast(ComparingService, service), items)
                for index, (result, usage) in zip(scored, results, strict=True):
                    outcomes[index] = self._add_comparison(name, outcomes[index], result, usage)
                scored = [index for index in scored if outcomes[index].kind == "score"]
        return outcomes

    async def _compare(
        self, service: ComparingService, items: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        """Compare these answers with a service, repeated as reward.on_failure says."""
        used: list[dict[str, float]] = [{} for _ in items]
        for attempt in range(self._config.retries + 1):
            results = await service.compare(items, fresh=attempt > 0)
            for total, (_, usage) in zip(used, results, strict=True):
                add_usage(total, usage)
            failures = [result for result, _ in results if isinstance(result, CallFailed)]
            if not any(getattr(self._config.on_failure, failure.kind) == "retry" for failure in failures):
                break
        return [(result, total) for (result, _), total in zip(results, used, strict=True)]

    def _add_comparison(
        self, name: str, outcome: Outcome, result: Part | CallFailed, usage: Mapping[str, float]
    ) -> Outcome:
        total = dict(outcome.usage)
        add_usage(total, usage)
        if isinstance(result, CallFailed):
            is_fixed = getattr(self._config.on_failure, result.kind) == "fixed"
            fallback_score = self._config.failed_score if is_fixed else None
            return Outcome(
                kind=result.kind,
                error=str(result),
                seconds=outcome.seconds,
                usage=total,
                fallback_score=fallback_score,
                service=self._address(name),
                remedy=result.remedy,
            )
        score, merged = combine([result])
        return replace(
            outcome,
            score=(outcome.score or 0.0) + (score or 0.0),
            parts={**outcome.parts, **merged},
            usage=total,
        )


def item_of(prompt: Prompt, text: str) -> dict[str, Any]:
    """Request item of an answer; see RewardService.score."""
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


def _content(content: object) -> str:
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
