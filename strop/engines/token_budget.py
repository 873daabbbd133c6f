"""The bound on the tokens of a micro-batch (engine.max_tokens_per_device), halved where memory runs out.

Passes over a batch that run out of memory are given up as a whole: their gradients are dropped, the bound is halved
until it is below the tokens of the micro-batch that failed, and they are made again from the beginning. So gradients,
losses and log-probs are those of passes that began with the smaller bound, to the bit; counts of operations and tokens
include the passes that were given up, as the time of the step does. The bound then stays as it is: the same batch would
fail again in every step.

Several ranks that hold a model together do not go on so. The one that runs out of memory stands between two
collectives, and the others wait for it in the next one: nothing that it could tell them would be heard. Its error ends
the call, and with it the processes. Reinforcement learning begins again from its last checkpoint with the bound that
the error names (trainer/fault_tolerance/healing.py); fine-tuning and training on preferences end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from strop.engines.causal_lm import CausalLM
from strop.engines.parallel.ranks import Parallel

T = TypeVar("T")

_ON_A_CPU = "DefaultCPUAllocator: "
_SENTENCES = (
    f"{_ON_A_CPU}can't allocate memory",
    f"{_ON_A_CPU}not enough memory",  # Windows
    "CUDA error: out of memory",  # of what does not go through torch's allocator
    "CUDA driver error: out of memory",  # of its segments that grow
    "Triton Error [CUDA]: out of memory",  # of the code of a kernel, when it is first launched
    "CUBLAS_STATUS_ALLOC_FAILED",
    "NPU out of memory",
)
"""In the text of errors of torch that have no class of their own."""
_WHOLE_TEXTS = ("std::bad_alloc", "could not create a primitive")
"""The second is oneDNN's, which knows the computation that is asked for and has no memory for its code or its scratch
space; of one that it does not know, the text goes on: could not create a primitive descriptor for."""
SMALLER, TOKENS = "smaller", "tokens"
"""Names of facts of an error: the bound to begin again with, and the tokens of the micro-batch that failed."""


class OutOfMemory(RuntimeError):
    """Memory ran out, and this process cannot go on with smaller micro-batches; the sentence names the settings."""

    def __init__(self, sentence: str, *, smaller: int | None = None, tokens: int | None = None) -> None:
        """Args:
        sentence: text of the error.
        smaller: bound with which all ranks may begin again; None: no bound helps.
        tokens: as of `Halving`.
        """
        super().__init__(sentence)
        facts = {SMALLER: smaller, TOKENS: tokens}
        self.facts: dict[str, int] = {name: value for name, value in facts.items() if value is not None}
        """Numbers that reach the controller from a process of its own (`strop.controller.WorkerFailed`)."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """A bound that was lowered."""

    tokens: int | None
    """Packed tokens, on each of the devices that share them, of the micro-batch that failed; None: not packed yet."""
    place: str
    """As of `TokenBudget.place`."""
    before: int
    after: int
    """Bound that the passes held with."""
    reason: str
    """First sentences of the error."""


class TokenBudget:
    """The bound of a role, and how often it was lowered."""

    def __init__(self, setting: int) -> None:
        self.setting = setting
        """engine.max_tokens_per_device."""
        self.value = setting
        """Bound of now; a row above it is a micro-batch by itself."""
        self.tokens: int | None = None
        """Of the micro-batch of now, as of `Halving`."""
        self._num_rows: int | None = None
        self._halvings: list[Halving] = []

    def begin(self) -> None:
        """Note that passes begin, with no micro-batch yet."""
        self._num_rows = self.tokens = None

    def begin_packing(self, num_rows: int) -> None:
        """Note that a micro-batch of so many rows is packed from now on; of several that are there together, most."""
        self._num_rows, self.tokens = num_rows, None

    def begin_pass(self, num_tokens: int, parallel: Parallel) -> None:
        """Note that it is packed, with so many tokens on the ranks that share them."""
        self.tokens = -(-num_tokens // (parallel.sp_size * parallel.cp_size))

    @property
    def place(self) -> str:
        """Words for the micro-batch of now."""
        if self._num_rows is None:
            return "before a micro-batch was packed"
        rows = "one row" if self._num_rows == 1 else f"{self._num_rows} rows"
        if self.tokens is None:
            return f"while a micro-batch of {rows} was packed"
        return f"in a micro-batch of {self.tokens} tokens"

    def smaller(self) -> int | None:
        """Half of the bound, or the half of that, with which the micro-batch of now is cut; None: it is not cut, since
        it is a row alone, or rows of which each begins with the one before."""
        is_alone = self._num_rows is not None and self._num_rows <= 1
        if is_alone or (self.tokens or 0) > self.value or self.value == 1:
            return None
        return half_below(self.value, self.value if self.tokens is None else self.tokens)

    def halve(self, error: BaseException) -> None:
        """Lower the bound below the micro-batch that failed with this error.

        Raises:
            OutOfMemory: it is not cut.
        """
        before, smaller = self.value, self.smaller()
        if smaller is None:
            raise self.row_alone(error) from error
        self.value = smaller
        self._halvings.append(
            Halving(
                tokens=self.tokens, place=self.place, before=before, after=smaller, reason=reason_of(error)
            )
        )

    def row_alone(self, error: BaseException) -> OutOfMemory:
        """Error that the micro-batch of now is too large and is not cut."""
        tried = f" (it was {self.value} by then, for want of memory)" if self.value < self.setting else ""
        what = ", which is one row and is not cut" if self._num_rows else ""
        return OutOfMemory(
            f"memory ran out {self.place}{what}, so no smaller engine.max_tokens_per_device of this role helps"
            f"{tried}: {_ADVICE}; {reason_of(error)}",
            tokens=self.tokens,
        )

    def take_halvings(self) -> tuple[Halving, ...]:
        """Halvings since the last call."""
        taken, self._halvings = tuple(self._halvings), []
        return taken


_ADVICE = (
    "set model.gradient_checkpointing=true, lower data.max_response_tokens (of a fine-tuning sft.data.max_tokens, of "
    "preferences prefer.data.max_tokens), train adapters (model.lora.rank), or use more devices"
)


def half_below(value: int, tokens: int) -> int:
    """Half of a bound, or the half of that, until it is below so many tokens; at least 1."""
    value //= 2
    while value >= max(tokens, 2):
        value //= 2
    return max(value, 1)


class _Engine(Protocol):
    model: CausalLM
    parallel: Parallel
    budget: TokenBudget

    def drop_gradients(self) -> None:
        """As of `strop.engines.training.Engine`."""

    def load_to_device(self) -> None:
        """As of `strop.engines.training.Engine`."""


def within_memory(engine: _Engine, attempt: Callable[[], T]) -> T:
    """The result of passes of an engine over a batch, made again with a smaller bound where memory runs out.

    Args:
        engine: whose gradients, if it has any, all come from the attempt.
        attempt: makes the passes and whatever they add to, from the beginning.

    Raises:
        OutOfMemory: a row alone is too much, or several ranks hold the model.
    """
    engine.load_to_device()  # what memory is too short for here, micro-batches do not change
    while True:
        engine.budget.begin()
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if engine.parallel.world_size > 1:
                raise on_one_rank(engine.budget, error) from error
            engine.budget.halve(error)
        # The error is gone, and with its traceback the tensors of the passes.
        engine.drop_gradients()
        gc.collect()
        if engine.model.device.type != "cpu":
            torch.accelerator.empty_cache()


def on_one_rank(budget: TokenBudget, error: BaseException) -> OutOfMemory:
    """Error of one of several ranks, with the bound that all of them may begin again with."""
    smaller = budget.smaller()
    if smaller is None:
        return budget.row_alone(error)
    return OutOfMemory(
        f"memory ran out {budget.place} on one of several ranks, which the others wait for: set "
        f"engine.max_tokens_per_device of this role to {smaller} or, as a row is not cut, to as much as the longest "
        f"needs; or {_ADVICE}; {reason_of(error)}",
        smaller=smaller,
        tokens=budget.tokens,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True of an error of an allocation, on an accelerator or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        text in _WHOLE_TEXTS or any(sentence in text for sentence in _SENTENCES)
    )


def reason_of(error: BaseException) -> str:
    """The first sentences of an error of an allocation: what was asked for, and what the device has."""
    text = str(error).partition("\n")[0]
    if _ON_A_CPU in text:
        text = text[text.index(_ON_A_CPU) + len(_ON_A_CPU) :]
    return ". ".join(text.split(". ")[:3]).rstrip(".") or type(error).__name__
