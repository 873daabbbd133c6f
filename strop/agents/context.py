"""What an agent may use beside its prompt: tools, the chat template, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from strop.agents.config import AgentConfig
from strop.agents.images import ImageEncoder
from strop.agents.templates import ChatTemplate
from strop.interactions.base import BaseInteraction
from strop.rollout.types import Sampling, TokenOutput
from strop.tools.base import BaseTool
from strop.tools.formats import ToolParser
from strop.tools.session import ToolLimits, ToolSession
from strop.trajectory import Media, Prompt


class Generate(Protocol):
    """Continue these token ids; random stream, deadline and token budget belong to the episode."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        /,
        *,
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
    ) -> TokenOutput:
        """What the model says.

        Args:
            token_ids: everything so far.
            stop_token_ids: tokens that end the answer, besides those of the run.
            max_tokens: most tokens to generate, below what the episode has left.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Made for one episode."""

    config: AgentConfig
    tokenizer: Any
    template: ChatTemplate
    """The chat template with the row's variables."""
    parser: ToolParser | None
    """Reads tool calls; None without tools."""
    tools: Mapping[str, BaseTool]
    """Tools that this row may use, by name."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """Their schemas, as the prompt shows them."""
    tools_kwargs: Mapping[str, Mapping[str, Any]]
    """Per tool of this row: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs."""
    sampling: Sampling
    """How the run samples; its max_tokens is the budget of the whole response."""
    deadline: float
    """When the episode has to end, on the clock of the event loop, in seconds."""
    keep_deadline: Callable[[], None] = lambda: None
    """The agent itself ends what it plays at the deadline, and the episode counts: what it releases after that has the
    time of agent.tool_timeout_s a call."""
    interactions: Mapping[str, BaseInteraction] = field(default_factory=dict)
    """Users that can answer the model, by name."""
    images: ImageEncoder | None = None
    """Puts images of tools into token ids; None where the model takes text alone."""

    def read_images(self, images: Sequence[Any]) -> list[Media]:
        """Images for the model.

        Raises:
            ValueError: the model takes text alone, or one of them cannot be read.
        """
        if self.images is None:
            raise ValueError("the model takes text alone and cannot be shown images; send text")
        return [self.images.read(image) for image in images]

    @property
    def begins_in_thinking(self) -> bool:
        """The prompt opens the thinking of the answer."""
        return self.template.profile.begins_in_thinking

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        extra = () if self.parser is None else self.parser.stop_token_ids
        return frozenset([*self.sampling.stop_token_ids, *extra])

    def tool_session(self, prompt: Prompt, sample_id: str) -> ToolSession:
        """The tools of this episode; use as `async with`, so that they are released whatever happens."""
        return ToolSession(
            self.tools,
            tools_kwargs=self.tools_kwargs,
            tokenizer=self.tokenizer,
            limits=ToolLimits(
                max_parallel_calls=self.config.max_parallel_calls,
                max_response_tokens=self.config.max_tool_response_tokens,
                truncation=self.config.tool_response_truncation,
                timeout_s=self.config.tool_timeout_s,
            ),
            facts={
                "request_id": sample_id,
                "uid": prompt.uid,
                "messages": list(prompt.messages),
                "extra_info": prompt.extra_info,
                "ground_truth": prompt.ground_truth,
            },
            images=self.images,
            why_no_images=self._why_no_images(),
        )

    def _why_no_images(self) -> str:
        """Why the model cannot be shown an image of a tool; empty where it can."""
        if self.images is None:
            return "the model takes text alone"
        if not self.template.shows_images(self.images.token_id):
            return "the chat template of the model writes no images into tool results"
        return ""
