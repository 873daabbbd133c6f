"""The agent with tools: the model answers, its calls are carried out, it reads the results and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.config import TOOL_AGENT
from strop.agents.context import AgentContext
from strop.agents.conversation import Conversation
from strop.agents.registry import Generate, agents
from strop.agents.tools.session import CallResult, ToolSession
from strop.border import storable
from strop.trajectory import Prompt, Trajectory

RELEASE_S = 5.0
"""Seconds before the deadline of an episode at which it ends by itself, so that its tools can be released; at
most half of its time."""


@agents.register(TOOL_AGENT)
async def tool_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """Alternate answers and tool calls until an answer calls no tool, or a limit is reached.

    Stop reasons: `stop` for an answer without calls, `length` for the token budget, `max_assistant_turns`,
    `max_user_turns`, `timeout` and `aborted`. A result that would leave no room for another answer is not
    appended.
    """
    conversation = Conversation(prompt, trajectory, context)
    margin = min(RELEASE_S, context.config.timeout_s / 2)
    async with context.tool_session(prompt, trajectory.id) as session:
        try:
            async with asyncio.timeout_at(context.deadline - margin) as deadline:
                reason = await _play(conversation, generate, context, session)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = "timeout"
        rewards = await session.calc_rewards()
    return conversation.finish(
        reason,
        extra=_facts(session, rewards),
        numbers=_numbers(session),
        timings={"tool_calls": session.seconds},
    )


async def _play(
    conversation: Conversation, generate: Generate, context: AgentContext, session: ToolSession
) -> str:
    """The turns of an episode; why it ended."""
    assert context.parser is not None, "an episode with tools has one"
    limits, num_answers = context.config, 0
    while True:
        output = await generate(
            conversation.token_ids,
            stop_token_ids=context.parser.stop_token_ids,
            max_tokens=conversation.room,
        )
        num_answers += 1
        turn = await context.parser.parse(
            output.token_ids, context.tool_schemas, begins_in_thinking=context.begins_in_thinking
        )
        conversation.add_answer(output, turn)
        if output.stop_reason != "stop" or not turn.calls:
            return output.stop_reason
        if limits.max_assistant_turns is not None and num_answers >= limits.max_assistant_turns:
            return "max_assistant_turns"
        if limits.max_user_turns is not None and num_answers > limits.max_user_turns:
            return "max_user_turns"
        results = await session.call_all(turn.calls)
        if not conversation.add_replies(
            [r.text for r in results], images=[r.images for r in results], facts=[_kept(r) for r in results]
        ):
            return "length"


def _kept(result: CallResult) -> Mapping[str, Any]:
    """What the sample store keeps of a call beside its text."""
    kept: dict[str, Any] = {"seconds": round(result.seconds, 3)}
    if result.reward:
        kept["reward"] = result.reward
    if result.error:
        kept["error"] = result.error
    if result.facts:
        kept["facts"] = storable(result.facts)
    return kept


def _facts(session: ToolSession, rewards: Mapping[str, float]) -> dict[str, Any]:
    """For the reward function, under the names of the field."""
    return {
        "turn_scores": [],
        "tool_rewards": [result.reward for result in session.results],
        "rollout_reward_scores": dict(rewards),
    }


def _numbers(session: ToolSession) -> dict[str, float]:
    """For the metrics of the step."""
    results = session.results
    return {
        "tool_call_counts": float(len(results)),
        "tool_rewards": float(sum(result.reward for result in results)),
        "tool_errors": float(sum(bool(result.error) for result in results)),
    }
