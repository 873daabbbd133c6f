"""One episode: an agent playing one sample of one prompt."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from strop.agents.registry import agents
from strop.randomness import random_key
from strop.rollout.client import GenerateClient
from strop.rollout.types import Sampling, TokenOutput
from strop.trajectory import Prompt, Trajectory


def sample_key(seed: int, uid: str, sample_index: int) -> int:
    """Key of the random stream of one sample: depends on seed, prompt visit and sample index alone."""
    return random_key(seed, "rollout", uid, sample_index)


async def play_episode(
    prompt: Prompt, sample_index: int, client: GenerateClient, sampling: Sampling, *, seed: int
) -> Trajectory:
    """Play the prompt's agent once.

    Args:
        prompt: what is asked; `prompt.agent_name` names the agent.
        sample_index: number of the sample within its group.
        client: generates tokens.
        sampling: options of every sample; the key and the remaining token budget are filled in here.
        seed: seed of the run.

    Returns:
        The finished trajectory, `timings["generate_s"]` being the time spent waiting for tokens.
    """
    key = sample_key(seed, prompt.uid, sample_index)
    used, generate_s, calls = 0, 0.0, 0

    async def generate(token_ids: Sequence[int]) -> TokenOutput:
        nonlocal used, generate_s, calls
        options = dataclasses.replace(
            sampling, key=key, position=used, max_tokens=max(1, sampling.max_tokens - used)
        )
        start = time.perf_counter()
        output = await client.generate(f"{prompt.uid}/{sample_index}#{calls}", token_ids, options)
        generate_s += time.perf_counter() - start
        used += len(output.token_ids)
        calls += 1
        return output

    empty = Trajectory(uid=prompt.uid, sample_index=sample_index, prompt_ids=prompt.token_ids)
    trajectory = await agents[prompt.agent_name](prompt, empty, generate)
    if not trajectory.is_finished:
        raise ValueError(
            f"agent {prompt.agent_name!r} returned trajectory {trajectory.id} unfinished; call finish"
        )
    if trajectory.id != empty.id or trajectory.prompt_ids != empty.prompt_ids:
        raise ValueError(
            f"agent {prompt.agent_name!r} returned trajectory {trajectory.id} for the sample {empty.id}; return the "
            f"trajectory that it was given, with tokens appended"
        )
    return dataclasses.replace(trajectory, timings={**trajectory.timings, "generate_s": generate_s})
