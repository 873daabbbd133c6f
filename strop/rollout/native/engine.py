"""The asyncio face of the in-process engine.

Concurrency: everything happens on one event loop. `generate` adds a request and waits for its future; one
driver task steps the batch and gives the loop a turn between steps, so agents and reward workers go on. The
driver ends when no request is left, and starts again with the next one. A failed step fails every request
it held, with the error itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from strop.engines.causal_lm import CausalLM
from strop.protocol.trajectory import media_of
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.request import Request
from strop.rollout.requests import check_request, generate_one_token
from strop.rollout.types import Ability, Memory, OnToken, Sampling, TokenOutput
from strop.utils.machine_limits import device_bytes, free_bytes

HEALTH_TIMEOUT_S = 60.0
"""Within this time a working engine generates one token, even behind a full batch of other requests."""
SMALL_SHARE = 0.1
"""Share of an accelerator's memory that generation may keep while others work ..."""
ROOMY_SHARE = 0.5
"""... as long as so much of it is free."""


class NativeEngine:
    """Generates with the given model's own parameters: no copy, no transfer of weights."""

    def __init__(
        self,
        model: CausalLM,
        *,
        max_running: int,
        version: int = 0,
        deterministic: bool = False,
        records_routing: bool = False,
    ) -> None:
        """Nothing is computed yet.

        Args:
            model: whose parameters generate.
            max_running: sequences decoded together.
            version: policy version that they hold.
            deterministic: each request is computed alone and from its beginning, so that on a CPU neither tokens nor
                log-probs depend, to the bit, on what runs beside or ran before it.
            records_routing: outputs say which experts their tokens went to.

        Raises:
            ValueError: the routing is to be recorded of a model without experts.
        """
        self._batch = DecodeBatch(
            model,
            max_running=1 if deterministic else max_running,
            reuses=not deterministic,
            records_routing=records_routing,
        )
        self._vocab_size = model.vocab_size
        self._media = model.media
        self._max_positions = model.max_positions
        self._version = version
        self._requests: dict[str, Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self._num_checks = 0
        self._running = asyncio.Event()
        self._running.set()

    @property
    def version(self) -> int:
        """Policy version that the parameters hold."""
        return self._version

    @property
    def abilities(self) -> frozenset[Ability]:
        """Optional capabilities of this engine."""
        abilities: frozenset[Ability] = frozenset({"keyed", "continues_stream", "update_in_flight"})
        return abilities if self._media is None else abilities | {"media"}

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
            ValueError: an empty prompt, a token outside the vocabulary, more tokens than the model has positions
                for, an id that is already running, or media that do not fit the tokens or the model.
        """
        prompt = tuple(prompt_ids)
        check_request(request_id, prompt, vocab_size=self._vocab_size, running=self._requests)
        # The last token is never an input.
        if self._max_positions is not None and len(prompt) + sampling.max_tokens - 1 > self._max_positions:
            raise ValueError(
                f"request {request_id} has {len(prompt)} prompt tokens and may generate {sampling.max_tokens}, but "
                f"the model is made for {self._max_positions} positions; lower data.max_prompt_tokens or "
                f"data.max_response_tokens"
            )
        media = media_of(prompt_ids)
        if self._media is not None:
            self._media.check(prompt, media, f"request {request_id}")
        elif media:
            raise ValueError(
                f"request {request_id} has {len(media)} images or videos, but the model takes text alone; use a "
                f"vision-language model"
            )
        future: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        request = Request(request_id, prompt, sampling, media, on_token, future)
        self._requests[request_id] = request
        self._batch.waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        finally:
            if self._requests.pop(request_id, None) is not None and future.cancelled():
                self._batch.remove([request])

    async def set_version(self, version: int) -> None:
        """The shared parameters now hold this policy version.

        Sequences that run go on where they are: the keys and values of their tokens are computed again.

        Raises:
            ValueError: the version goes backwards.
        """
        if version < self._version:
            raise ValueError(f"version {version} was set after version {self._version}; versions only grow")
        self._version = version
        self._batch.put_back()

    async def pause(self) -> None:
        """Hold every request where it is, after the current step."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on after a pause."""
        self._running.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with the tokens they have."""
        names = list(self._requests) if request_ids is None else request_ids
        requests = [self._requests[name] for name in names if name in self._requests]
        self._batch.remove(requests)
        for request in requests:
            request.end("aborted")

    async def flush_cache(self) -> None:
        """Forget computed prompts and sequences that ended; those that run keep what they have."""
        self._batch.prefill.forget()

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the cache's memory back; the next request takes it again.

        Sequences that a pause holds are computed again from their tokens when they go on.

        Raises:
            ValueError: a sequence is running, and not paused; or level 2: the weights are the model's.
        """
        if level != 1:
            raise ValueError(
                f"sleep({level}) of the in-process engine: its weights are those of the model; off-load the model"
            )
        if self._batch.running and self._running.is_set():
            raise ValueError(
                f"{len(self._batch.running)} sequences are running; wait for them, pause or abort them first"
            )
        if self._batch.running:
            self._batch.put_back()
        self._batch.free()

    @property
    def leaves_room(self) -> bool:
        """On an accelerator: it holds a small share of the memory, and most of that is free."""
        device = self._batch.device
        if device.type == "cpu":
            return False
        total = device_bytes(device)
        return self._batch.held_bytes <= SMALL_SHARE * total and free_bytes(device) >= ROOMY_SHARE * total

    async def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """Nothing is to be done: the weights are the model's, and the cache grows with the next request."""

    async def health(self) -> Mapping[str, float]:
        """Generate one token for real, unless paused; numbers about the engine.

        Raises:
            TimeoutError: no token within HEALTH_TIMEOUT_S.
        """
        is_held = not self._running.is_set()
        if not is_held:
            self._num_checks += 1
            name = f"health check {self._num_checks}"

            def late() -> str:
                return (
                    f"the rollout engine made no token within {HEALTH_TIMEOUT_S} s ({len(self._batch.running)} "
                    f"sequences running, {len(self._batch.waiting)} waiting)"
                )

            await generate_one_token(self, name, limit_s=HEALTH_TIMEOUT_S, sentence=late)
        return {
            "version": float(self._version),
            "paused": float(is_held),
            "running": float(len(self._batch.running)),
            "waiting": float(len(self._batch.waiting)),
            "prefilled_tokens": float(self._batch.prefill.num_computed),
            "cached_tokens": float(self._batch.prefill.num_reused),
            "decoded_tokens": float(self._batch.num_decoded),
            "preempted": float(self._batch.num_preempted),
            "cache_bytes": float(self._batch.cache_bytes),
        }

    async def close(self) -> None:
        """End the requests, and give the cache's memory back."""
        await self.abort()
        self._batch.free()

    async def _drive(self) -> None:
        try:
            while not self._batch.is_idle:
                await asyncio.sleep(0)
                await self._running.wait()
                self._batch.step(self._version)
        except Exception as error:  # noqa: BLE001  (handed to every request that waits)
            requests = list(self._requests.values())
            self._batch.remove(requests)
            for request in requests:
                if request.future is not None and not request.future.done():
                    request.future.set_exception(error)
