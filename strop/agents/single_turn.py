"""The simplest agent: one answer to one prompt."""

from __future__ import annotations

from strop.agents.config import SINGLE_TURN
from strop.agents.registry import Generate, agents
from strop.trajectory import Prompt, Trajectory


@agents.register(SINGLE_TURN)
async def single_turn(prompt: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
    """Generate once and stop."""
    output = await generate(prompt.token_ids)
    answered = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
    return answered.finish(output.stop_reason)
