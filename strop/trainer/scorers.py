"""The reward function, tried before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from strop.agents.registry import AGENTS_IN_A_WORLD
from strop.rewards import RewardPool, summarize
from strop.trainer.launch import Say
from strop.trajectory import Prompt

NUM_PROBES = 2
"""Prompts on which scorers are tried."""


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
    outcomes = await scorers.preflight([*probed, *probed], [*answers, *["" for _ in probed]])
    if any(outcome.kind != "score" for outcome in outcomes):
        say(f"reward preflight: {summarize(outcomes, timeout_s=scorers.config.timeout_s)}")
