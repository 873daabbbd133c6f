"""Agents of OpenRLHF: a class with `reset(states)` and `step(states)`, played as its MultiTurnAgentExecutor does.

The text that the class answers goes behind the model's answer as it is, chat markers included, and is not trained;
the reward of the episode is the sum of the rewards of its steps. One file of `agent.files` defines the class, by the
names that it has there: AgentInstance, below AgentInstanceBase, and AgentExecutor, below MultiTurnAgentExecutor.
Its methods run on the event loop where they are async, and in threads else.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.tools.threads import answer_in_thread, call_in_thread, result_of
from strop.agents.verl_loops.output import AgentLoopOutput, sequence_of
from strop.agents.verl_loops.server import ServerManager
from strop.protocol.trajectory import Prompt, Trajectory
from strop.utils.registry import required_parameters

NAME = "openrlhf_agent"
"""Of the agent, for agent.default_agent or a row."""
_EXECUTORS: list[type[AgentExecutorBase]] = []
"""Classes that files of `agent.files` defined, in order."""


class AgentInstanceBase(ABC):
    """Environment of one episode; a new object for each, made without arguments. `__init__` may be `async def`."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begin.

        Args:
            states: observation, the prompt through the chat template as text; label, of the row.
            kwargs: none.

        Returns:
            observation, the text that the model continues.
        """
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answer the model.

        Args:
            states: observation_text, all text before the answer; action_text, the answer with its end of turn; label;
                sampling_params.
            kwargs: none.

        Returns:
            rewards, a number; environment_feedback, the text that follows; done; and if wanted scores, extra_logs
            (numbers by name), and sampling_params whose max_tokens or stop_token_ids hold from there on.
        """


class AgentExecutorBase:
    """Names the class of an episode: `super().__init__(AgentInstance)` in the constructor of a subclass."""

    def __init__(self, agent_instance_cls: type, *args: Any, **kwargs: Any) -> None:
        self.agent_instance_cls = agent_instance_cls

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "execute" in vars(cls):
            raise TypeError(
                f"{cls.__name__} has an `execute` of its own, which strop does not call, since it records every token "
                f"itself: write the episode as an agent, a class with `run` (docs/agents.md)"
            )
        if cls.__module__ != __name__:
            _EXECUTORS.append(cls)


class MultiTurnAgentExecutor(AgentExecutorBase):
    """AgentExecutorBase, under its name of 2026."""


async def openrlhf_agent(
    prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
) -> Trajectory:
    """Play one episode.

    Raises:
        ValueError: no file of agent.files has such a class, or its answer is invalid.
    """
    if prompt.media:
        raise ValueError(f"{NAME} shows text alone, and the prompt of row {prompt.row} has images")
    instance = await _made(_instance_class())
    server = ServerManager(generate, context)
    encode = context.template.encode

    def decode(token_ids: Sequence[int]) -> str:
        return str(context.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    prompt_text = decode(prompt.token_ids)
    text = await _first_text(instance, prompt, prompt_text)
    prompt_ids = list(prompt.token_ids) if text == prompt_text else encode(text)
    _refuse_longer(prompt_ids, context.max_prompt_tokens)
    max_tokens = _room_behind(prompt_ids, prompt, context)
    if text != prompt_text:
        trajectory = replace(trajectory, prompt_messages=({"role": "user", "content": text},))
    rewards = _StepRewards()
    params = SimpleNamespace(**server.params)
    reason = ""
    response_ids: list[int] = []
    mask: list[int] = []
    while len(response_ids) < max_tokens:
        answer = await server.generate(
            "", prompt_ids=[*prompt_ids, *response_ids], sampling_params=vars(params)
        )
        reason = server.calls[-1].stop_reason
        response_ids += answer.token_ids
        mask += [1] * len(answer.token_ids)
        answer_text = decode(answer.token_ids)
        states = {
            "observation_text": text,
            "action_text": answer_text,
            "label": prompt.ground_truth,
            "sampling_params": params,
        }
        result = await result_of(instance.step, f"{NAME}: step", answer_in_thread, states)
        feedback = _text(result, "environment_feedback", "step")
        rewards.add(result)
        if result.get("done") or reason == "aborted":
            break
        params = result.get("sampling_params") or params
        text += answer_text + feedback
        feedback_ids = encode(feedback)
        response_ids += feedback_ids
        mask += [0] * len(feedback_ids)
    else:  # nothing is left for another answer
        reason = "length"
    output = AgentLoopOutput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask,
        reward_score=rewards.reward,
        num_turns=2 * len(server.calls),
        extra_fields={"reward_parts": rewards.parts},
    )
    sequence = sequence_of(output, trajectory, server.calls, max_tokens=max_tokens)
    return replace(sequence, stop_reason="length") if reason == "length" else sequence


