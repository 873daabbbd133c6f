"""The adapter of agent loops in verl's form.

It turns a class with `async def run(self, sampling_params, **row)` into an agent. Which tokens were sampled, with
which log-probs and by which policy version, comes from the record of its `generate` calls, not from what the loop
returns: a token that its mask trains but that no call sampled at that place is an error.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.algorithms.user_functions import VerlConfig
from strop.compat.agent_loops.inputs import refuse, row_fields, verl_config
from strop.compat.agent_loops.output import Call, sequence_of
from strop.trajectory import Prompt, Trajectory


@dataclass
class LoopTokens:
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float]
    routed_experts: Any = None
    stop_reason: str = "completed"
    """completed (also at the length limit) or aborted."""
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """Generates for one episode and remembers what it generated."""

    def __init__(self, generate: Generate, context: AgentContext) -> None:
        self._generate = generate
        self._sampling, self._context = context.sampling, context
        self.calls: list[Call] = []

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **options: Any,
    ) -> LoopTokens:
        """Continue `prompt_ids`; the id is free, the run has its own.

        Args:
            request_id: any.
            prompt_ids: everything so far, images as `apply_chat_template` writes them.
            sampling_params: see `_limits`.
            image_data: every image so far, in the order of their tokens.
            video_data, audio_data: refused.
            mm_processor_kwargs, options: not used.

        Raises:
            ValueError: videos or audio, images that do not fit the tokens, or a sampling parameter that differs from
                the run's where it may not.
        """
        refuse(videos=video_data, audio=audio_data)
        token_ids: tuple[int, ...] = tuple(prompt_ids)
        if image_data:
            images = self._context.read_images(image_data)
            assert self._context.images is not None, "it has read them"
            token_ids = self._context.images.place(token_ids, images)
        limits = self._limits(sampling_params or {})
        output = await self._generate(token_ids, **limits)
        self.calls.append(Call(token_ids, output.token_ids, output.log_probs, output.versions))
        return LoopTokens(
            token_ids=list(output.token_ids),
            log_probs=list(output.log_probs),
            stop_reason="aborted" if output.stop_reason == "aborted" else "completed",
            extra_fields={"stop_reason": output.stop_reason},
        )

    def _limits(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of generate; sampling itself is that of the run, since the trainer computes with it."""
        own = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k or -1,
            "repetition_penalty": 1.0,
        }
        limits: dict[str, Any] = {}
        for key, value in params.items():
            if key in own:
                same = (own[key], 0) if key == "top_k" and own[key] == -1 else (own[key],)
                if value not in same:
                    raise ValueError(
                        f"sampling_params.{key} is {value}, but the run samples with {own[key]} and the trainer "
                        f"computes log-probs for that; leave it as it was given"
                    )
            elif key in ("max_tokens", "max_new_tokens"):
                limits["max_tokens"] = None if value is None else int(value)
            elif key == "stop_token_ids":
                limits["stop_token_ids"] = tuple(value or ())
            elif key != "logprobs":
                raise ValueError(
                    f"sampling_params has {key!r}; a loop can set max_tokens and stop_token_ids, other settings are "
                    f"those of the run"
                )
        return limits


@dataclass(frozen=True)
class Wrapped:
    """A value that loops of verl find under `.config` or `.tools`."""

    config: Any = None
    tools: Any = None


class AgentLoopBase(ABC):
    """Base class of loops in verl's form; a new object per episode."""

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
        trainer_config: `.config` has agent, and `actor_rollout_ref.rollout` with lengths and multi_turn.
        server_manager: generates.
        tokenizer: of the model.
        processor, dataset_cls, hf_model_type: None here.
        data_config: `.config` has apply_chat_template_kwargs.
        tools: `.tools` has the tools of the row, by name.
        kwargs: `context` (AgentContext), and what the YAML list of loops gives.
        """
        self.config = trainer_config.config
        self.rollout_config = trainer_config.config["actor_rollout_ref"]["rollout"]
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config.config if data_config is not None else {}
        self.tools = {} if tools is None else tools.tools
        self.context: AgentContext = kwargs["context"]

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Play one episode.

        Args:
            sampling_params: how the run samples.
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
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of messages with the header of an answer; without the system prompt, as what follows an answer.

        Args:
            messages: images in them are parts {"type": "image"} of their contents.
            tools: schemas.
            images: as many as parts, in order.
            videos: refused.
            remove_system_prompt: as said above.
            kwargs: not used; template variables are those of the run.
        """
        refuse(videos=videos)
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
        images: Any = None,
        videos: Any = None,
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
        read = self.context.read_images(images)
        assert self.context.images is not None, "it has read them"
        return list(self.context.images.expand(token_ids, read))


def _schemas(tools: Sequence[Any] | None) -> list[Mapping[str, Any]]:
    return [tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools or ()]


def loop_as_agent(loop: type, **settings: Any) -> Callable[..., Awaitable[list[Trajectory] | None]]:
    """The agent that plays episodes with a loop class.

    Args:
        loop: constructor and `run` as of AgentLoopBase.
        settings: further constructor arguments.
    """

    async def play(
        prompt: Prompt, trajectory: Trajectory, generate: Generate, context: AgentContext
    ) -> list[Trajectory] | None:
        sampling = context.sampling
        server = ServerManager(generate, context)
        trainer_config = verl_config(prompt, context)
        made = loop(
            trainer_config=Wrapped(config=trainer_config),
            server_manager=server,
            tokenizer=context.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=Wrapped(config=VerlConfig({"apply_chat_template_kwargs": context.template.options})),
            hf_model_type=None,
            tools=Wrapped(tools=dict(context.kits["tools"])),
            context=context,
            **settings,
        )
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }
        played = await made.run(params, **row_fields(prompt))
        if played is None:
            return None
        outputs = played if isinstance(played, list | tuple) else [played]
        return [
            sequence_of(
                output,
                trajectory,
                server.calls,
                max_tokens=sampling.max_tokens,
                image_id=None if context.images is None else context.images.token_id,
            )
            for output in outputs
        ]

    return play


def agent_of_class(found: object) -> Callable[..., Awaitable[list[Trajectory] | None]] | None:
    """The agent of a loop class; None for anything else."""
    if inspect.isclass(found) and inspect.iscoroutinefunction(getattr(found, "run", None)):
        return loop_as_agent(found)
    return None
