"""What tests of agents have in common: a model that says what it is told, and episodes without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.config import AgentConfig
from strop.agents.episodes import play_episode
from strop.agents.setup import AgentSetup
from strop.agents.tools.base import BaseTool
from strop.agents.tools.images import ImageEncoder
from strop.agents.tools.plugin import ToolPlugin
from strop.agents.tools.session import ToolLimits, ToolSession
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput


@dataclass
class ScriptedModel:
    """Answers with the given tokens; every token has a log-prob of its own, every answer a version."""

    answers: Sequence[Sequence[int] | Callable[[], Any]]
    requests: list[tuple[tuple[int, ...], Sampling]] = field(default_factory=list)
    said: list[tuple[int, float, int]] = field(default_factory=list)
    """(token, log-prob, version) in the order in which they were sampled."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        number = len(self.requests)
        self.requests.append((tuple(prompt_ids), sampling))
        answer = self.answers[min(number, len(self.answers) - 1)]
        ids = list(await answer() if callable(answer) else answer)
        reason: StopReason = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        made = [(token, -0.001 * (len(self.said) + i + 1), number) for i, token in enumerate(ids)]
        self.said += made
        for one in made if on_token is not None else ():
            assert on_token is not None
            on_token(*one)
        return TokenOutput(
            token_ids=tuple(ids),
            log_probs=tuple(log_prob for _, log_prob, _ in made),
            versions=tuple(version for _, _, version in made),
            stop_reason=reason,
        )


def sampling_of(tokenizer: Any, *, max_tokens: int = 2000) -> Sampling:
    return Sampling(key=0, max_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,))


def prompt_of(
    tokenizer: Any, *, tools: Sequence[Any] = (), agent_name: str = "tool_agent", **changes: Any
) -> Prompt:
    messages = ({"role": "user", "content": "How much is it?"},)
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    fields = {"uid": "e0-000001", "row": 1, "data_source": "test", "ground_truth": "3"} | changes
    return Prompt(token_ids=ids, messages=messages, agent_name=agent_name, **fields)


def play(
    prompt: Prompt,
    model: ScriptedModel,
    setup: AgentSetup,
    *,
    sampling: Sampling,
    sample_index: int = 0,
) -> tuple[Trajectory, ...]:
    return asyncio.run(play_episode(prompt, sample_index, sampling, client=model, seed=0, setup=setup))


def setup_with(
    tokenizer: Any, tools: Sequence[Any], *, max_prompt_tokens: int | None = None, **settings: Any
) -> AgentSetup:
    """A setup with these tools, whatever file they come from."""
    setup = AgentSetup(AgentConfig(), tokenizer, max_prompt_tokens=max_prompt_tokens)
    setup.config = AgentConfig(files=("tools.py",), **settings)
    setup.plugins = {
        name: plugin if name == "tools" else type(plugin)(setup) for name, plugin in setup.plugins.items()
    }
    plugin = tool_plugin(setup)
    plugin._settings = setup.config
    plugin.tools = {tool.name: tool for tool in tools}
    plugin.parser = plugin.find_parser()
    return setup


def tool_plugin(setup: AgentSetup) -> ToolPlugin:
    """The tools of a setup."""
    plugin = setup.plugins["tools"]
    assert isinstance(plugin, ToolPlugin)
    return plugin


def make_session(
    tools: Mapping[str, BaseTool],
    *,
    timeout_s: float = 60.0,
    max_parallel_calls: int = 1,
    images: ImageEncoder | None = None,
) -> ToolSession:
    """Tools of one episode, without a limit on the length of results."""
    limits = ToolLimits(
        max_parallel_calls=max_parallel_calls,
        max_response_tokens=10_000,
        truncation="middle",
        timeout_s=timeout_s,
    )
    return ToolSession(
        tools,
        tools_kwargs={},
        tokenizer=None,
        limits=limits,
        facts={},
        images=images,
        no_images_reason="" if images is not None else "the model takes text alone",
    )
