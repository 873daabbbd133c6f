"""What an agent may use beside its prompt: the chat template, limits, and what kits give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from strop.agents.config import AgentConfig
from strop.protocol.trajectory import Media
from strop.rollout.types import OnToken, Sampling, TokenOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    ) -> TokenOutput:
        """What the model says.

        Args:
            token_ids: everything so far.
            stop_token_ids: tokens that end the answer, besides those of the run.
            max_tokens: most tokens to generate, below what the episode has left.
            on_token: hears of each token as it is sampled.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Made for one episode. What a kit gives it is an attribute under the name of the kit, such as `tools`."""

    config: AgentConfig
    tokenizer: PreTrainedTokenizerBase
    chat: Callable[[], Any]
    """Makes `template`."""
    parser: Any
    """Reads calls, a strop.agents.tools.parsed_output.AnswerParser; None where there is nothing to call."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """Schemas of what the model can call, as the prompt shows them."""
    sampling: Sampling
    """How the run samples; its max_tokens is the budget of the whole response."""
    max_prompt_tokens: int
    """Tokens that a prompt of the run may have."""
    deadline: float
    """When the episode has to end, on the clock of the event loop, in seconds."""
    keep_deadline: Callable[[], None] = lambda: None
    """The agent itself ends what it plays at the deadline, and the episode counts: what it releases after that has the
    time of agent.tool_timeout_s a call."""
    images: Any = None
    """Puts images that an agent comes by into token ids, a strop.agents.tools.images.ImageEncoder; None where the model
    takes text alone."""
    kits: Mapping[str, Any] = field(default_factory=dict)
    """What kits give the episode, by their names."""

    if not TYPE_CHECKING:  # whose users see a misspelt attribute so

        def __getattr__(self, name: str) -> Any:
            if name != "kits" and name in self.kits:
                return self.kits[name]
            raise AttributeError(f"the context of an agent has no {name!r}")

    @property
    def template(self) -> Any:
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
        return bool(self.template.profile.begins_in_thinking)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        extra = () if self.parser is None else self.parser.stop_token_ids
        return frozenset([*self.sampling.stop_token_ids, *extra])
