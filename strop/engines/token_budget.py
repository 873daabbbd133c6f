"""The bound on the tokens of a micro-batch (engine.max_tokens_per_device), halved where memory runs out.

Passes over a batch that run out of memory are given up as a whole: their gradients are dropped, the bound is halved
until it is below the tokens of the micro-batch that failed, and they are made again from the beginning. So gradients,
metrics and log-probs are those of passes that began with the smaller bound, to the bit. The bound then stays as it is:
the same batch would fail again in every step.

Several ranks that hold a model together do not go on so. The one that runs out of memory stands between two
collectives, and the others wait for it in the next one: nothing that it could tell them would be heard. Its error ends
the call, and with it the processes; a run begins again from its last checkpoint with half of the bound
(trainer/fault_tolerance/healing.py).
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
    "CUBLAS_STATUS_ALLOC_FAILED",
    "NPU out of memory",
    "could not create a primitive",  # oneDNN, which says no more; memory is the reason that depends on the size
)
"""In the text of errors of torch that have no class of their own."""


class OutOfMemory(RuntimeError):
    """Memory ran out, and no smaller micro-batch helps here; the sentence names the settings that do."""


@dataclass(frozen=True, kw_only=True)
class Halving:
    """A bound that was lowered."""

    tokens: int
    """Packed tokens of the micro-batch that failed."""
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
        self.tokens = 0
        """Packed tokens of the micro-batch that was begun last."""
        self._num_rows = 0
        self._halvings: list[Halving] = []

    def begin_pass(self, tokens: int, num_rows: int) -> None:
        """Note a micro-batch of so many packed tokens and rows."""
        self.tokens, self._num_rows = tokens, num_rows

    def halve(self, error: BaseException) -> None:
        """Lower the bound below the micro-batch that failed with this error.

        Raises:
            OutOfMemory: it was a row alone, or rows of which each begins with the one before, and is not cut.
        """
        before, tokens = self.value, self.tokens
        if self._num_rows == 1 or tokens > before:
            tried = f" (it was {before} by then, for want of memory)" if before < self.setting else ""
            raise OutOfMemory(
                f"memory ran out in a micro-batch of {tokens} tokens, which is one row and is not cut, so no smaller "
                f"engine.max_tokens_per_device of this role helps{tried}: {_ADVICE}; {reason_of(error)}"
            ) from error
        self.value = half_below(before, tokens)
        self._halvings.append(
            Halving(tokens=tokens, before=before, after=self.value, reason=reason_of(error))
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
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if engine.parallel.world_size > 1:
                raise _on_one_rank(engine.budget, error) from error
            engine.budget.halve(error)
        # The error is gone, and with its traceback the tensors of the passes.
        engine.drop_gradients()
        gc.collect()
        if engine.model.device.type != "cpu":
            torch.accelerator.empty_cache()


def _on_one_rank(budget: TokenBudget, error: BaseException) -> OutOfMemory:
    half = half_below(budget.value, budget.tokens or budget.value)
    return OutOfMemory(
        f"memory ran out in a micro-batch of {budget.tokens} tokens on one of several ranks, which the others wait "
        f"for: set engine.max_tokens_per_device of this role to {half} or, as a row is not cut, to as much as the "
        f"longest needs; or {_ADVICE}; {reason_of(error)}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True of an error of an allocation, on an accelerator or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        text == "std::bad_alloc" or any(sentence in text for sentence in _SENTENCES)
    )


def reason_of(error: BaseException) -> str:
    """The first sentences of an error of an allocation: what was asked for, and what the device has."""
    text = str(error).partition("\n")[0]
    if _ON_A_CPU in text:
        text = text[text.index(_ON_A_CPU) + len(_ON_A_CPU) :]
    return ". ".join(text.split(". ")[:3]).rstrip(".") or type(error).__name__
