"""The asyncio face of the in-process engine.

Concurrency: everything happens on one event loop. `generate` adds a request and waits for its future; one
driver task steps the batch and gives the loop a turn between steps, so agents and reward workers go on. The
driver ends when no request is left, and starts again with the next one. A failed step fails every request
it held, with the error itself, also where its tokens are read for another call.

Where matrices are cut over several ranks (tensor parallelism), each has such an engine and requests of its own, and
all ranks step in the same order over the requests of all of them (rank_group.py): their drivers begin with the first
call of `generate` or `leave`, and end together, when every rank has called `leave`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from strop.engines.causal_lm import CausalLM
from strop.protocol.trajectory import media_of
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.rank_group import Asked, Note, RankFailed, RankGroup, RanksDiffer
from strop.rollout.native.request import Request
from strop.rollout.requests import check_request, generate_one_token
from strop.rollout.types import Ability, EngineBusy, Memory, OnToken, Sampling, TokenOutput
from strop.utils.machine_limits import device_bytes, free_bytes

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 60.0
"""Within this time a working engine generates one token, even behind a full batch of other requests."""
SMALL_SHARE = 0.1
"""Share of an accelerator's memory that generation may keep while others work ..."""
ROOMY_SHARE = 0.5
"""... as long as so much of it is free."""
_IDLE_S = 0.002
"""Between two looks at the other ranks' requests while there are none."""


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
            max_running: sequences decoded together; for each of the ranks that generate together.
            version: policy version that they hold.
            deterministic: each request is computed alone and from its beginning, so that on a CPU neither tokens nor
                log-probs depend, to the bit, on what runs beside or ran before it.
            records_routing: outputs say which experts their tokens went to.

        Raises:
            ValueError: the routing is to be recorded of a model without experts.
        """
        self._ranks = None if model.copy_group is None else RankGroup(model.copy_group)
        if self._ranks is not None:  # each computes its part of every sequence
            max_running *= self._ranks.size
        self._batch = DecodeBatch(
            model,
            max_running=1 if deterministic else max_running,
            reuses=not deterministic,
            records_routing=records_routing,
        )
        self._told: list[Request] = []  # in the note that is under way
        self._asked: list[Request] = []  # the other ranks do not know of these yet
        self._dropped: list[str] = []  # ... nor of the end of these
        self._of_ranks: dict[tuple[int, str], Request] = {}
        self._forgets = self._is_leaving = False
        self._failure = ""
        self._broken: Exception | None = None  # ended the requests of all ranks; until `leave`
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
        if self._broken is not None:
            raise self._broken
        future: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        request = Request(request_id, prompt, sampling, media, on_token, future)
        self._requests[request_id] = request
        (self._batch.waiting if self._ranks is None else self._asked).append(request)
        self._start_driver()
        try:
            return await future
        finally:
            if self._requests.pop(request_id, None) is not None and future.cancelled():
                self._take_out([request])

    def _start_driver(self) -> asyncio.Task[None]:
        if self._driver is None or self._driver.done():
            drive = self._drive() if self._ranks is None else self._drive_together(self._ranks)
            self._driver = asyncio.create_task(drive)
        return self._driver

    def _take_out(self, requests: Sequence[Request]) -> None:
        """Compute these no longer; with other ranks, from the step on before which they hear of it."""
        if self._ranks is None:
            self._read_rest()
            self._batch.remove(requests)
            return
        for request in requests:
            request.on_token = None
            if request in self._asked:
                self._asked.remove(request)
            else:
                self._dropped.append(request.request_id)

    def _read_rest(self) -> None:
        """Read what the last step sampled. An error is that of the step: the requests get it, and the call that reads
        goes on."""
        try:
            self._batch.read_rest()
        except Exception as error:  # noqa: BLE001  (handed to every request that waits)
            self._fail(error)

    async def leave(self, failure: str = "") -> None:
        """This rank's call is over: take part in the others' requests until theirs are. Without other ranks nothing.

        Args:
            failure: why this rank gives up, so that all others do; "" where it does not.

        Raises:
            Exception: a step failed after the requests of this rank had ended; not where another rank gave up.
        """
        if self._ranks is None:
            return
        self._is_leaving, self._failure = True, failure
        try:
            if self._broken is None:  # else nobody is there any more
                await self._start_driver()
            if not failure and self._broken is not None and not isinstance(self._broken, RankFailed):
                raise self._broken
        finally:
            self._is_leaving, self._failure, self._broken = False, "", None
            self._batch.sampled = 0  # after a failure the ranks may have come differently far

    async def set_version(self, version: int) -> None:
        """The shared parameters now hold this policy version.

        Sequences that run go on where they are: the keys and values of their tokens are computed again.

        Raises:
            ValueError: the version goes backwards.
        """
        if version < self._version:
            raise ValueError(f"version {version} was set after version {self._version}; versions only grow")
        self._version = version
        self._read_rest()
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
        self._take_out(requests)
        for request in requests:
            request.end("aborted")

    async def flush_cache(self) -> None:
        """Forget computed prompts and sequences that ended; those that run keep what they have."""
        if self._ranks is None:
            self._batch.prefill.forget()
        self._forgets = True

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give the cache's memory back; the next request takes it again.

        Sequences that a pause holds are computed again from their tokens when they go on.

        Raises:
            EngineBusy: a sequence is running, and not paused.
            ValueError: level 2: the weights are the model's.
        """
        if level != 1:
            raise ValueError(
                f"sleep({level}) of the in-process engine: its weights are those of the model; off-load the model"
            )
        if self._batch.running and self._running.is_set():
            raise EngineBusy(
                f"{len(self._batch.running)} sequences are running; wait for them, pause or abort them first"
            )
        self._read_rest()
        if self._batch.running:
            self._batch.put_back()
        self._batch.free()

    def leaves_room(self, most_held: float = math.inf) -> bool:
        """On an accelerator: it holds a small share of the memory, and most of that is free.

        Args:
            most_held: bytes that the updates leave beside them, where that is known.
        """
        device = self._batch.device
        if device.type == "cpu":
            return False
        total, held = device_bytes(device), self._batch.held_bytes
        return held <= min(SMALL_SHARE * total, most_held) and free_bytes(device) >= ROOMY_SHARE * total

    async def wake_up(self, tags: Sequence[Memory] | None = None) -> None:
        """Take part in the requests of the ranks that generate together, until `leave`: this one may have none of its
        own. Else nothing is to be done: the weights are the model's, and the cache grows with the next request."""
        if self._ranks is not None:
            self._start_driver()

    async def health(self) -> Mapping[str, float]:
        """Generate one token for real, unless paused or together with other ranks, which may not be asked; numbers
        about the engine. Behind long prompts a token can take longer: what is computed of them counts as well.

        Raises:
            TimeoutError: no token within HEALTH_TIMEOUT_S, nor any progress.
        """
        is_held = not self._running.is_set()
        if not is_held and self._ranks is None:
            self._num_checks += 1
            name = f"health check {self._num_checks}"

            def late() -> str:
                return (
                    f"the rollout engine made no token within {HEALTH_TIMEOUT_S} s ({len(self._batch.running)} "
                    f"sequences running, {len(self._batch.waiting)} waiting)"
                )

            computed = self._num_tokens
            try:
                await generate_one_token(self, name, limit_s=HEALTH_TIMEOUT_S, sentence=late)
            except TimeoutError:
                if self._num_tokens == computed:
                    raise
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

    @property
    def _num_tokens(self) -> int:
        """Tokens computed so far, of prompts and of answers."""
        return self._batch.prefill.num_computed + self._batch.num_decoded

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
            self._fail(error)

    async def _drive_together(self, ranks: RankGroup) -> None:
        """As `_drive`, in step with the other ranks, until all leave."""
        try:
            while True:
                note = self._note()
                notes = await asyncio.to_thread(ranks.exchange, note)
                self._heed(notes)
                if all(other.is_done for other in notes):
                    return
                if self._batch.is_idle or all(other.is_done or other.is_held for other in notes):
                    await asyncio.sleep(_IDLE_S)
                else:
                    self._batch.step(self._version)
        except Exception as error:  # noqa: BLE001  (handed to every request that waits)
            self._fail(error)

    def _note(self) -> Note:
        """Note of this rank before the next step."""
        asked = [Asked(one.request_id, one.prompt_ids, one.sampling) for one in self._asked]
        note = Note(
            asked=asked, dropped=tuple(self._dropped), is_done=self._is_leaving,
            is_held=not self._running.is_set(), forgets=self._forgets, failure=self._failure,
            free_bytes=self._batch.free_bytes, sampled=self._batch.sampled,
        )  # fmt: skip
        self._told, self._asked, self._dropped, self._forgets = self._asked, [], [], False
        return note

    def _heed(self, notes: Sequence[Note]) -> None:
        """Do what every rank does before a step.

        Raises:
            RankFailed: one has given up.
            RanksDiffer: they have sampled different tokens.
        """
        assert self._ranks is not None, "there are others"
        if len({note.sampled for note in notes}) > 1:
            raise RanksDiffer(
                f"the {len(notes)} ranks that generate together sampled different tokens: their logits differ by "
                f"rounding. Give them devices of one kind, or use tensor_parallel, where they share logits"
            )
        gone = [
            self._of_ranks[rank, name] for rank, note in enumerate(notes) for name in note.dropped
            if (rank, name) in self._of_ranks
        ]  # fmt: skip
        self._batch.remove(gone)
        for request in gone:
            request.end("aborted")
        here = set(map(id, itertools.chain(self._batch.waiting, self._batch.running)))
        self._of_ranks = {key: request for key, request in self._of_ranks.items() if id(request) in here}
        for rank, note in enumerate(notes):
            new = [Request(asked.request_id, asked.prompt_ids, asked.sampling) for asked in note.asked]
            new = self._told if rank == self._ranks.rank else new
            self._of_ranks |= {(rank, request.request_id): request for request in new}
            self._batch.waiting.extend(new)
        if any(note.forgets for note in notes):
            self._batch.prefill.forget()
        self._batch.use_memory(min(note.free_bytes for note in notes))
        for rank, note in enumerate(notes):
            if note.failure:
                raise RankFailed(
                    f"rank {rank} of the {len(notes)} that generate together gave up: {note.failure}"
                )

    def _fail(self, error: Exception) -> None:
        """Hand an error to every request that waits, and forget those of other ranks."""
        requests = [*self._requests.values(), *self._of_ranks.values()]
        self._batch.clear()
        self._of_ranks.clear()
        self._asked, self._dropped = [], []
        self._broken = error if self._ranks is not None else None
        if self._ranks is not None and not isinstance(error, RankFailed):
            logger.error("generation with other ranks failed on this one: %s", error)
        for request in requests:
            if request.future is not None and not request.future.done():
                request.future.set_exception(error)
