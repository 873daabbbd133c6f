"""The contract of a rollout engine, kept by SGLang's server in a process of its own.

Concurrency: methods are called on any loop; HTTP is spoken in the background thread of `SglangProcess`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from strop.engines.head import BANNED_LOGIT
from strop.engines.weights import WeightsMetadata
from strop.rollout.replicas.prompt_checks import checked_prompt
from strop.rollout.requests import generate_one_token
from strop.rollout.sglang.config import SglangConfig
from strop.rollout.sglang.environment import sglang_python
from strop.rollout.sglang.process import SglangProcess
from strop.rollout.sglang.target import LOADER, SglangTarget
from strop.rollout.types import Ability, EngineBusy, Memory, OnToken, Sampling, StopReason, TokenOutput
from strop.utils.allocator import fixed_segments
from strop.utils.rng import random_key

HEALTH_TIMEOUT_S = 60.0
"""Within this time a working engine generates one token, even behind a full batch of other requests."""
_REASONS: Mapping[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
_TAGS: Mapping[int, list[str]] = {1: ["kv_cache"], 2: ["kv_cache", "weights"]}


@dataclass(frozen=True, kw_only=True)
class SglangSettings:
    """Settings of an engine."""

    model: str
    """Hugging Face folder: its shape; weights are written into the engine."""
    trust_remote_code: bool
    """Code of the folder may run."""
    dtype: str
    """Compute precision: float32, bfloat16 or float16."""
    vocab_size: int
    """Of the model."""
    max_tokens: int
    """Of the longest sequence, prompt and response."""
    max_running: int
    """Sequences decoded together."""
    unused_tokens: tuple[int, ...] = ()
    """Ids that no text has, and that are never sampled."""
    log: Path
    """File that takes what SGLang prints."""

    def server_args(self, config: SglangConfig) -> dict[str, Any]:
        """Arguments of SGLang's server, by the names of its ServerArgs."""
        return {
            "mem_fraction_static": config.mem_fraction_static,
            "log_level": "warning",
            **config.server_args,
            "model_path": self.model,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "load_format": "dummy",
            "context_length": self.max_tokens,
            "max_running_requests": self.max_running,
            "tp_size": config.tensor_parallel,
            "pp_size": config.pipeline_parallel,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "enable_memory_saver": True,
            "custom_weight_loader": [LOADER],
        }


