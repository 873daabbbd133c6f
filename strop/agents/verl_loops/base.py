"""The base class of agent loops in verl's form."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from strop.agents.context import AgentContext
from strop.agents.verl_loops.inputs import refuse
from strop.agents.verl_loops.server import ServerManager
from strop.data.media import refuse_unread


class AgentLoopBase(ABC):
    """Base class of loops in verl's form; a new object per episode.

    A class method `init_class(config, tokenizer, ...)` is called before each, and keeps what it makes itself: loops of
    mid-2025 begin it with `if cls._class_initialized: return`, and make `cls.tools`.
    """

    _class_initialized = False
    tools: Mapping[str, Any] = MappingProxyType({})
    """By name."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        **kwargs: Any,
    ) -> None:
        """Args:
        trainer_config: `.config` has agent, and `actor_rollout_ref.rollout` with lengths and multi_turn; loops of
            mid-2025 give the value under `.config`.
        server_manager: generates.
        tokenizer: of the model.
        processor, dataset_cls, hf_model_type: None here.
        data_config: `.config` has apply_chat_template_kwargs.
        tools: `.tools` has the tools of the row, by name.
        kwargs: from the YAML list of loops.
        """
        self.config = getattr(trainer_config, "config", trainer_config)
        self.rollout_config = self.config["actor_rollout_ref"]["rollout"]
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config if data_config is not None else {}
        if tools is not None:
            self.tools = tools.tools
        self.context: AgentContext = server_manager.context
        self.loop = asyncio.get_running_loop()
        prepare = getattr(type(self), "init_class", None)
        if prepare is not None:
            arguments = {"config": self.config, "tokenizer": tokenizer, "processor": processor, **kwargs}
            prepare(**accepted_arguments(prepare, arguments))

    @abstractmethod
    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """Play one episode: `run(sampling_params, **row)`, or `run(messages, sampling_params)` as of mid-2025.

        Args:
            sampling_params: sampling options of the run.
            messages: the prompt.
            kwargs: the row: raw_prompt, extra_info, index, tools_kwargs, data_source, and its other columns.

        Returns:
            An AgentLoopOutput, a list of them (several training sequences of one episode), or None.
        """

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        audios: Any = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of messages with the header of an answer; without the system prompt, for messages after an answer.

        Args:
            messages: images in them are parts {"type": "image"} of their contents.
            tools: schemas.
            images: as many as parts, in order.
            videos, audios: refused, as parts of messages too.
            remove_system_prompt: as said above.
            kwargs: not used; template variables are those of the run.
        """
        refuse(videos=videos, audio=audios)
        refuse_unread({}, messages, "a conversation of an agent loop")
        if remove_system_prompt:
            return await self.ct_merge_non_assistant_msg([], messages, tools, images)
        return self._with_images(self.context.template.prompt_ids(messages, _schemas(tools)), images)

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The images in the parts of messages, under the key `images`; nothing for messages of text.

        Raises:
            ValueError: a part is something else, or names an image without having it.
        """
        images: list[Any] = []
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type", "text")
                if kind not in ("text", "image"):
                    refuse(**{f"parts of type {kind}": True})
                if kind == "image":
                    if part.get("image") is None:
                        raise ValueError(
                            'a message has a part {"type": "image"} without its image; add it under "image"'
                        )
                    images.append(part["image"])
        return {"images": images} if images else {}

    async def ct_build_initial_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: object = None,
        videos: object = None,
    ) -> list[int]:
        """Token ids of a conversation from its beginning, with the header of an answer."""
        return await self.apply_chat_template(messages, tools, images, videos)

    async def ct_merge_assistant_token(
        self, token_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> list[int]:
        """The tokens so far, with an answer appended as it was sampled."""
        return [*token_ids, *answer_ids]

    async def ct_merge_non_assistant_msg(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: Any = None,
        videos: Any = None,
    ) -> list[int]:
        """The tokens so far, with tool results or user turns appended and the header of the next answer."""
        refuse(videos=videos)
        refuse_unread({}, messages, "a turn of an agent loop")
        names = [str(m.get("name") or "tool") for m in messages if m["role"] == "tool"]
        stop_ids = self.context.stop_ids
        reply = self.context.template.reply(
            messages,
            call_names=names,
            tools=_schemas(tools),
            last_id=token_ids[-1] if token_ids else next(iter(stop_ids)),
            stop_ids=stop_ids,
        )
        return [*token_ids, *self._with_images(reply.token_ids, images)]

    def _with_images(self, token_ids: Sequence[int], images: Sequence[Any] | None) -> list[int]:
        """The ids with as many tokens for each image as stand for it."""
        if not images:
            return list(token_ids)
        media = self.context.read_images(images)
        assert self.context.images is not None, "it has read them"
        return list(self.context.images.expand(token_ids, media))


def _schemas(tools: Sequence[Any] | None) -> list[Mapping[str, Any]]:
    return [tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools or ()]


def accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}
