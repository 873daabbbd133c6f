"""The bound on micro-batches where memory runs out: errors that are told apart, and the bounds that follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.engines.packing import make_rows, micro_batches
from strop.engines.parallel.ranks import alone
from strop.engines.token_budget import (
    OutOfMemory,
    TokenBudget,
    half_below,
    is_out_of_memory,
    reason_of,
)
from strop.protocol import DataProto

NO_MEMORY = 1 << 55


def error_of(function: object) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        function()  # type: ignore[operator]
    return caught.value


def test_errors_of_real_allocations_are_told_apart_from_others() -> None:
    of_torch = error_of(lambda: torch.empty(NO_MEMORY, dtype=torch.uint8))
    of_numpy = error_of(lambda: np.empty(NO_MEMORY, dtype=np.uint8))
    of_shapes = error_of(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert [is_out_of_memory(error) for error in (of_torch, of_numpy, of_shapes)] == [True, True, False]
    assert reason_of(of_torch).startswith(
        "can't allocate memory: you tried to allocate 36028797018963968 bytes"
    )
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_the_first_sentences_of_a_devices_error_say_what_there_is() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
        "free. Process 7 has 70 GiB in use. See documentation"
    )
    error = torch.OutOfMemoryError(text)
    assert is_out_of_memory(error)
    assert reason_of(error) == text[: text.index(". Process")]


@pytest.mark.parametrize(
    ("value", "tokens", "half"),
    [
        (16384, 16000, 8192),
        (16384, 8193, 8192),
        (16384, 8192, 4096),
        (16384, 3000, 2048),
        (7, 7, 3),
        (1, 1, 1),
    ],
)
def test_a_bound_is_halved_until_it_is_below_what_failed(value: int, tokens: int, half: int) -> None:
    assert half_below(value, tokens) == half


def test_halvings_are_told_once() -> None:
    budget, error = TokenBudget(1000), MemoryError()
    for tokens in (990, 480):
        budget.begin_pass(tokens, 4)
        budget.halve(error)
    assert budget.value == 250
    assert [(h.tokens, h.before, h.after) for h in budget.take_halvings()] == [
        (990, 1000, 500),
        (480, 500, 250),
    ]
    assert budget.take_halvings() == ()


@pytest.mark.parametrize(
    ("tokens", "num_rows"), [(300, 1), (501, 2)], ids=["one row", "rows within one another"]
)
def test_a_row_alone_that_does_not_fit_ends_it_with_the_settings(tokens: int, num_rows: int) -> None:
    budget = TokenBudget(1000)
    budget.begin_pass(900, 3)
    budget.halve(MemoryError())
    budget.begin_pass(tokens, num_rows)
    with pytest.raises(
        OutOfMemory,
        match=f"micro-batch of {tokens} tokens, which is one row and is not cut, so no smaller .*it was 500 by then.*"
        "gradient_checkpointing=true.*MemoryError",
    ):
        budget.halve(MemoryError())


def test_rows_above_the_bound_are_alone_as_far_as_the_setting_goes() -> None:
    def rows(*lengths: int) -> DataProto:
        return make_rows(
            [torch.full((1,), n) for n in range(len(lengths))], [torch.arange(n) for n in lengths]
        )

    cut = micro_batches(rows(9, 3, 4, 2), max_tokens=6, max_row_tokens=9, parallel=alone("cpu"))
    assert cut == [[0], [2, 3], [1]]
    for limits in ({"max_tokens": 6, "max_row_tokens": 8}, {"max_tokens": 8}):
        with pytest.raises(
            ValueError, match="max_tokens_per_device of this role is 8: raise it to at least 9"
        ):
            micro_batches(rows(9, 3), parallel=alone("cpu"), **limits)