async def _first_text(instance: AgentInstanceBase, prompt: Prompt, prompt_text: str) -> str:
    """Text that the model continues."""
    states = {"observation": prompt_text, "label": prompt.ground_truth}
    result = await result_of(instance.reset, f"{NAME}: reset", call_in_thread, states)
    return _text(result, "observation", "reset")


def _refuse_longer(token_ids: list[int], max_tokens: int) -> None:
    if len(token_ids) > max_tokens:
        raise ValueError(
            f"reset gave an observation of {len(token_ids)} tokens, but data.max_prompt_tokens is {max_tokens}"
        )


def _room_behind(prompt_ids: list[int], prompt: Prompt, context: AgentContext) -> int:
    """Tokens of the response: what `reset` shows beyond the prompt of the row is taken from its budget."""
    num_added = len(prompt_ids) - len(prompt.token_ids)
    room = context.sampling.max_tokens - max(0, num_added)
    if room < 1:
        raise ValueError(
            f"reset makes prompt {prompt.uid} {num_added} tokens longer, but data.max_response_tokens is "
            f"{context.sampling.max_tokens}; raise it, or show less"
        )
    return room


class _StepRewards:
    """Sum of the rewards of an episode's steps, and its reward parts."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.parts: dict[str, float] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        if "rewards" not in result:
            raise ValueError(f"step gave no `rewards`; it gave {', '.join(map(str, result)) or 'nothing'}")
        self.reward += _number(result["rewards"], "rewards")
        if result.get("scores") is not None:
            self.parts["scores"] = _number(result["scores"], "scores")
        for name, value in (result.get("extra_logs") or {}).items():
            self.parts[str(name)] = _number(value, f"extra_logs[{name!r}]")


def _instance_class() -> type[AgentInstanceBase]:
    if not _EXECUTORS:
        raise ValueError(
            f"{NAME} plays the class that a file of agent.files gives to MultiTurnAgentExecutor, and none does: name "
            f"the file in agent.files, and import both bases from strop.agents in it"
        )
    executor: Any = _EXECUTORS[-1]
    parameters = required_parameters(executor)  # of mid-2025: max_steps, llm_engine, hf_tokenizer and others
    instance_class: type[AgentInstanceBase] = executor(**dict.fromkeys(parameters)).agent_instance_cls
    return instance_class


async def _made(instance_class: type[AgentInstanceBase]) -> AgentInstanceBase:
    """An object of the class. Its constructor may be `async def`, as in OpenRLHF's own examples, where Ray calls it."""
    if not inspect.iscoroutinefunction(instance_class.__init__):
        return instance_class()
    instance = instance_class.__new__(instance_class)
    await instance.__init__()  # type: ignore[misc]
    return instance


def _text(result: Any, key: str, method: str) -> str:
    text = result.get(key) if isinstance(result, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"{method} gave {result!r:.80}; it must be a dictionary with a text under {key!r}")
    return text


def _number(value: Any, label: str) -> float:
    """A number, or a tensor with one element."""
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"step gave {value!r:.80} as {label}; it must be one finite number")
    return float(value)
