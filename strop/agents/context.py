"""Context of an agent: the chat template, limits, and the resources of plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from strop.agents.config import AgentConfig
from strop.protocol.trajectory import Media
from strop.rollout.types import OnToken, Sampling, TokenOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.agents.tools.images import ImageEncoder
    from strop.agents.tools.parsed_output import AnswerParser
    from strop.agents.tools.templates import ChatTemplate


ShouldStop = Callable[[int], bool]
"""Called with each token as it is sampled; True once the answer has ended with it."""


class Generate(Protocol):
    """Continue these token ids; random stream, deadline and token budget belong to the episode."""

    async def __call__(
        self,
        token_ids: Sequence[int],
        /,
        *,
        stop_token_ids: Sequence[int] = (),
        max_tokens: int | None = None,
        on_token: OnToken | None = None,
        should_stop: ShouldStop | None = None,
    ) -> TokenOutput:
        """Continuation sampled by the model.

        Args:
            token_ids: everything so far.
            stop_token_ids: tokens that end the answer, besides those of the run.
            max_tokens: most tokens to generate, below the rest of the episode's budget.
            on_token: called with each token as it is sampled.
            should_stop: called with each token, too; the answer ends with the first for which it returns True.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Made for one episode. The resource of a plugin is an attribute under the plugin's name, such as `tools`."""

    config: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    chat: Callable[[], ChatTemplate]
    """Makes `template`."""
    parser: AnswerParser | None
    """Reads calls; None where there is nothing to call."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """Schemas of the tools that the model can call, as the prompt shows them."""
    sampling: Sampling
    """Sampling options of the run; max_tokens is the budget of the whole response."""
    max_prompt_tokens: int
    """Tokens that a prompt of the run may have."""
    deadline: float
    """End of the episode, on the clock of the event loop, in seconds."""
    keep_deadline: Callable[[], None] = lambda: None
    """Called by an agent that ends its episode at the deadline itself, so that the episode counts; each release of a
    tool after that may take agent.tool_timeout_s."""
    images: ImageEncoder | None = None
    """Puts images of an agent into token ids; None where the model takes text alone."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Resources of the episode, by the names of plugins."""

    if not TYPE_CHECKING:  # whose users see a misspelt attribute so

        def __getattr__(self, name: str) -> Any:
            if name != "resources" and name in self.resources:
                return self.resources[name]
            raise AttributeError(f"the context of an agent has no {name!r}")

    @property
    def template(self) -> ChatTemplate:
        """The chat template with the row's variables, for conversations that go on."""
        return self.chat()

    def read_images(self, images: Sequence[Any]) -> list[Media]:
        """Images for the model: encoded bytes, paths of files, or Pillow images.

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
