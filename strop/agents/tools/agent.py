"""The agent with tools: the model answers, its calls are carried out, it reads the results and goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.tools.call_stats import CallResult
from strop.agents.tools.conversation import Conversation
from strop.agents.tools.multi_turn import Replies, take_turns
from strop.agents.tools.parsed_output import ParsedTurn
from strop.agents.tools.plugin import tool_session
from strop.agents.tools.session import ToolSession
from strop.protocol.trajectory import Prompt, Trajectory


async def tool_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """Alternate answers and tool calls until an answer calls no tool, or a limit is reached.

    Stop reasons are those of `take_turns`; an answer without calls is a `stop`. Calls of the answer at which a limit
    is reached are not carried out.
    """
    conversation = Conversation(prompt, trajectory, context)
    async with tool_session(context, prompt, trajectory.id) as session:

        async def reply(turn: ParsedTurn, *, is_last: bool) -> Replies | str:
            if not turn.calls:
                return "stop"
            return Replies() if is_last else tool_replies(await session.call_all(turn.calls))

        reason = await take_turns(conversation, generate, context, reply)
        rewards = await session.calc_rewards()
    return conversation.finish(
        reason,
        extra=_facts(session, rewards),
        numbers=session.numbers(),
        timings={"tool_calls": session.seconds},
    )


def tool_replies(results: Sequence[CallResult]) -> Replies:
    """Replies with the results of a turn's calls."""
    return Replies(
        texts=[result.text for result in results],
        role="tool",
        images=[result.images for result in results],
        facts=[result.stored for result in results],
    )


def _facts(session: ToolSession, rewards: Mapping[str, float]) -> dict[str, Any]:
    """For the reward function, under verl's names."""
    return {
        "turn_scores": [],
        "tool_rewards": [result.reward for result in session.results],
        "rollout_reward_scores": dict(rewards),
    }
