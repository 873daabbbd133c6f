"""The agent that plays an environment: answers are actions, observations are user turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.envs.base import EnvironmentFailed, Observation, Step
from strop.agents.envs.credit import with_turn_rewards
from strop.agents.envs.loading import choose_environment
from strop.agents.envs.playing import PlayedEnvironment, episode_seed
from strop.agents.tools.conversation import Conversation
from strop.agents.tools.multi_turn import Replies, take_turns
from strop.agents.tools.parsed_output import ParsedTurn
from strop.protocol.trajectory import Prompt, Trajectory
from strop.utils.sanitize import described

logger = logging.getLogger(__name__)

AT_FIRST = "the prompt"
"""State of the first answer, where the environment shows nothing first."""


async def env_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """Alternate answers and steps until the environment says that the episode is over, or a limit is reached.

    The score of the episode is the sum of the rewards; where the environment gives none, the reward function is
    asked. Stop reasons are those of `take_turns`; `stop` when the environment ended it, and
    `environment_failed`. An answer that was cut off is no action: the environment does not see it. An answer on which
    the environment fails is worth 0 and ends the episode, which counts: failing would be a way around a bad score
    otherwise.

    Raises:
        EnvironmentFailed: it failed before the model had said anything.
    """
    settings = context.config.environment
    is_by_turn = context.config.credit == "turn"
    row = row_of(prompt)
    choice = choose_environment(row, name=settings.name, kwargs=settings.kwargs, label=f"prompt {prompt.uid}")
    steps: list[Step] = []
    anchors: list[str] = []
    clock = asyncio.get_running_loop().time
    async with PlayedEnvironment(choice, timeout_s=context.config.tool_timeout_s) as environment:
        start = clock()
        first = await environment.reset(episode_seed(prompt.uid, prompt.extra_info), row)
        if is_by_turn:
            anchors.append(await environment.anchor_state(first.text or AT_FIRST))
        environment_s = clock() - start
        prompt, trajectory, context = with_first_observation(first, prompt, trajectory, context)
        conversation = Conversation(prompt, trajectory, context)

        async def reply(turn: ParsedTurn, *, is_last: bool) -> Replies | str:
            nonlocal environment_s
            start = clock()
            try:
                step = await environment.step(turn.content)
                if is_by_turn and not step.is_done and not is_last:
                    anchors.append(await environment.anchor_state(step.observation))
            except EnvironmentFailed as error:
                logger.warning("%s; the answer before it is worth 0", error)
                facts = {"acc": False, "failure": described(error)}
                steps.append(Step(observation="", reward=0.0, is_done=True, info=facts))
                return "environment_failed"
            finally:
                environment_s += clock() - start
            steps.append(step)
            return "stop" if step.is_done else Replies(texts=[step.observation or " "])

        reason = await take_turns(conversation, generate, context, reply, answers_stand_alone=is_by_turn)
    rewards = [step.reward for step in steps]
    sequences = conversation.finish(
        reason,
        extra={
            "turn_scores": [0.0 if reward is None else reward for reward in rewards],
            "tool_rewards": [],
            "reward_parts": reward_parts(steps),
        },
        numbers={"env_steps": float(len(steps)), "env_failed": float(reason == "environment_failed")},
        timings={"environment_s": environment_s},
    )
    return with_scores(sequences, rewards, each_alone=is_by_turn, anchors=anchors)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The row of a prompt, as an environment gets it."""
    return {
        **prompt.columns,
        "prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "uid": prompt.uid,
    }


def with_first_observation(
    first: Observation, prompt: Prompt, trajectory: Trajectory, context: AgentContext
) -> tuple[Prompt, Trajectory, AgentContext]:
    """Prompt, trajectory and context after the first observation, which becomes part of the prompt.

    The added tokens are taken from the budget of the response, so rows stay within the run's limits.

    Raises:
        ValueError: nothing is left of that budget, or the prompt has images.
    """
    if not first.text and not first.messages:
        return prompt, trajectory, context
    if prompt.media:
        raise ValueError(
            f"prompt {prompt.uid} has images, and its environment a first observation; show it in the row's prompt"
        )
    template = context.template
    first_messages = [template.as_plain_message(message) for message in first.messages or ()]
    messages = first_messages or [dict(message) for message in prompt.messages]
    if first.text:
        text = template.as_plain_text(first.text)
        if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
            last_text = messages[-1]["content"]
            messages[-1] = {
                **messages[-1], "content": f"{last_text}\n\n{text}" if last_text else text
            }  # fmt: skip
        else:
            messages.append({"role": "user", "content": text})
    token_ids = template.prompt_ids(messages, context.tool_schemas)
    room = context.sampling.max_tokens - max(0, len(token_ids) - len(prompt.token_ids))
    if room < 1:
        raise ValueError(
            f"the first observation makes prompt {prompt.uid} {len(token_ids) - len(prompt.token_ids)} tokens longer, "
            f"but data.max_response_tokens is {context.sampling.max_tokens}; raise it, or show less"
        )
    return (
        replace(prompt, token_ids=token_ids, messages=tuple(messages)),
        replace(trajectory, prompt_ids=token_ids, prompt_messages=tuple(messages)),
        replace(context, sampling=replace(context.sampling, max_tokens=room)),
    )


def reward_parts(steps: Sequence[Step]) -> dict[str, float | str | bool]:
    """Parts of the reward: facts of the last step."""
    if not steps:
        return {}
    return {
        str(key): value
        for key, value in steps[-1].info.items()
        if isinstance(value, bool | int | float | str) and value == value
    }


def with_scores(
    sequences: Sequence[Trajectory],
    rewards: Sequence[float | None],
    *,
    each_alone: bool,
    anchors: Sequence[str] = (),
) -> Sequence[Trajectory]:
    """The sequences with the rewards of their answers, and the last one with the score of the episode."""
    rewarded = with_turn_rewards(sequences, rewards, each_alone=each_alone, anchors=anchors)
    if rewards and all(reward is None for reward in rewards):
        return rewarded  # the reward function is asked
    total = float(sum(reward for reward in rewards if reward is not None))
    return (*rewarded[:-1], replace(rewarded[-1], reward_score=total))
