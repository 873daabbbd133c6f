"""The reward function tried on a few answers, before time is spent on anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from strop.agents.registry import AGENTS_IN_A_WORLD
from strop.data.sampler import visit_uid
from strop.rewards import Outcome, RewardError, RewardPool, summarize
from strop.rewards.wire import NOT_SENT
from strop.run import RunFolder
from strop.trainer.config import Config
from strop.trainer.launch import Say
from strop.trainer.setup import TrainingData
from strop.trajectory import Prompt

NUM_PROBES = 2
"""Prompts on which scorers are tried."""
_MAX_PROBES = 4
"""Answers that are scored; enough to tell a broken function from a bad answer."""


def try_reward(config: Config, data: TrainingData, run: RunFolder, say: Say, *, costs: Any) -> None:
    """Try the reward function of a run on its first rows.

    Args:
        config, data, run: of the run.
        say: takes lines for the person who watches.
        costs: counts what services cost (place "costs of services"); None where none has a price.

    Raises:
        RewardError: every probe failed.
    """
    rows = data.train.row_numbers[:NUM_PROBES]
    visited = [data.train.prompt(row, visit_uid(0, row)) for row in rows]

    async def probe() -> None:
        tokenizer, logs = config.model.tokenizer_folder, run.path / "logs"
        async with RewardPool(config.reward, tokenizer=tokenizer, logs=logs) as pool:
            if costs is not None:
                pool.tell_spent(costs.totals)
            try:
                await probe_scorers(pool, visited, say)
            finally:
                if costs is not None:
                    costs.add(pool.spent())

    asyncio.run(probe())


async def probe_scorers(scorers: RewardPool, prompts: Sequence[Prompt], say: Say) -> None:
    """Score the right answer and an empty one to each of a few prompts; what failed of it is said.

    Args:
        scorers: they run.
        prompts: the first ones count; those of agents that score episodes themselves are left out.
        say: takes the line.

    Raises:
        RewardError: every probe failed.
    """
    probed = [prompt for prompt in prompts[:NUM_PROBES] if prompt.agent_name not in AGENTS_IN_A_WORLD]
    if not probed:
        return
    answers = [str(prompt.ground_truth) for prompt in probed]
    outcomes = await probe_answers(scorers, [*probed, *probed], [*answers, *["" for _ in probed]])
    if any(outcome.kind != "score" for outcome in outcomes):
        say(f"reward preflight: {summarize(outcomes, timeout_s=scorers.config.timeout_s)}")


async def probe_answers(
    scorers: RewardPool, prompts: Sequence[Prompt], solutions: Sequence[str]
) -> list[Outcome]:
    """Score a few answers before training; at most four are used.

    Returns:
        The outcomes; one that failed among others that did not is the caller's to report.

    Raises:
        RewardError: every probe failed; the sentence says what the function did.
    """
    probes = list(zip(prompts, solutions, strict=True))[:_MAX_PROBES]
    if not probes:
        raise ValueError("the reward preflight needs at least one prompt and one answer")
    outcomes = await asyncio.gather(*(scorers.score_text(prompt, text) for prompt, text in probes))
    if all(outcome.kind != "score" for outcome in outcomes):
        raise RewardError(_verdict(outcomes, scorers.config.path))
    return list(outcomes)


def _verdict(outcomes: Sequence[Outcome], path: str) -> str:
    count = "the one probe" if len(outcomes) == 1 else f"all {len(outcomes)} probes"
    where = f" ({path})" if path else ""
    if all(NOT_SENT in outcome.error for outcome in outcomes):
        return f"the reward function cannot be given the data: {outcomes[0].error}"
    if all(outcome.kind == "timeout" for outcome in outcomes):
        advice = "make it faster, or raise reward.timeout_s"
    elif path:
        advice = "repair the function; training has not started"
    else:
        advice = "repair the data, or set reward.path to a scorer of your own; training has not started"
    return f"the reward function failed on {count}{where}: {outcomes[0].error}. What to do: {advice}"
