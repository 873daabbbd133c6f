"""The agent with a user: what the model says is answered by an interaction; tools are carried out on the way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from strop.agents.config import INTERACTION_AGENT
from strop.agents.context import AgentContext
from strop.agents.conversation import Conversation
from strop.agents.env_agent import read_answer
from strop.agents.interactions.base import BaseInteraction
from strop.agents.interactions.loading import interaction_of_row
from strop.agents.registry import Generate, agents
from strop.agents.tools.session import ToolSession
from strop.agents.user_code import contained
from strop.border import encodable, storable_text, usable
from strop.trajectory import Media, Prompt, Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

RELEASE_S = 5.0
"""Seconds before the deadline of an episode at which it ends by itself; at most half of its time."""


class InteractionFailed(RuntimeError):
    """An interaction did not do its work. Before the model has answered, that fails the episode; after that the answer
    is worth 0."""


@dataclass
class _User:
    """The interaction of one episode."""

    interaction: BaseInteraction
    kwargs: Mapping[str, Any]
    timeout_s: float
    messages: list[Mapping[str, Any]]
    instance: str = ""
    scores: list[float] = field(default_factory=list)

    async def start(self, instance_id: str) -> None:
        self.instance = str(
            await self._timed(
                "start_interaction", self.interaction.start_interaction(instance_id, **self.kwargs)
            )
            or instance_id
        )

    async def answer(self) -> tuple[bool, str]:
        """Whether it ends, and what the user says."""
        returned: object = await self._timed(
            "generate_response",
            self.interaction.generate_response(self.instance, list(self.messages), **self.kwargs),
        )
        if not isinstance(returned, tuple) or len(returned) != 4:
            raise InteractionFailed(
                f"interaction {self.interaction.name}: generate_response returned {returned!r:.80}; return "
                f"(should_terminate, text, reward, metadata)"
            )
        is_over, text, reward, _ = returned
        value = 0.0 if reward is None else usable(reward)
        if value is None:
            raise InteractionFailed(
                f"interaction {self.interaction.name}: the reward is {storable_text(reward):.80}; it must be a "
                f"number up to 1e15"
            )
        self.scores.append(value)
        return bool(is_over), encodable(str(text))

    async def finish(self) -> None:
        try:
            await self._timed(
                "finalize_interaction", self.interaction.finalize_interaction(self.instance, **self.kwargs)
            )
        except InteractionFailed:
            logger.exception("interaction %s could not be finalized", self.interaction.name)

    async def _timed(self, what: str, work: Awaitable[T]) -> T:
        where = f"interaction {self.interaction.name}: {what}"
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                return await contained(work)
        except TimeoutError as error:
            if deadline.expired():
                raise InteractionFailed(f"{where} took longer than {self.timeout_s:g} s") from None
            raise InteractionFailed(f"{where}: TimeoutError: {error}") from error
        except Exception as error:
            raise InteractionFailed(f"{where}: {type(error).__name__}: {error}") from error


@agents.register(INTERACTION_AGENT)
async def interaction_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """Alternate answers of the model and of the user until the user ends it, or a limit is reached.

    Calls of tools in an answer are carried out before the user sees anything. The rewards of the user are the
    `turn_scores` that the reward function finds in its extra_info. Stop reasons: `stop` when the user ended it,
    `length`, `max_assistant_turns`, `max_user_turns`, `timeout`, `interaction_failed` and `aborted`.

    Raises:
        InteractionFailed: the interaction could not begin.
    """
    name, kwargs = interaction_of_row(prompt.extra_info, context.interactions, f"prompt {prompt.uid}")
    user = _User(
        context.interactions[name], kwargs, context.config.tool_timeout_s, [dict(m) for m in prompt.messages]
    )
    conversation = Conversation(prompt, trajectory, context)
    margin = min(RELEASE_S, context.config.timeout_s / 2)
    async with context.tool_session(prompt, trajectory.id) as session:
        await user.start(trajectory.id)
        try:
            async with asyncio.timeout_at(context.deadline - margin) as deadline:
                reason = await _play(conversation, generate, context, session, user)
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = "timeout"
        finally:
            await asyncio.shield(asyncio.ensure_future(user.finish()))
        rewards = await session.calc_rewards()
    calls = session.results
    return conversation.finish(
        reason,
        extra={
            "turn_scores": list(user.scores),
            "tool_rewards": [result.reward for result in calls],
            "rollout_reward_scores": dict(rewards),
        },
        numbers={
            "turn_scores": float(sum(user.scores)),
            "interaction_failed": float(reason == "interaction_failed"),
            "tool_call_counts": float(len(calls)),
            "tool_errors": float(sum(bool(result.error) for result in calls)),
        },
        timings={"tool_calls": session.seconds},
    )


async def _play(
    conversation: Conversation,
    generate: Generate,
    context: AgentContext,
    session: ToolSession,
    user: _User,
) -> str:
    """The turns of an episode; why it ended."""
    limits, parser = context.config, context.parser
    num_answers = num_replies = 0
    while True:
        stops = () if parser is None else tuple(parser.stop_token_ids)
        output = await generate(conversation.token_ids, stop_token_ids=stops, max_tokens=conversation.room)
        num_answers += 1
        if parser is None:
            turn = read_answer(output, context)
        else:
            turn = await parser.parse(
                output.token_ids, context.tool_schemas, begins_in_thinking=context.begins_in_thinking
            )
        conversation.add_answer(output, turn)
        user.messages.append({"role": "assistant", "content": turn.content})
        if output.stop_reason != "stop":
            return output.stop_reason
        is_over, role = False, "user"
        images: list[tuple[Media, ...]] = []
        if turn.calls:
            results = await session.call_all(turn.calls)
            role, texts = "tool", [result.text for result in results]
            images, read = [result.images for result in results], [result.as_read for result in results]
            facts: list[Mapping[str, Any]] = [
                {"reward": r.reward, **({"error": r.error} if r.error else {})} for r in results
            ]
        else:
            try:
                is_over, says = await user.answer()
            except InteractionFailed as error:  # what the model said may be why
                logger.warning("%s; the answer before it is worth 0", error)
                user.scores.append(0.0)
                return "interaction_failed"
            texts, facts = [says or " "], [{"reward": user.scores[-1]}]
            read = texts
        if is_over:
            return "stop"
        if limits.max_assistant_turns is not None and num_answers >= limits.max_assistant_turns:
            return "max_assistant_turns"
        if limits.max_user_turns is not None and num_replies >= limits.max_user_turns:
            return "max_user_turns"
        if not conversation.add_replies(texts, role=role, images=images, facts=facts):
            return "length"
        num_replies += 1
        user.messages += [{"role": role, "content": text} for text in read]
