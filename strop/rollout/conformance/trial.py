"""An engine on trial: what a check gets, what comes of it, and how checks are run.

Concurrency: one asyncio loop for all checks of an engine, as an engine is called in a run. Each check has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from strop.engines.checksum.tensors import digest_tensor
from strop.rollout.conformance.judge import Judge
from strop.rollout.types import Ability, OnToken, RolloutEngine, Sampling, TokenOutput
from strop.rollout.weight_sync.target import WeightTarget

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.05}
"""How far a log-prob may be from that of the full forward pass, in nats, by what the engine computes in: rounding in
other places, on distributions whose log-probs are of size 4. In bfloat16 the mean stays below a sixth of it. Norms of
transformers compute in float32 whatever the model has, so float64 is no closer."""
LONG, LONGEST = 48, 2048
CHECK_LIMIT_S = 120.0
"""Deadline of one check: an engine in a process of its own may compile something first."""

T = TypeVar("T")
Outcome = Literal["ok", "absent", "failed"]


class Breach(Exception):
    """The engine does not keep the contract; the message says which part, and what it did."""


class Absent(Exception):
    """The engine is not able to do this, and need not be; or it cannot be seen from outside."""


def require(is_kept: bool, sentence: str) -> None:
    """Raises Breach with the sentence, unless it is kept."""
    if not is_kept:
        raise Breach(sentence)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine that was started on the judge's model folder, with the folder's weights."""

    engine: RolloutEngine
    target: WeightTarget
    """Where its weights are written."""
    dtype: torch.dtype
    """What it computes in."""
    damage: Callable[[], None] | None = None
    """Makes the engine unable to work from now on, for example by killing its process; None where nothing can."""


Start = Callable[[Path], Coroutine[Any, Any, Subject]]
"""Starts an engine on a model folder; called once for all checks."""


