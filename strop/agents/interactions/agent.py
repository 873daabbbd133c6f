"""The agent with a user: an interaction answers the model; tool calls are executed in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.interactions.base import BaseInteraction
from strop.agents.interactions.loading import interaction_of_row
from strop.agents.tools.agent import tool_replies
from strop.agents.tools.conversation import Conversation
from strop.agents.tools.multi_turn import Replies, take_turns
from strop.agents.tools.parsed_output import ParsedTurn
from strop.agents.tools.plugin import tool_session
from strop.agents.tools.threads import answer_in_thread, call_in_thread, result_of
from strop.agents.user_code import contained
from strop.protocol.trajectory import Prompt, Trajectory
from strop.utils.sanitize import encodable, storable_text, usable

logger = logging.getLogger(__name__)


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
            await self._called("start_interaction", call_in_thread, instance_id) or instance_id
        )

    def add_messages(self, role: str, texts: Sequence[str]) -> None:
        """Append messages to the conversation that the interaction gets."""
        self.messages += [{"role": role, "content": text} for text in texts]

    async def answer(self) -> Replies | str:
        """The user's reply; `stop` where the user ends the conversation."""
        returned: object = await self._called(
            "generate_response", answer_in_thread, self.instance, list(self.messages)
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
        if is_over:
            return "stop"
        reply = encodable(str(text)) or " "
        self.add_messages("user", [reply])
        return Replies(texts=[reply], facts=[{"reward": value}])

    async def finish(self) -> None:
        try:
            await self._called("finalize_interaction", call_in_thread, self.instance)
        except InteractionFailed:
            logger.exception("interaction %s could not be finalized", self.interaction.name)

    async def _called(self, name: str, in_thread: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        label = f"interaction {self.interaction.name}: {name}"
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                with contained():
                    method = getattr(self.interaction, name)
                    return await result_of(method, label, in_thread, *args, **self.kwargs)
        except TimeoutError as error:
            if deadline.expired():
                raise InteractionFailed(f"{label} took longer than {self.timeout_s:g} s") from None
            raise InteractionFailed(f"{label}: TimeoutError: {error}") from error
        except Exception as error:
            raise InteractionFailed(f"{label}: {type(error).__name__}: {error}") from error


async def interaction_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Sequence[Trajectory]:
    """Alternate answers of the model and of the user until the user ends it, or a limit is reached.

    Calls of tools in an answer are carried out before the user sees anything, those of the answer at which a limit is
    reached not at all. The rewards of the user are the `turn_scores` that the reward function finds in its extra_info.
    Stop reasons are those of `take_turns`; `stop` when the user ended it, and `interaction_failed`: the answer before
    it is worth 0.

    Raises:
        InteractionFailed: the interaction could not begin.
    """
    interactions: Mapping[str, BaseInteraction] = context.resources["interactions"]
    name, kwargs = interaction_of_row(prompt.extra_info, interactions, f"prompt {prompt.uid}")
    user = _User(
        interactions[name], kwargs, context.config.tool_timeout_s, [dict(m) for m in prompt.messages]
    )
    conversation = Conversation(prompt, trajectory, context)
    async with tool_session(context, prompt, trajectory.id) as session:

        async def reply(turn: ParsedTurn, *, is_last: bool) -> Replies | str:
            user.add_messages("assistant", [turn.content])
            if not turn.calls:
                try:
                    return await user.answer()
                except InteractionFailed as error:  # the model's answer may be the cause
                    logger.warning("%s; the answer before it is worth 0", error)
                    user.scores.append(0.0)
                    return "interaction_failed"
            if is_last:
                return Replies()
            results = await session.call_all(turn.calls)
            user.add_messages("tool", [result.as_read for result in results])
            return tool_replies(results)

        await user.start(trajectory.id)
        try:
            reason = await take_turns(conversation, generate, context, reply)
        finally:
            await asyncio.shield(asyncio.ensure_future(user.finish()))
        rewards = await session.calc_rewards()
    return conversation.finish(
        reason,
        extra={
            "turn_scores": list(user.scores),
            "tool_rewards": [result.reward for result in session.results],
            "rollout_reward_scores": dict(rewards),
        },
        numbers={
            "turn_scores": float(sum(user.scores)),
            "interaction_failed": float(reason == "interaction_failed"),
            **session.numbers(),
        },
        timings={"tool_calls": session.seconds},
    )
