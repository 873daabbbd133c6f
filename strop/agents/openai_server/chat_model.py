"""A model of the gateway: its tokenizer, chat template and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.token_bytes import opening_ids
from strop.agents.tools.formats import ToolParser, parser_for_template
from strop.agents.tools.images import ImageEncoder
from strop.agents.tools.parsed_output import AnswerParser
from strop.agents.tools.templates import ChatTemplate
from strop.utils.chat_template.answers import answer_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ChatModel:
    """A model of the gateway: name, tokenizer, chat template, tool calls."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        stop_token_ids: Sequence[int],
        images: ImageEncoder | None = None,
        tool_format: str = "auto",
    ) -> None:
        """Args:
        name: that clients see.
        tokenizer, template, stop_token_ids: of the model.
        images: puts images into token ids; None where the model takes text alone.
        tool_format: format of tool calls, agent.tool_format; auto: as the chat template writes them.

        Raises:
            ValueError: there is no such format.
        """
        self.name, self.tokenizer, self.template = name, tokenizer, template
        self.stop_token_ids = tuple(stop_token_ids)
        self.images = images
        self._parser: AnswerParser | None = None
        self._shows_tools: bool | None = None
        if tool_format != "auto":
            self._parser = ToolParser.get_tool_parser(tool_format, tokenizer)

    def parser(self) -> AnswerParser:
        """Reads tool calls, in the format of the settings or as the chat template writes them.

        Raises:
            ApiError: the settings name no format, and the template writes no calls, or in a form that is not known.
        """
        if self._parser is None:
            try:
                self._parser = parser_for_template(self.template.profile.call_example, self.tokenizer)
            except ValueError as error:
                raise ApiError(400, f"tools: {error}", param="tools", code="unsupported_parameter") from error
        if self._shows_tools is None:
            self._shows_tools = self.template.profile.shows_tools
            if not self._shows_tools:
                logger.warning(
                    "the chat template does not show tool schemas to the model; describe the tools in the system "
                    "message"
                )
        return self._parser

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer writes before a text."""
        return opening_ids(self.tokenizer)

    def text(self, token_ids: Sequence[int]) -> str:
        """The tokens as the text of an answer."""
        return answer_text(self.tokenizer, token_ids)
