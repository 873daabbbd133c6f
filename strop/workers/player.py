"""What one process needs to play and score episodes, put together in one place: for training and for evaluation.

Agents with their tools, the sandbox in which tools run programs, the engine's client and the scorers belong together:
a process that left one out would play other episodes than the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.agents.config import AgentConfig
from strop.agents.setup import AgentSetup
from strop.agents.tools.mcp import close_servers
from strop.data.media import tool_images
from strop.engines.causal_lm import CausalLM
from strop.rewards import RewardPool
from strop.rollout.client import RolloutClient
from strop.rollout.types import RolloutEngine
from strop.workers.episodes import Rollouts
from strop.workers.programs import ToolSandbox


class Player:
    """Plays episodes with one engine; `close` ends the programs and servers of its tools."""

    def __init__(
        self,
        engine: RolloutEngine,
        policy: CausalLM,
        tokenizer: Any,
        pool: RewardPool,
        *,
        agent: AgentConfig,
        template_options: Mapping[str, Any],
        timeout_s: float,
        seed: int,
    ) -> None:
        """Load agents and tools, and start the sandbox where a tool runs programs.

        Args:
            engine: generates.
            policy: the model of it, which may read images.
            tokenizer: of the model.
            pool: the scorers; its sandbox settings are those of tools as well.
            agent: agents and tools.
            template_options: variables of the chat template.
            timeout_s: rollout.timeout_s.
            seed: of the run.

        Raises:
            ValueError: a file, tool or format cannot be used.
            SandboxUnavailable: programs cannot be isolated here.
        """
        setup = AgentSetup(
            agent, tokenizer, template_options=template_options, images=tool_images(policy, tokenizer)
        )
        self._programs = ToolSandbox(setup, pool.config.sandbox)
        client = RolloutClient(engine, timeout_s=timeout_s)
        self.rollouts = Rollouts(client, pool, tokenizer, seed=seed, setup=setup)

    def close(self) -> None:
        """End what tools have started; a second call does nothing."""
        self._programs.close()
        close_servers()
