"""The contract of a rollout engine, kept by vLLM in a process of its own.

Log-probs are those of the whole distribution at the sampling temperature, as vLLM computes them in float32 from its
logits. Each request has a random stream of its own; a continued one has another from there on.

Concurrency: methods are called on any loop; what they ask is told by `ServerProcess`, which has a thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from strop.controller.worker import FollowerAddress
from strop.engines.multimodal.vl_model import Reader
from strop.engines.weights import WeightsMetadata
from strop.protocol.trajectory import media_of
from strop.rollout.replicas.prompt_checks import checked_prompt
from strop.rollout.requests import generate_one_token
from strop.rollout.types import Ability, EngineBusy, Memory, OnToken, Sampling, StopReason, TokenOutput
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.environment import vllm_python
from strop.rollout.vllm.node_part import NodePart
from strop.rollout.vllm.pictures import SharedPictures
from strop.rollout.vllm.process import ServerProcess
from strop.rollout.vllm.routed import routed_experts
from strop.rollout.vllm.settings import Settings
from strop.rollout.vllm.target import TIMEOUT_S, VllmTarget
from strop.utils.network_interfaces import keep_to_interface
from strop.utils.ports import free_port
from strop.utils.rng import random_key

HEALTH_TIMEOUT_S = 60.0
"""Within this time a working engine generates one token, even behind a full batch of other requests."""
_PARTS: tuple[Memory, ...] = ("weights", "kv_cache")
"""Memory that vLLM gives back at either level, and takes again in this order."""
_REASONS: Mapping[str, StopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


class VllmEngine:
    """Generates with weights of its own, which `target` takes."""

    def __init__(
        self,
        process: ServerProcess,
        facts: Mapping[str, Any],
        weights: WeightsMetadata,
        *,
        version: int,
        reader: Reader | None = None,
        parts: Sequence[NodePart] = (),
        records_routing: bool = False,
    ) -> None:
        """Use `start_vllm`.

        Args:
            process: with an engine that was started.
            facts: what it says of itself.
            weights: the weights that it needs.
            version: of the weights.
            reader: of the model's media; None for a model of text alone.
            parts: on further nodes.
            records_routing: outputs say which experts their tokens went to.
        """
        self._reader = reader
        self.pictures = SharedPictures(reader)
        """Of the media of running requests."""
        self.target = VllmTarget(process, weights, parts)
        self.facts = facts
        self._process, self._parts, self._records_routing = process, parts, records_routing
        self._version = version
        self._running: dict[str, None] = {}
        self._asleep: list[Memory] = []  # parts of the memory that were given back
        self._is_paused = False
        self._num_checks = itertools.count(1)

    @property
    def abilities(self) -> frozenset[Ability]:
        """On a CPU vLLM keeps its memory while it sleeps."""
        abilities: set[Ability] = {"keyed", "update_in_flight"}
        if self._reader is not None:
            abilities.add("media")
        return frozenset(abilities | {"frees_weights"} if self._gives_memory_back else abilities)

    @property
    def pid(self) -> int:
        """Of the process that owns vLLM's, which leads a group of its own."""
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
        """Continue `prompt_ids` until a stop token, `max_tokens`, or an abort; they may be `MediaTokens`.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, more tokens than the engine was made for, an
                id that is already running, or media that do not fit the tokens or the model.
            VllmDied: vLLM's process has ended.
        """
        prompt = checked_prompt(
            request_id,
            prompt_ids,
            sampling,
            engine="vLLM",
            vocab_size=self.facts["vocab_size"],
            max_tokens=self.facts["max_model_len"],
            running=self._running,
            reader=self._reader,
        )
        loop = asyncio.get_running_loop()
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []

        def hear(message: Mapping[str, Any]) -> None:
            tokens.extend(message["tokens"])
            log_probs.extend(message["log_probs"])
            versions.extend([message["version"]] * len(message["tokens"]))
            if on_token is not None:
                for token, log_prob in zip(message["tokens"], message["log_probs"], strict=True):
                    loop.call_soon_threadsafe(on_token, token, log_prob, message["version"])

        self._running[request_id] = None
        options = _sampling_params(sampling)
        try:
            with self.pictures.of(prompt, media_of(prompt_ids)) as pictures:
                ended = await self._process.ask(
                    "generate", hear=hear, id=request_id, prompt=prompt, sampling=options, media=pictures
                )
        except asyncio.CancelledError:
            self._process.tell("abort", ids=[request_id])
            raise
        finally:
            del self._running[request_id]
        if ended["reason"] not in _REASONS:
            raise RuntimeError(
                f"vLLM ended request {request_id} with {ended['reason']!r}; its log is {self._process.log}"
            )
        experts = None
        if self._records_routing and tokens:
            num_read = len(prompt) + len(tokens) - 1
            experts = routed_experts(ended.get("experts"), num_read=num_read, request_id=request_id)
        return TokenOutput(
            token_ids=tuple(tokens),
            log_probs=tuple(log_probs),
            versions=tuple(versions),
            stop_reason=_REASONS[ended["reason"]],
            routed_experts=experts,
        )

    async def set_version(self, version: int) -> None:
        """The weights now hold this policy version; running requests go on with them.

        Raises:
            ValueError: the version goes backwards.
        """
        if version < self._version:
            raise ValueError(f"version {version} was set after version {self._version}; versions only grow")
        await self._process.ask("set_version", timeout_s=TIMEOUT_S, version=version)
        self.target.is_open = False
        self._version = version

    async def pause(self) -> None:
        """Hold every request where it is."""
        self._is_paused = True
        await self._process.ask("pause", timeout_s=TIMEOUT_S)

    async def resume(self) -> None:
        """Go on after a pause."""
        self._is_paused = False
        await self._process.ask("resume", timeout_s=TIMEOUT_S)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with the tokens they have; ids that do not run are passed over."""
        names = self._running if request_ids is None else request_ids
        if running := [name for name in names if name in self._running]:
            await self._process.ask("abort", timeout_s=TIMEOUT_S, ids=running)

    async def flush_cache(self) -> None:
        """Forget computed prompts."""
        await self._process.ask("flush", timeout_s=TIMEOUT_S)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give memory back: that of the cache, with the weights in host memory meanwhile (1), or the weights too (2).
        On a CPU only what is computed is forgotten.

        Raises:
            EngineBusy: a request is running.
            ValueError: level 2 on a CPU.
        """
        if self._running:
            raise EngineBusy(f"{len(self._running)} requests are running; wait for them or abort them first")
        if self._gives_memory_back:
            await self._process.ask("sleep", timeout_s=TIMEOUT_S, level=level)
            self._asleep = list(_PARTS)
        elif level == 2:
            raise ValueError(
                "sleep(2) of vLLM on a CPU: it keeps its weights; end the engine to have their memory"
            )
        else:
            await self.flush_cache()

    async def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """Take the memory again, or a part of it; requests run once all of it is there."""
        if taken := [tag for tag in self._asleep if tags is None or tag in tags]:
            await self._process.ask("wake", timeout_s=TIMEOUT_S, tags=taken)
            self._asleep = [tag for tag in self._asleep if tag not in taken]

    async def log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, at temperature 1."""
        name = f"score {next(self._num_checks)}"
        log_probs: list[float] = await self._process.ask(
            "score", timeout_s=TIMEOUT_S, id=name, ids=list(token_ids)
        )
        return log_probs

    async def health(self) -> Mapping[str, float]:
        """Generate one token for real, unless paused or asleep; numbers about the engine. Behind long prompts a token
        can take longer: vLLM tells its counts after each of its steps, so that counts that change are progress.

        Raises:
            TimeoutError: no answer, or no token and no progress, within HEALTH_TIMEOUT_S.
            VllmDied: vLLM's process has ended.
        """
        if not self._asleep and not self._is_paused:
            name = f"health check {next(self._num_checks)}"

            def late() -> str:
                return (
                    f"vLLM made no token within {HEALTH_TIMEOUT_S} s ({len(self._running)} requests running); its log "
                    f"is {self._process.log}"
                )

            before = await self._counts()
            try:
                await generate_one_token(self, name, limit_s=HEALTH_TIMEOUT_S, sentence=late)
            except TimeoutError:
                if await self._counts() == before:
                    raise
        return {
            "version": float(self._version),
            "paused": float(self._is_paused),
            "running": float(len(self._running)),
            **await self._counts(),
        }

    async def _counts(self) -> dict[str, float]:
        counts: dict[str, float] = await self._process.ask("ping", timeout_s=HEALTH_TIMEOUT_S)
        return counts

    async def close(self) -> None:
        """End the requests and vLLM's processes. A second call does nothing."""
        await asyncio.to_thread(_close, self._process, self._parts)

    @property
    def _gives_memory_back(self) -> bool:
        return bool(self.facts["gives_memory_back"])


