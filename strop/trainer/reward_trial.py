"""The reward function tried on a few answers, before time is spent on anything else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from strop.agents.config import AGENTS_IN_A_WORLD
from strop.data.visit_ids import visit_uid
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardError, RewardPool, summarize
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import causes
from strop.rewards.wire import NOT_SENT
from strop.run import RunFolder
from strop.trainer.api_costs import CostTracker
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData

NUM_PROBES = 2
"""Prompts on which scorers are tried."""
_MAX_PROBES = 4
"""Answers that are scored; enough to tell a broken function from a bad answer."""


def try_reward(
    config: Config, data: TrainingData, run: RunFolder, say: Reporter, *, costs: CostTracker | None
) -> None:
    """Try the reward function of a run on its first rows.

    Args:
        config, data, run: of the run.
        say: takes lines for the person who watches.
        costs: counts what services cost; None where none has a price.

    Raises:
        RewardError: every probe failed.
    """
    rows = data.train.row_numbers[:NUM_PROBES]
    group_size, of_validation = config.rollout.samples_per_prompt, config.eval.samples_per_prompt
    validation_size = of_validation if data.val_prompts else None
    visited = [data.train.prompt(row, visit_uid(0, row)) for row in rows]

    async def probe() -> None:
        tokenizer, logs = config.model.tokenizer_folder, run.path / "logs"
        async with RewardPool(config.reward, tokenizer=tokenizer, logs=logs) as pool:
            if costs is not None:
                pool.set_cost(costs.totals)
            try:
                await probe_scorers(
                    pool, visited, say, group_size=group_size, validation_size=validation_size
                )
            finally:
                if costs is not None:
                    costs.add(pool.cost())

    asyncio.run(probe())


async def probe_scorers(
    scorers: RewardPool,
    prompts: Sequence[Prompt],
    say: Reporter,
    *,
    group_size: int,
    validation_size: int | None,
) -> None:
    """Score the right answer and an empty one to each of a few prompts; what failed of it is said.

    Args:
        scorers: they run.
        prompts: the first ones count; those of agents that score episodes themselves are left out.
        say: takes the line.
        group_size: answers to a prompt that functions which take lists will be given.
        validation_size: the same in a validation; None without one.

    Raises:
        RewardError: every probe failed.
    """
    probed = [prompt for prompt in prompts[:NUM_PROBES] if prompt.agent_name not in AGENTS_IN_A_WORLD]
    if not probed:
        return
    answers = [str(prompt.ground_truth) for prompt in probed]
    if validation_size == 1 and await _compares(scorers, probed[0], answers[0]):
        say(
            "reward: what it says of an answer depends on the other answers to the prompt, and a validation gives it "
            "one (eval.samples_per_prompt=1): set eval.samples_per_prompt=4 and eval.temperature=1 to have it compare "
            "there too"
        )
    outcomes = await probe_answers(
        scorers, [*probed, *probed], [*answers, *["" for _ in probed]], group_size=group_size
    )
    if any(outcome.kind != "score" for outcome in outcomes):
        say(f"reward preflight: {summarize(outcomes, timeout_s=scorers.config.timeout_s)}")


async def probe_answers(
    scorers: RewardPool, prompts: Sequence[Prompt], solutions: Sequence[str], *, group_size: int = 1
) -> list[Outcome]:
    """Score a few answers before training; at most four are used.

    Args:
        scorers: they run.
        prompts, solutions: a prompt for each answer.
        group_size: answers to a prompt that functions which take lists are given: those here, over and over.

    Returns:
        The outcomes; one that failed among others that did not is the caller's to report.

    Raises:
        RewardError: every probe failed; the sentence says what the function did.
    """
    probes = list(zip(prompts, solutions, strict=True))[:_MAX_PROBES]
    if not probes:
        raise ValueError("the reward preflight needs at least one prompt and one answer")
    if scorers.takes_groups and group_size > 1:
        outcomes = await _scored_in_groups(scorers, probes, group_size)
    else:
        outcomes = await asyncio.gather(*(scorers.score_text(prompt, text) for prompt, text in probes))
    if all(outcome.kind != "score" for outcome in outcomes):
        raise RewardError(_verdict(outcomes, scorers.config))
    return list(outcomes)


async def _compares(scorers: RewardPool, prompt: Prompt, right: str) -> bool:
    """True when the score of an answer depends on the others: a service compares them, or a function does."""
    if not scorers.takes_groups:
        return scorers.compares
    probes = [(prompt, right), (prompt, "")]
    together = await _scored_together(scorers, probes, range(2), 4)
    for index in range(2):
        alone = await _scored_together(scorers, probes, [index], 1)
        if alone[index].score != together[index].score:
            return True
    return False


async def _scored_in_groups(
    scorers: RewardPool, probes: Sequence[tuple[Prompt, str]], group_size: int
) -> list[Outcome]:
    """An outcome for each probe. Those of one prompt are repeated until they are a group; one that fails in it is then
    repeated alone."""
    places: dict[str, list[int]] = {}
    for index, (prompt, _) in enumerate(probes):
        places.setdefault(prompt.uid, []).append(index)
    outcomes: dict[int, Outcome] = {}
    for together in places.values():
        outcomes |= await _scored_together(scorers, probes, together, group_size)
        for index in [index for index in together if outcomes[index].kind != "score"]:
            outcomes |= await _scored_together(scorers, probes, [index], group_size)
    return [outcomes[index] for index in range(len(probes))]


async def _scored_together(
    scorers: RewardPool, probes: Sequence[tuple[Prompt, str]], places: Sequence[int], group_size: int
) -> dict[int, Outcome]:
    """The outcomes of these probes to one prompt in a group of so many answers."""
    group = list(itertools.islice(itertools.cycle(places), max(group_size, len(places))))
    prompt = probes[places[0]][0]
    played = [
        Trajectory(uid=prompt.uid, sample_index=number, prompt_ids=prompt.token_ids)
        for number in range(len(group))
    ]
    texts = [probes[index][1] for index in group]
    outcomes = [
        await scorers.score(prompt, trajectory, text, in_group=True)
        for trajectory, text in zip(played, texts, strict=True)
    ]
    compared = await scorers.compare(prompt, list(zip(texts, outcomes, strict=True)), played)
    return dict(zip(group, compared, strict=True))


def _verdict(outcomes: Sequence[Outcome], reward: RewardConfig) -> str:
    location = f" ({reward.path})" if reward.path else ""
    if all(NOT_SENT in outcome.error for outcome in outcomes):
        return f"the reward function cannot be given the data: {outcomes[0].error}"
    if all(outcome.kind in ("error", "timeout") and not outcome.service for outcome in outcomes):
        count = "the one probe" if len(outcomes) == 1 else f"all {len(outcomes)} probes"
        head = f"the reward function failed on {count}{location}"
    else:
        count = "the one probe" if len(outcomes) == 1 else f"none of {len(outcomes)} probes"
        head = f"{count} could {'not ' if len(outcomes) == 1 else ''}be scored{location}"
    has_file = bool(reward.path) or any(function.path for function in reward.functions)
    repair = (
        "repair the function" if has_file else "repair the data, or set reward.path to a scorer of your own"
    )
    found = causes(outcomes, repair=repair)
    clauses = [f"{error}. What to do: {remedy}" if remedy else error for error, remedy in found]
    return f"{head}: {'; '.join(clauses)}"