class SglangEngine:
    """Generates with weights of its own, which `target` takes."""

    abilities: frozenset[Ability] = frozenset({"update_in_flight", "frees_weights"})

    def __init__(
        self, process: SglangProcess, settings: SglangSettings, target: SglangTarget, *, version: int
    ) -> None:
        """Use `start_sglang`."""
        self.target = target
        self._process = process
        self._settings = settings
        self._version = version
        self._running: dict[str, None] = {}
        self._tags: list[str] = []  # of the memory that was given back
        self._is_paused = False
        self._num_checks = itertools.count(1)

    @property
    def pid(self) -> int:
        """Of the process that owns SGLang's, which leads a group of its own."""
        return self._process.pid

    @property
    def version(self) -> int:
        """Policy version that the weights hold."""
        return self._version

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids` until a stop token, `max_tokens`, or an abort.

        Raises:
            ValueError: see `requests.checked_prompt`.
            RuntimeError: SGLang refused it, or gave an answer that cannot be one.
            SglangDied: the server is gone.
        """
        prompt = checked_prompt(
            request_id,
            prompt_ids,
            sampling,
            engine="SGLang",
            vocab_size=self._settings.vocab_size,
            max_tokens=self._settings.max_tokens,
            running=self._running,
        )
        answer = _Answer(self._version)
        if on_token is not None:
            loop, report = asyncio.get_running_loop(), on_token
            answer.hear = lambda *token: loop.call_soon_threadsafe(report, *token)
        body = {
            "rid": request_id,
            "input_ids": prompt,
            "sampling_params": _sampling_params(sampling, self._settings.unused_tokens),
            "return_logprob": True,
            "stream": True,
        }
        self._running[request_id] = None
        try:
            await self._process.stream("generate", body, answer.take)
        finally:
            del self._running[request_id]
        return answer.output(request_id)

    async def set_version(self, version: int) -> None:
        """The weights now hold this policy version; requests that were held while they came go on.

        Raises:
            ValueError: the version goes backwards.
        """
        if version < self._version:
            raise ValueError(f"version {version} was set after version {self._version}; versions only grow")
        if self.target.is_open:
            await self._process.post("end_weight_update", {})
        await self.flush_cache()
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._process.post("update_weight_version", body)
        self._version = version
        if self.target.is_open:
            self.target.is_open = False
            if not self._is_paused:
                await self._continue()

    async def pause(self) -> None:
        """Hold every request where it is."""
        self._is_paused = True
        await self._process.post("pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Go on after a pause."""
        self._is_paused = False
        if not self.target.is_open:  # else they go on with the version that is being written
            await self._continue()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with the tokens they have; ids that do not run are passed over."""
        for name in list(self._running) if request_ids is None else request_ids:
            if name in self._running:
                await self._process.post("abort_request", {"rid": name})

    async def flush_cache(self) -> None:
        """Forget computed prompts. SGLang does not while a request runs; those that new weights hold are no longer."""
        if not self._running or self.target.is_open:
            await self._process.post("flush_cache", {})

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the memory of the cache back (1), or that of the weights too (2).

        Raises:
            EngineBusy: a request is running.
        """
        if self._running:
            raise EngineBusy(f"{len(self._running)} requests are running; wait for them or abort them first")
        if tags := [tag for tag in _TAGS[level] if tag not in self._tags]:
            await self.flush_cache()
            await self._process.post("release_memory_occupation", {"tags": tags})
            self._tags += tags

    async def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """Take the memory again, or a part of it."""
        if taken := [tag for tag in self._tags if tags is None or tag in tags]:
            await self._process.post("resume_memory_occupation", {"tags": taken})
            self._tags = [tag for tag in self._tags if tag not in taken]

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, at temperature 1."""
        body = {
            "rid": f"score {next(self._num_checks)}",
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._process.post("generate", body)
        return [float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]

    async def health(self) -> Mapping[str, float]:
        """Generate one token for real, unless paused or asleep; numbers about the engine.

        Raises:
            TimeoutError: no token within HEALTH_TIMEOUT_S.
            SglangDied: the server is gone.
        """
        if not self._tags and not self._is_paused and not self.target.is_open:
            name = f"health check {next(self._num_checks)}"

            def late() -> str:
                return (
                    f"SGLang made no token within {HEALTH_TIMEOUT_S} s ({len(self._running)} requests running); its "
                    f"log is {self._process.log}"
                )

            await generate_one_token(self, name, limit_s=HEALTH_TIMEOUT_S, sentence=late)
        else:
            await self._process.get("model_info", timeout_s=HEALTH_TIMEOUT_S)
        return {
            "version": float(self._version),
            "paused": float(self._is_paused),
            "running": float(len(self._running)),
        }

    async def close(self) -> None:
        """End the requests and SGLang's processes. A second call does nothing."""
        await asyncio.to_thread(self._process.close)

    async def _continue(self) -> None:
        await self._process.post("continue_generation", {})


@dataclass
class _Answer:
    """Tokens of one request, from the events of its stream."""

    version: int
    """Of the weights when it began, for a server that names none."""
    hear: Callable[[int, float, int], object] | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = ""

    def take(self, event: Mapping[str, Any]) -> None:
        """Read one event. Its log-probs may begin before the tokens that are new."""
        if "error" in event:
            raise RuntimeError(f"SGLang ended the request: {str(event['error'])[:500]}")
        meta = event["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        start = meta.get("output_token_logprobs_length", len(self.tokens) + len(entries)) - len(entries)
        for position, (log_prob, token, *_) in enumerate(entries, start):
            if position < len(self.tokens):
                continue
            version = self._version_at(position, meta)
            self.tokens.append(int(token))
            self.log_probs.append(float(log_prob))
            self.versions.append(version)
            if self.hear is not None:
                self.hear(int(token), float(log_prob), version)
        if meta.get("finish_reason"):
            self.reason = meta["finish_reason"]["type"]
            self.versions = [self._version_at(position, meta) for position in range(len(self.tokens))]
            if meta.get("completion_tokens", len(self.tokens)) != len(self.tokens):
                raise RuntimeError(
                    f"SGLang counts {meta['completion_tokens']} tokens and gave the log-probs of {len(self.tokens)}"
                )

    def _version_at(self, position: int, meta: Mapping[str, Any]) -> int:
        for span in meta.get("weight_versions") or ():
            if span["start"] <= position < span["end"]:
                return _number(span["version"], self.version)
        return _number(meta.get("weight_version"), self.version)

    def output(self, request_id: str) -> TokenOutput:
        """All of it."""
        if self.reason not in _REASONS:
            raise RuntimeError(f"SGLang ended request {request_id} with {self.reason or 'no reason'!r}")
        return TokenOutput(
            token_ids=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            stop_reason=_REASONS[self.reason],
        )


def _number(version: Any, otherwise: int) -> int:
    """Ours are numbers; a server that was not told any says `default`."""
    return int(version) if str(version).isdecimal() else otherwise


async def start_sglang(
    config: SglangConfig, settings: SglangSettings, weights: WeightsMetadata, *, version: int
) -> SglangEngine:
    """An engine in processes of its own, with weights of no meaning until some are written.

    Args:
        config: rollout.sglang.
        settings: what it is made for.
        weights: the weights that it needs.
        version: policy version that these will hold.

    Raises:
        ValueError: there is no such environment.
        SglangDied: the server did not start; the message says why.
    """
    python = sglang_python(config.python)
    # With it set, log-probs are those before the temperature, which a trainer does not have.
    env = {"HF_HUB_OFFLINE": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "false", **fixed_segments(os.environ)}
    process = SglangProcess(python, settings.server_args(config), log=settings.log, env=env)
    try:
        await process.wait(config.start_timeout_s)
        target = SglangTarget(process, weights, num_workers=config.tensor_parallel)
        engine = SglangEngine(process, settings, target, version=version)
        await engine.set_version(version)
    except BaseException:
        await asyncio.to_thread(process.close)
        raise
    return engine


def _sampling_params(sampling: Sampling, never: Sequence[int]) -> dict[str, Any]:
    """In SGLang's words. Its seeds count only in its deterministic mode.

    Its biases of logits enter the log-probs of what is sampled, and not those of prompts.
    """
    biases = {"logit_bias": {str(token): BANNED_LOGIT for token in never}} if never else {}
    return {
        **biases,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": random_key(sampling.key, "sglang", sampling.position) >> 33,
    }
