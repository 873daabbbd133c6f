"""A rollout engine under test: requests with ids of their own, comparison with the reference model, deadlines.

Concurrency: one asyncio loop for all rules of an engine, as an engine is called in a run. Each rule has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest
import torch
from rollout.engine_contract.reference_model import ReferenceModel
from torch import Tensor

from strop.engines.checksum.tensors import digest_tensor
from strop.rollout.types import Ability, OnToken, RolloutEngine, Sampling, TokenOutput
from strop.rollout.weight_sync.target import WeightTarget

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.05}
"""How far a log-prob may be from that of the full forward pass, in nats, by what the engine computes in: rounding in
other places, on distributions whose log-probs are of size 4. In bfloat16 the mean stays below a sixth of it. Norms of
transformers compute in float32 whatever the model has, so float64 is no closer."""
LONG, LONGEST = 48, 2048
RULE_LIMIT_S = 120.0
"""Deadline of one rule: an engine in a process of its own may compile something first."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """An engine that was started on the model folder, with the folder's weights."""

    engine: RolloutEngine
    target: WeightTarget
    """Where its weights are written."""
    dtype: torch.dtype
    """What it computes in."""
    damage: Callable[[], None] | None = None
    """Makes the engine unable to work from now on, for example by killing its process; None where nothing can."""
    damage_text: str = ""
    """Part of what it says from then on."""


Start = Callable[[Path], Coroutine[Any, Any, StartedEngine]]
"""Starts an engine on a model folder; called once for all rules."""


