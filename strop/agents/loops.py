"""Agent loops in the form of the field: classes with `async def run(self, sampling_params, **row)`.

One adapter turns such a class into an agent. Which tokens were sampled, with which log-probs and by which policy
version, comes from the record of its `generate` calls, not from what the loop returns: a token that its mask
trains but that no call sampled at that place is an error.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from strop.agents.context import AgentContext, Generate
from strop.algorithms.user_functions import FieldConfig
from strop.trajectory import NOT_SAMPLED, Prompt, Trajectory
from strop.user_files import load_class


@dataclass
class AgentLoopMetrics:
    """Seconds per activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    """Preemptions by the engine; -1 where it does not count them."""


@dataclass
class AgentLoopOutput:
    """One training sequence of a loop."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for tokens that the model sampled and that are trained."""
    response_logprobs: list[float] | None = None
    """Not needed: those of the engine are used."""
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    """Score of the episode; None has the reward function called."""
    num_turns: int = 0
    """Messages, the prompt counted as one; 0: as many as there were calls of generate, and the prompt."""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """For the reward function, in its extra_info."""
    mm_processor_kwargs: dict[str, Any] | None = None


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


@dataclass(frozen=True)
class _Call:
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]


class ServerManager:
    """Generates for one episode and remembers what it generated."""

    def __init__(self, generate: Generate, context: AgentContext) -> None:
        self._generate = generate
        self._sampling = context.sampling
        self.calls: list[_Call] = []

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

        Raises:
            ValueError: media, or a sampling parameter that differs from the run's where it may not.
        """
        if image_data or video_data or audio_data:
            raise ValueError("agent loops cannot send images, videos or audio to the model; send text")
        limits = self._limits(sampling_params or {})
        output = await self._generate(tuple(prompt_ids), **limits)
        self.calls.append(_Call(tuple(prompt_ids), output.token_ids, output.log_probs, output.versions))
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
    """A value that loops of the field find under `.config` or `.tools`."""

    config: Any = None
    tools: Any = None


class AgentLoopBase(ABC):
    """Base class of loops in the form of the field; a new object per episode."""

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
        """Token ids of messages with the header of an answer; without the system prompt, as what follows an answer."""
        if images or videos:
            raise ValueError("agent loops cannot show images or videos to the model; send text")
        if remove_system_prompt:
            return await self.ct_merge_non_assistant_msg([], messages, tools)
        return list(self.context.template.prompt_ids(messages, _schemas(tools)))

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Images and videos of messages; messages of text have none."""
        for message in messages:
            if isinstance(message.get("content"), list) and any(
                isinstance(part, Mapping) and part.get("type") not in (None, "text")
                for part in message["content"]
            ):
                raise ValueError("agent loops cannot show images or videos to the model; send text")
        return {}

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
        if images or videos:
            raise ValueError("agent loops cannot show images or videos to the model; send text")
        names = [str(m.get("name") or "tool") for m in messages if m["role"] == "tool"]
        stop_ids = self.context.stop_ids
        added = self.context.template.reply_ids(
            messages,
            call_names=names,
            tools=_schemas(tools),
            last_id=token_ids[-1] if token_ids else next(iter(stop_ids)),
            stop_ids=stop_ids,
        )
        return [*token_ids, *added]


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
        trainer_config = field_config(prompt, context)
        made = loop(
            trainer_config=Wrapped(config=trainer_config),
            server_manager=server,
            tokenizer=context.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=Wrapped(config=FieldConfig({"apply_chat_template_kwargs": context.template.options})),
            hf_model_type=None,
            tools=Wrapped(tools=dict(context.tools)),
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
        played = await made.run(params, **row_fields(prompt, context))
        if played is None:
            return None
        outputs = played if isinstance(played, list | tuple) else [played]
        return [
            sequence_of(output, trajectory, server.calls, max_tokens=sampling.max_tokens)
            for output in outputs
        ]

    return play


def field_config(prompt: Prompt, context: AgentContext) -> FieldConfig:
    """The settings of a run that loops of the field read, under its names."""
    config = context.config
    rollout = {
        "response_length": context.sampling.max_tokens,
        "prompt_length": len(prompt.token_ids),
        "multi_turn": {
            "max_assistant_turns": config.max_assistant_turns,
            "max_user_turns": config.max_user_turns,
            "max_parallel_calls": config.max_parallel_calls,
            "max_tool_response_length": config.max_tool_response_tokens,
            "tool_response_truncate_side": config.tool_response_truncation,
            "format": config.tool_format,
        },
    }
    return FieldConfig({"agent": dataclasses.asdict(config), "actor_rollout_ref": {"rollout": rollout}})


def row_fields(prompt: Prompt, context: AgentContext) -> dict[str, Any]:
    """What `run` gets of the row."""
    return {
        **prompt.columns,
        "raw_prompt": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": dict(prompt.extra_info),
        "index": prompt.extra_info.get("index", prompt.row),
        "tools_kwargs": dict(context.tools_kwargs),
        "interaction_kwargs": prompt.extra_info.get("interaction_kwargs", {}),
        "uid": prompt.uid,
        "agent_name": prompt.agent_name,
    }


def sequence_of(
    output: AgentLoopOutput, empty: Trajectory, calls: Sequence[_Call], *, max_tokens: int
) -> Trajectory:
    """The sequence of a loop's output; where the tokens come from is told by the calls of generate.

    Raises:
        ValueError: mask and tokens differ in length, or the mask has a token that was not sampled at that place.
    """
    if len(output.response_ids) != len(output.response_mask):
        raise ValueError(
            f"the agent loop returned {len(output.response_ids)} response_ids and {len(output.response_mask)} "
            f"response_mask; one mask value per token"
        )
    prompt_ids, response_ids = tuple(output.prompt_ids), tuple(output.response_ids)[:max_tokens]
    whole = prompt_ids + response_ids
    log_probs: list[float] = [0.0] * len(whole)
    versions: list[int] = [NOT_SAMPLED] * len(whole)
    for call in calls:
        start = len(call.prompt_ids)
        if whole[:start] != call.prompt_ids:
            continue
        for offset, token in enumerate(call.token_ids):
            if start + offset >= len(whole) or whole[start + offset] != token:
                break
            log_probs[start + offset] = call.log_probs[offset]
            versions[start + offset] = call.versions[offset]
    sampled = [bool(value) for value in output.response_mask[: len(response_ids)]]
    for place, is_trained in enumerate(sampled):
        at = len(prompt_ids) + place
        if is_trained and versions[at] == NOT_SAMPLED:
            raise ValueError(
                f"the agent loop trains response token {place} (id {whole[at]}), but no call of "
                f"server_manager.generate sampled it there: give the mask 0 to tokens that the model did not write, "
                f"and append those that it wrote as they came"
            )
        if not is_trained:
            log_probs[at], versions[at] = 0.0, NOT_SAMPLED
    first = len(prompt_ids)
    metrics = output.metrics
    seconds = metrics if isinstance(metrics, Mapping) else vars(metrics)
    made = Trajectory(
        uid=empty.uid,
        sample_index=empty.sample_index,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        sampled=tuple(sampled),
        log_probs=tuple(log_probs[first:]),
        versions=tuple(versions[first:]),
        num_turns=output.num_turns or len(calls) + 1,
        timings={key: float(seconds.get(key) or 0.0) for key in ("tool_calls", "compute_score")},
        extra={"turn_scores": [], "tool_rewards": [], **output.extra_fields},
        reward_score=None if output.reward_score is None else float(output.reward_score),
    )
    was_cut = len(output.response_ids) > max_tokens
    return made.finish("length" if was_cut else "stop")


def loops_from_yaml(path: str) -> dict[str, Callable[..., Any]]:
    """Agents of a YAML list: name, _target_ (a loop class) and further constructor arguments.

    Raises:
        ValueError: the sentence names the entry.
    """
    try:
        entries = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"agent.loops names {path!r}, which cannot be read: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"agent.loops: {path} must hold a list of loops with name and _target_")
    made: dict[str, Callable[..., Any]] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"agent.loops: entry {number} of {path}"
        if not isinstance(entry, Mapping) or "name" not in entry or "_target_" not in entry:
            raise ValueError(f"{where} needs the keys name and _target_")
        settings = {str(key): value for key, value in entry.items() if key not in ("name", "_target_")}
        made[str(entry["name"])] = loop_as_agent(
            load_class(str(entry["_target_"]), setting=where), **settings
        )
    return made
