"""The adapter of agent loops in verl's form.

It turns a class with `async def run(self, sampling_params, **row)` into an agent. Which tokens were sampled, with
which log-probs and by which policy version, comes from the record of its `generate` calls, not from what the loop
returns: a token that its mask trains but that no call sampled at that place is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.verl_loops.base import accepted
from strop.agents.verl_loops.inputs import row_fields, verl_config
from strop.agents.verl_loops.output import sequence_of
from strop.agents.verl_loops.server import ListTokenizer, ServerManager
from strop.algorithms.verl_config import VerlConfig
from strop.protocol.trajectory import Prompt, Trajectory


@dataclass(frozen=True)
class Wrapped:
    """A value that loops of verl find under `.config` or `.tools`."""

    config: Any = None
    tools: Any = None


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
        made = _made(loop, server, prompt, settings)
        row, params = row_fields(prompt), server.params
        parameters = inspect.signature(made.run).parameters
        if "messages" in parameters:  # as of mid-2025
            played = await made.run(row["raw_prompt"], params)
        else:
            played = await made.run(params, **row)
        if played is None:
            return None
        outputs = played if isinstance(played, list | tuple) else [played]
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


def _made(loop: type, server: ServerManager, prompt: Prompt, settings: Mapping[str, Any]) -> Any:
    """The loop of one episode."""
    context = server.context
    config = verl_config(context)
    given = {
        "processor": None,
        "dataset_cls": None,
        "data_config": Wrapped(config=VerlConfig({"apply_chat_template_kwargs": context.template.options})),
        "hf_model_type": None,
        "tools": Wrapped(tools=dict(context.kits["tools"])),
        "context": context,
    }
    if "config" in inspect.signature(loop).parameters:  # as of mid-2025
        return loop(config, server, ListTokenizer(context.tokenizer), **{**accepted(loop, given), **settings})
    return loop(
        trainer_config=Wrapped(config=config),
        server_manager=server,
        tokenizer=context.tokenizer,
        **given,
        **settings,
    )


def agent_of_class(found: object) -> Callable[..., Awaitable[list[Trajectory] | None]] | None:
    """The agent of a loop class; None for anything else."""
    if inspect.isclass(found) and inspect.iscoroutinefunction(getattr(found, "run", None)):
        return loop_as_agent(found)
    return None