async def start_vllm(
    config: VllmConfig,
    settings: Settings,
    weights: WeightsMetadata,
    *,
    version: int,
    followers: Sequence[FollowerAddress] = (),
) -> VllmEngine:
    """An engine in a process of its own, with weights of no meaning until some are written.

    Args:
        config: rollout.vllm.
        settings: what it is made for.
        weights: the weights that it needs.
        version: policy version that these will hold.
        followers: on the further nodes of `settings.nodes`.

    Raises:
        ValueError: vLLM is not installed, or cannot run this model.
        VllmDied, TimeoutError: it did not start; the message says why.
        FollowerLost: a follower is gone.
    """
    port = 0
    if settings.nodes:
        keep_to_interface(settings.nodes[0])
        port = free_port(settings.nodes[0])
    process = ServerProcess(vllm_python(config.python), log=settings.log, env=settings.env())
    parts: list[NodePart] = []
    try:
        for node, follower in enumerate(followers, start=1):
            parts.append(await asyncio.to_thread(NodePart, follower, on_end=process.end_because))
            arguments = settings.engine_args(config, node=node, port=port)
            log = settings.log.with_name(f"{settings.log.stem}-node{node}{settings.log.suffix}")
            await asyncio.to_thread(parts[-1].start, arguments, env=settings.env(node=node), log=log)
        facts = await process.ask(
            "start",
            timeout_s=config.start_timeout_s,
            engine_args=settings.engine_args(config, port=port),
            version=version,
            never=sorted(
                {*settings.unused_tokens, *(settings.reader.token_ids.values() if settings.reader else ())}
            ),
        )
    except BaseException:
        await asyncio.to_thread(_close, process, parts)
        raise
    facts["gives_memory_back"] = facts["device"] != "cpu" and settings.shares_device
    return VllmEngine(
        process,
        facts,
        weights,
        version=version,
        reader=settings.reader,
        parts=parts,
        records_routing=settings.records_routing,
    )


def _close(process: ServerProcess, parts: Sequence[NodePart]) -> None:
    """End an engine on all of its nodes."""
    for part in parts:
        part.close()
    process.close()


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    """In vLLM's words. A seed for each continuation: vLLM cannot begin in the middle of a stream."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "seed": random_key(sampling.key, "vllm", sampling.position) >> 1,
    }
