"""The reward behind a process border: `await pool.score(...)` always comes back with an outcome.

Functions run in worker processes (workers.py): the caller waits for one future per sample, which the thread that owns
them resolves when the worker answers, when the sample's deadline ends, or when the pool is closed. Where services score
as well, strop.rewards.judges asks all of them. What could not be scored is scored again, or given a score in its place,
as reward.on_failure says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.judges.services import Services
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.passing import with_verdict
from strop.rewards.worker_pool import Workers
from strop.utils.trust import ask


async def try_loading(config: RewardConfig) -> bool:
    """Load the functions of a reward in a process that ends at once. Of a reward manager, which needs a tokenizer, the
    file is looked at alone.

    Returns:
        Whether a function takes lists, and so all answers to a prompt at once.

    Raises:
        RewardError: a file is missing, cannot be imported, or has no such function.
        UntrustedCode: received settings name a file.
    """
    for named in config.code_named():
        ask(named.key, named.value)
    workers = Workers(replace(config, num_workers=1), tokenizer="", log_file=None, shows=False)
    if config.manager:
        workers.check_files()
        return False
    await workers.start()
    await workers.close()
    return workers.takes_groups


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
        for named in self.config.code_named():
            ask(named.key, named.value)
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

    def spent(self) -> dict[str, float]:
        """What each service that has a price has cost in this process."""
        return {} if self._services is None else self._services.spent()

    def tell_spent(self, run_spent: Mapping[str, float]) -> None:
        """What services have cost the run so far, in all its processes and starts."""
        if self._services is not None:
            self._services.tell_spent(run_spent)

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
            in_group: `compare` follows: what functions that take lists say is left to it.
        """
        if not self._is_running:
            raise RuntimeError("the reward pool is not running; use `async with RewardPool(config) as pool:`")
        waits = in_group and self.takes_groups
        usage: dict[str, float] = {}
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
            if self._then(outcome) != "retry" or not self._is_running:
                break
        outcome = replace(self._with_stand_in(outcome), usage=usage)
        return outcome if waits else with_verdict(outcome, self.config)

    async def compare(
        self,
        prompt: Prompt,
        answers: Sequence[tuple[str, Outcome]],
        trajectories: Sequence[Trajectory] = (),
    ) -> list[Outcome]:
        """The outcomes of all answers to a prompt with what is found by looking at them together; as they are where
        nothing does.

        Args:
            prompt: the row.
            answers: the decoded response of each, and its outcome so far (`score`, with in_group).
            trajectories: of each, for functions that take lists.
        """
        outcomes = [outcome for _, outcome in answers]
        if self.takes_groups and trajectories:
            outcomes = await self._scored_together(prompt, answers, trajectories)
        if self._services is not None:
            texts = [text for text, _ in answers]
            outcomes = await self._services.compare(prompt, list(zip(texts, outcomes, strict=True)))
        by_agents = {place for place, one in enumerate(trajectories) if one.reward_score is not None}
        return [
            outcome if place in by_agents else with_verdict(outcome, self.config)
            for place, outcome in enumerate(outcomes)
        ]

    async def _scored_together(
        self, prompt: Prompt, answers: Sequence[tuple[str, Outcome]], trajectories: Sequence[Trajectory]
    ) -> list[Outcome]:
        """What the functions say of all answers to a prompt, added to what is known of each. Those that their agent has
        scored, and those that could not be scored, stay as they are."""
        assert self._workers is not None, "functions take the answers"
        outcomes = [outcome for _, outcome in answers]
        places = [
            place
            for place, trajectory in enumerate(trajectories)
            if trajectory.reward_score is None and outcomes[place].kind == "score"
        ]
        if not places:
            return outcomes
        group = [(trajectories[place], answers[place][0]) for place in places]
        for _ in range(self.config.retries + 1):
            said = await self._workers.score_group(prompt, group)
            if not any(self._then(one) == "retry" for one in said) or not self._is_running:
                break
        for place, one in zip(places, said, strict=True):
            outcomes[place] = self._joined(outcomes[place], self._with_stand_in(one))
        return outcomes

    def _joined(self, known: Outcome, said: Outcome) -> Outcome:
        """What services have said of an answer, and functions of the same."""
        if said.score is None or self._services is None:
            return replace(said, usage=known.usage)
        named = {} if self.config.functions else {self.config.part: said.score}
        score = (known.score or 0.0) + said.score
        return replace(said, score=score, parts={**known.parts, **named, **said.parts}, usage=known.usage)

    def _then(self, outcome: Outcome) -> str:
        """What reward.on_failure says of an outcome; empty where it has a score."""
        return "" if outcome.kind == "score" else str(getattr(self.config.on_failure, outcome.kind))

    def _with_stand_in(self, outcome: Outcome) -> Outcome:
        is_fixed = self._then(outcome) == "fixed"
        return replace(outcome, stand_in=self.config.failed_score if is_fixed else None)
