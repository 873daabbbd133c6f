"""The adapter of agent loops in verl's form.

It turns a class with `async def run(self, sampling_params, **row)` into an agent. The sampled tokens, their
log-probs and policy versions come from the record of its `generate` calls, not from what the loop
returns: a token that its mask trains but that no call sampled at that place is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.verl_loops.base import accepted_arguments
from strop.agents.verl_loops.inputs import row_fields, verl_config
from strop.agents.verl_loops.output import sequence_of
from strop.agents.verl_loops.server import ListTokenizer, ServerManager
from strop.agents.verl_loops.tools import as_of_2025
from strop.algorithms.verl_config import VerlConfig
from strop.protocol.trajectory import Prompt, Trajectory


@dataclass(frozen=True)
class Wrapped:
    """A value that loops of verl find under `.config` or `.tools`."""

    config: VerlConfig | None = None
    tools: object = None


def loop_as_agent(loop: type, **settings: Any) -> Callable[..., Awaitable[list[Trajectory] | None]]:
    """The agent that plays episodes with a loop class.

    Args:
        loop: constructor and `run` as of AgentLoopBase, or of mid-2025: `(config, server_manager, tokenizer)` and
            `run(messages, sampling_params)`.
        settings: further constructor arguments.
    """

    async def play(
        prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
    ) -> list[Trajectory] | None:
        server = ServerManager(generate, context)
        with as_of_2025(_has_early_constructor(loop)):
            agent_loop = _create_loop(loop, server, settings)
            row, params = row_fields(prompt), server.params
            parameters = inspect.signature(agent_loop.run).parameters
            if "messages" in parameters:  # as of mid-2025
                returned = await agent_loop.run(row["raw_prompt"], params)
            else:
                returned = await agent_loop.run(params, **row)
        if returned is None:
            return None
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        return [
            sequence_of(
                output,
                trajectory,
                server.calls,
                max_tokens=context.sampling.max_tokens,
                image_id=None if context.images is None else context.images.token_id,
            )
            for output in outputs
        ]

    return play


def _has_early_constructor(loop: type) -> bool:
    """The class is of mid-2025: it takes `config`, not `trainer_config`."""
    return "config" in inspect.signature(loop).parameters


def _create_loop(loop: type, server: ServerManager, settings: Mapping[str, Any]) -> Any:
    """The loop of one episode."""
    context = server.context
    config = verl_config(context)
    arguments = {
        "processor": None,
        "dataset_cls": None,
        "data_config": Wrapped(config=VerlConfig({"apply_chat_template_kwargs": context.template.options})),
        "hf_model_type": None,
        "tools": Wrapped(tools=dict(context.resources["tools"])),
        "context": context,
    }
    if _has_early_constructor(loop):
        return loop(
            config,
            server,
            ListTokenizer(context.tokenizer),
            **{**accepted_arguments(loop, arguments), **settings},
        )
    return loop(
        trainer_config=Wrapped(config=config),
        server_manager=server,
        tokenizer=context.tokenizer,
        **arguments,
        **settings,
    )


def agent_of_class(value: object) -> Callable[..., Awaitable[list[Trajectory] | None]] | None:
    """The agent of a loop class; None for anything else."""
    if inspect.isclass(value) and inspect.iscoroutinefunction(getattr(value, "run", None)):
        return loop_as_agent(value)
    return None
