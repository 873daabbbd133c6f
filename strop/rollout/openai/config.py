"""Settings of a remote server with OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from strop.config.sections import section
from strop.utils.call_limits import CallLimits, check_address


@section("rollout.openai")
class OpenAIConfig(CallLimits):
    base_url: str = ""
    """Address up to and without /chat/completions, such as https://api.openai.com/v1."""
    model: str = ""
    """Name of the model on that server."""
    api: Literal["chat", "completions"] = "chat"
    """chat: messages and tools go to /chat/completions. completions: token ids of the tokenizer of MODEL_OR_RUN go to
    /completions, for a server of that very model which takes them, such as vLLM or `strop serve`."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as {reasoning_effort: low}; null takes one away: {max_tokens: null}."""

    def check(self) -> None:
        """Refuse settings with which nothing can be asked.

        Raises:
            ValueError: no address, or no model.
        """
        if not self.base_url:
            raise ValueError(
                "rollout.engine=openai needs an address: set rollout.openai.base_url, such as "
                "https://api.openai.com/v1"
            )
        check_address("rollout.openai.base_url", self.base_url)
        if not self.model:
            raise ValueError("rollout.openai.model is empty; name the model that the server at base_url has")

    @property
    def takes_token_ids(self) -> bool:
        """See strop.rollout.config.RemoteModel."""
        return self.api == "completions"

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Addresses that are contacted (strop.config.sections)."""
        if self.base_url:
            secret = f" and your {self.api_key_env}" if self.api_key_env else ""
            yield "base_url", f"{self.base_url} (gets the prompts{secret})", ""