class Trial:
    """What a check works with: the engine, the judge, and requests with ids and random keys of their own."""

    def __init__(self, subject: Subject, judge: Judge) -> None:
        self.engine, self.target, self.judge = subject.engine, subject.target, judge
        self.dtype, self.damage = subject.dtype, subject.damage
        self.tolerance = TOLERANCES[subject.dtype]
        self._num_requests = 0

    @property
    def long(self) -> int:
        """Tokens of a request that is still running when something is done to it: more where the model has room, as an
        engine in a process of its own runs ahead of what is heard of it, by seconds on a busy machine."""
        positions = self.judge.max_positions
        return LONG if positions is None else max(LONG, min(LONGEST, positions // 2))

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids [length]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.judge.vocab_size, (length,), generator=generator).tolist()

    def new_id(self) -> str:
        """An id that no request has."""
        self._num_requests += 1
        return f"conformance-{self._num_requests}"

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
            why: what it is, for the breach.
        """
        running = self.begin(prompt_ids, sampling)
        await running.tokens(1)
        await refused(act(running.request_id), why)
        return await running.task

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling) -> Running:
        """Start a request and go on."""
        return Running(self, prompt_ids, sampling)

    async def number(self, name: str) -> float:
        """One of the engine's numbers.

        Raises:
            Absent: it does not say it.
        """
        numbers = await self.engine.health()
        if name not in numbers:
            raise Absent(f"cannot be seen: health() of this engine says no {name}")
        return numbers[name]

    def compare(self, prompt_ids: Sequence[int], output: TokenOutput, *, temperature: float = 1.0) -> None:
        """The log-probs of an output against the judge's.

        Raises:
            Breach: they are further apart than the tolerance.
        """
        if not output.token_ids:
            return
        whole = self.judge.log_probs(prompt_ids, output.token_ids, temperature=temperature)
        wanted = whole[:-1].gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        apart = (torch.tensor(output.log_probs, dtype=torch.float64) - wanted).abs()
        worst, mean = float(apart.max()), float(apart.mean())
        limit = self.tolerance / 6 if self.dtype == torch.bfloat16 and len(apart) >= 20 else self.tolerance
        require(
            worst <= self.tolerance and mean <= limit,
            f"log-probs are up to {worst:.2g} nats from those of a full forward pass ({mean:.2g} in the mean of "
            f"{len(apart)} tokens at temperature {temperature:g}); {self.dtype} allows {self.tolerance:g}",
        )

    async def load(self, weights: Mapping[str, Tensor] | None = None) -> int:
        """Write weights in place and say so; the new version.

        Args:
            weights: by Hugging Face name; the judge's where one is missing.
        """
        held = self.target.weights_metadata()
        values = {**self.judge.weights([one.name for one in held]), **(weights or {})}
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
            require(not other, f"after loading, {', '.join(other)} does not hold what was written")
        return version


class Running:
    """A request under way, and the tokens that were heard of."""

    def __init__(self, trial: Trial, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self.request_id = trial.new_id()
        self.heard: list[tuple[int, float, int]] = []
        """Id, log-prob and version of each token."""
        self._came = asyncio.Event()
        self.task = asyncio.create_task(
            trial.ask(prompt_ids, sampling, request_id=self.request_id, on_token=self._hear)
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


@dataclass(frozen=True, kw_only=True)
class Check:
    """One rule of the contract."""

    name: str
    needs: Ability | None
    """The ability without which the rule does not hold."""
    run: Callable[[Trial], Awaitable[None]]
    """Raises Breach where the rule is broken."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one check."""

    check: str
    outcome: Outcome
    text: str = ""
    """What is wrong or absent."""
    seconds: float = 0.0


def check(
    name: str, *, needs: Ability | None = None
) -> Callable[[Callable[[Trial], Awaitable[None]]], Check]:
    """Decorator: this function is a check of that name."""
    return lambda run: Check(name=name, needs=needs, run=run)


class Conformance(AbstractContextManager["Conformance"]):
    """One engine on trial, from its start to its end: a context manager that runs checks one by one."""

    def __init__(self, start: Start, folder: Path) -> None:
        """Start the engine, and load the judge.

        Args:
            start: starts the engine.
            folder: the model that both run.
        """
        self._runner = asyncio.Runner()
        try:
            subject = self._runner.run(start(folder))
            self._trial = Trial(subject, Judge(folder, dtype=subject.dtype))
        except BaseException:
            self._runner.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._trial.engine.close())
        finally:
            self._runner.close()

    def run(self, one: Check, *, limit_s: float = CHECK_LIMIT_S) -> Finding:
        """Carry out a check.

        Args:
            one: the check.
            limit_s: its deadline, in seconds.
        """
        if one.needs is not None and one.needs not in self._trial.engine.abilities:
            return Finding(check=one.name, outcome="absent", text=f"not among its abilities: {one.needs}")
        started = time.monotonic()
        outcome: Outcome = "ok"
        text = ""
        try:
            self._runner.run(_bounded(one, self._trial, limit_s))
        except Absent as error:
            outcome, text = "absent", str(error)
        except Exception as error:  # noqa: BLE001  (whatever an engine raises is what the check is to find)
            outcome, text = (
                "failed",
                str(error) if isinstance(error, Breach) else f"{type(error).__name__}: {error}",
            )
        return Finding(check=one.name, outcome=outcome, text=text, seconds=time.monotonic() - started)


async def _bounded(one: Check, trial: Trial, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s) as deadline:
            await one.run(trial)
    except TimeoutError:
        if not deadline.expired():
            raise
        _too_late(limit_s)


def _too_late(limit_s: float) -> NoReturn:
    raise Breach(f"did not end within {limit_s:g} s") from None


async def refused(coroutine: Awaitable[T], why: str) -> str:
    """The sentence with which something was refused.

    Args:
        coroutine: what must raise ValueError.
        why: what it is, for the breach.

    Raises:
        Breach: it was not refused, or without a sentence.
    """
    try:
        await coroutine
    except ValueError as error:
        require(bool(str(error)), f"{why} is refused without a sentence")
        return str(error)
    raise Breach(f"{why} is not refused")
