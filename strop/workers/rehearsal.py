"""Rehearsal of an update: random rows as long as they may be, and the time and memory that their passes take."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.kinds import TrainableEngine
from strop.engines.packing import make_rows
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.protocol import DataProto
from strop.utils.machine_limits import device_bytes

Group = tuple[int, tuple[int, ...]]
"""Tokens of a prompt, and of the responses to it."""
SEED = 0
"""Of the random tokens; nothing else is drawn from their generator."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Passes of one rank, as they went."""

    num_micro_batches: int
    """Asked by the loss: on a pipeline stage without the head, 1."""
    tokens: int
    """Packed tokens of the largest of them."""
    seconds: float
    peak_bytes: int | None
    """Most memory of tensors on the accelerator meanwhile; on a CPU most of the process so far, None where the system
    does not say."""
    total_bytes: int | None
    """All memory of the accelerator; None of a CPU."""


def rehearsed(
    engine: TrainableEngine, groups: Sequence[Group], loss: Callable[[Tokens], Tensor]
) -> Rehearsal:
    """Forward and backward passes of an engine over rows of these lengths, which leave nothing behind but the bound on
    micro-batches, where memory was too short for the old one.

    Raises:
        OutOfMemory: as `within_memory`.
    """
    data, device = random_rows(groups, engine.model), engine.model.device
    is_accelerator = device.type != "cpu"

    def attempt() -> Rehearsal:
        sizes: list[int] = []

        def noted(tokens: Tokens) -> Tensor:
            sizes.append(tokens.num_tokens)
            return loss(tokens)

        if is_accelerator:
            torch.accelerator.reset_peak_memory_stats(device)
        start = time.perf_counter()
        engine.accumulate(data, noted)
        if is_accelerator:
            torch.accelerator.synchronize(device)
        return Rehearsal(
            num_micro_batches=len(sizes),
            tokens=max(sizes),
            seconds=time.perf_counter() - start,
            peak_bytes=torch.accelerator.max_memory_allocated(device) if is_accelerator else process_peak(),
            total_bytes=device_bytes(device) if is_accelerator else None,
        )

    with _leaving_nothing(engine):
        found = within_memory(engine, attempt)
    if is_accelerator:  # metrics are of the run, and generation takes what was held
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    return found


@contextlib.contextmanager
def _leaving_nothing(engine: TrainableEngine) -> Iterator[None]:
    """Passes inside leave neither gradients nor counts."""
    counts = copy.copy(engine.counts)
    try:
        yield
    finally:
        engine.drop_gradients()
        engine.counts = counts


def random_rows(groups: Sequence[Group], model: CausalLM) -> DataProto:
    """Rows of random tokens that a text can have; those of a group begin with the same prompt.

    The settings allow longer prompts than the model has positions for where no prompt is as long: they are cut.
    """
    never, size = set(model.never_sampled), int(model.config.get_text_config().vocab_size)
    ordinary = torch.tensor([token for token in range(size) if token not in never])
    generator = torch.Generator().manual_seed(SEED)

    def tokens(count: int) -> Tensor:
        return ordinary[torch.randint(len(ordinary), (count,), generator=generator)]

    prompts: list[Tensor] = []
    responses: list[Tensor] = []
    for prompt_length, response_lengths in groups:
        if model.max_positions is not None:
            prompt_length = max(1, min(prompt_length, model.max_positions + 1 - max(response_lengths)))
        prompts += [tokens(prompt_length)] * len(response_lengths)
        responses += [tokens(length) for length in response_lengths]
    return make_rows(prompts, responses)


def process_peak(status: Path = Path("/proc/self/status")) -> int | None:
    """Most memory of this process so far; None where the system does not say."""
    if not status.is_file():
        return None
    facts = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    most = facts.get("VmHWM", "").split()
    return 1024 * int(most[0]) if most else None