class EngineCase(AbstractContextManager["EngineCase"]):
    """One engine from its start to its end: a context manager that runs rules one by one."""

    def __init__(self, start: Start, folder: Path) -> None:
        """Start the engine, and load the reference model.

        Args:
            start: starts the engine.
            folder: the model that both run, small: the reference computes one sequence at a time.
        """
        self._runner = asyncio.Runner()
        try:
            started = self._runner.run(start(folder))
            self.model = ReferenceModel(folder, dtype=started.dtype)
        except BaseException:
            self._runner.close()
            raise
        self.engine, self.target = started.engine, started.target
        self.dtype, self.damage, self.damage_text = started.dtype, started.damage, started.damage_text
        self.tolerance = TOLERANCES[started.dtype]
        self._num_requests = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self.engine.close())
        finally:
            self._runner.close()

    def check(self, rule: Rule, *, limit_s: float = RULE_LIMIT_S) -> None:
        """Run a rule of the contract, within a deadline in seconds.

        Raises:
            AssertionError: the engine breaks the rule; the message says in which part, and what it did.
            pytest.skip.Exception: the engine is not able to do this, and need not be; or it cannot be seen from
                outside.
        """
        self._runner.run(self._bounded(rule, limit_s))

    async def _bounded(self, rule: Rule, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s) as deadline:
                await rule(self)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise AssertionError(f"did not end within {limit_s:g} s") from None

    def needs(self, ability: Ability) -> None:
        """Skip the rule where the engine does not have the ability."""
        if ability not in self.engine.abilities:
            pytest.skip(f"not among its abilities: {ability}")

    @property
    def long(self) -> int:
        """Tokens of a request that is still running when something is done to it: more where the model has room, as an
        engine in a process of its own runs ahead of what is heard of it, by seconds on a busy machine."""
        positions = self.model.max_positions
        return LONG if positions is None else max(LONG, min(LONGEST, positions // 2))

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids [length]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.model.vocab_size, (length,), generator=generator).tolist()

    def new_id(self) -> str:
        """An id that no request has."""
        self._num_requests += 1
        return f"contract-{self._num_requests}"

    async def ask(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Generate, with an id of its own."""
        return await self.engine.generate(
            request_id or self.new_id(), prompt_ids, sampling, on_token=on_token
        )

    async def ask_all(self, asks: Sequence[tuple[Sequence[int], Sampling]]) -> list[TokenOutput]:
        """All at once; in the order of the requests."""
        return await asyncio.gather(*(self.ask(prompt, sampling) for prompt, sampling in asks))

    async def refused_meanwhile(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        act: Callable[[str], Awaitable[object]],
        why: str,
    ) -> TokenOutput:
        """A request during which something is refused; what the request gave.

        Args:
            prompt_ids, sampling: of the request.
            act: asks, given the id of the request, for what must raise ValueError.
            why: what it is, for the message.
        """
        running = self.begin(prompt_ids, sampling)
        await running.tokens(1)
        await refused(act(running.request_id), why)
        return await running.task

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling) -> Running:
        """Start a request and go on."""
        return Running(self, prompt_ids, sampling)

    async def number(self, name: str) -> float:
        """One of the engine's numbers; the rule is skipped where the engine does not say it."""
        numbers = await self.engine.health()
        if name not in numbers:
            pytest.skip(f"cannot be seen: health() of this engine says no {name}")
        return numbers[name]

    def compare(self, prompt_ids: Sequence[int], output: TokenOutput, *, temperature: float = 1.0) -> None:
        """The log-probs of an output against the reference model's."""
        if not output.token_ids:
            return
        whole = self.model.log_probs(prompt_ids, output.token_ids, temperature=temperature)
        wanted = whole[:-1].gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        apart = (torch.tensor(output.log_probs, dtype=torch.float64) - wanted).abs()
        worst, mean = float(apart.max()), float(apart.mean())
        limit = self.tolerance / 6 if self.dtype == torch.bfloat16 and len(apart) >= 20 else self.tolerance
        is_close = worst <= self.tolerance and mean <= limit
        assert is_close, (
            f"log-probs are up to {worst:.2g} nats from those of a full forward pass ({mean:.2g} in the mean of "
            f"{len(apart)} tokens at temperature {temperature:g}); {self.dtype} allows {self.tolerance:g}"
        )

    async def load(self, weights: Mapping[str, Tensor] | None = None) -> int:
        """Write weights in place and say so; the new version.

        Args:
            weights: by Hugging Face name; the reference model's where one is missing.
        """
        held = self.target.weights_metadata()
        values = {**self.model.weights([one.name for one in held]), **(weights or {})}
        tensors = [(one.name, values[one.name].to(one.dtype)) for one in held]
        await asyncio.to_thread(self.target.load, tensors)
        version = self.engine.version + 1
        await self.engine.set_version(version)
        names = [name for one in held for name in one.names]
        digests = await asyncio.to_thread(self.target.digests, names)
        by_name = dict(tensors)
        for one in held:
            wanted = digest_tensor(by_name[one.name])
            other = [name for name in one.names if digests[name] != wanted]
            assert not other, f"after loading, {', '.join(other)} does not hold what was written"
        return version


class Running:
    """A request under way, and the tokens that were heard of."""

    def __init__(self, case: EngineCase, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self.request_id = case.new_id()
        self.heard: list[tuple[int, float, int]] = []
        """Id, log-prob and version of each token."""
        self._came = asyncio.Event()
        self.task = asyncio.create_task(
            case.ask(prompt_ids, sampling, request_id=self.request_id, on_token=self._hear)
        )

    def _hear(self, token: int, log_prob: float, version: int) -> None:
        self.heard.append((token, log_prob, version))
        self._came.set()

    async def tokens(self, count: int) -> None:
        """Wait until so many tokens came, or the request ended."""
        while len(self.heard) < count and not self.task.done():
            self._came.clear()
            came = asyncio.create_task(self._came.wait())
            await asyncio.wait([self.task, came], return_when=asyncio.FIRST_COMPLETED)
            came.cancel()


Rule = Callable[[EngineCase], Coroutine[Any, Any, None]]
"""One rule of the contract: an async function that asserts."""


async def refused(coroutine: Awaitable[T], why: str) -> str:
    """The sentence with which something was refused.

    Args:
        coroutine: what must raise ValueError.
        why: what it is, for the message.

    Raises:
        AssertionError: it was not refused, or without a sentence.
    """
    try:
        await coroutine
    except ValueError as error:
        sentence = str(error)
    else:
        raise AssertionError(f"{why} is not refused")
    assert sentence, f"{why} is refused without a sentence"
    return sentence
