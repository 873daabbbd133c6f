"""ServerManager of agent loops in verl's form: generates, and records the calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from strop.agents.context import AgentContext, Generate
from strop.agents.verl_loops.inputs import refuse
from strop.agents.verl_loops.output import Call


class LoopTokens(list[int]):
    """Result of `server_manager.generate`: a list of ids for loops of mid-2025, with attributes for later ones.

    `stop_reason` is completed (also at the length limit) or aborted.
    """

    routed_experts: Any = None
    num_preempted: int = -1

    def __init__(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        stop_reason: str,
        extra_fields: dict[str, Any],
    ) -> None:
        super().__init__(token_ids)
        self.log_probs = list(log_probs)
        self.stop_reason = stop_reason
        self.extra_fields = extra_fields

    @property
    def token_ids(self) -> list[int]:
        """The ids alone."""
        return list(self)


class ServerManager:
    """Generates for one episode and records the calls."""

    def __init__(self, generate: Generate, context: AgentContext) -> None:
        self._generate = generate
        self.context = context
        sampling = context.sampling
        self._sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,
        }
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
            images = self.context.read_images(image_data)
            assert self.context.images is not None, "it has read them"
            token_ids = self.context.images.place(token_ids, images)
        limits = self._limits(sampling_params or {})
        output = await self._generate(token_ids, **limits)
        reason = "max_tokens" if output.is_own_limit else output.stop_reason
        self.calls.append(Call(token_ids, output.token_ids, output.log_probs, output.versions, reason))
        stop_reason = "aborted" if output.stop_reason == "aborted" else "completed"
        return LoopTokens(
            output.token_ids, output.log_probs, stop_reason, {"stop_reason": output.stop_reason}
        )

    @property
    def params(self) -> dict[str, Any]:
        """The sampling parameters of the run."""
        return {**self._sampling, "logprobs": True}

    def _limits(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of generate; sampling itself is that of the run, since the trainer computes with it."""
        sampling = self._sampling
        limits: dict[str, Any] = {}
        for key, value in params.items():
            if key in sampling:
                allowed = (sampling[key], 0) if key == "top_k" and sampling[key] == -1 else (sampling[key],)
                if value not in allowed:
                    raise ValueError(
                        f"sampling_params.{key} is {value}, but the run samples with {sampling[key]} and the trainer "
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


class ListTokenizer:
    """A tokenizer whose `apply_chat_template` gives a list of ids, as it did when loops of mid-2025 were written."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """As the tokenizer's own."""
        return self._tokenizer.apply_chat_template(*args, **{"return_dict": False, **kwargs})


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Seconds spent inside, added to `timing_raw[name]`."""
    start = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
