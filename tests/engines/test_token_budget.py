"""The bound on micro-batches where memory runs out: errors that are told apart, and the bounds that follow."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from strop.engines.packing import make_rows, micro_batches
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.token_budget import (
    OutOfMemory,
    TokenBudget,
    half_below,
    is_out_of_memory,
    on_one_rank,
    reason_of,
)
from strop.protocol import DataProto

NO_MEMORY = 1 << 55
ALONE = alone("cpu")


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


def test_onednn_says_want_of_memory_and_of_an_implementation_differently() -> None:
    """Both texts are those of oneDNN in torch 2.13: under RLIMIT_AS, and of kinds that it does not compute."""
    no_kind = "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable"
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(RuntimeError(no_kind))


def test_the_first_sentences_of_a_devices_error_say_what_there_is() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
        "free. Process 7 has 70 GiB in use. See documentation"
    )
    error = torch.OutOfMemoryError(text)
    assert is_out_of_memory(error)
    assert reason_of(error) == text[: text.index(". Process")]


@pytest.mark.parametrize("caller", ["CUDA error", "CUDA driver error", "Triton Error [CUDA]"])
def test_the_driver_tells_each_caller_of_want_of_memory(caller: str) -> None:
    assert is_out_of_memory(RuntimeError(f"{caller}: out of memory"))
    assert not is_out_of_memory(RuntimeError(f"{caller}: invalid argument"))


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


def begin(budget: TokenBudget, tokens: int, num_rows: int, parallel: Parallel = ALONE) -> None:
    budget.begin()
    budget.begin_packing(num_rows)
    budget.begin_pass(tokens, parallel)


def test_what_is_not_packed_yet_halves_once_whatever_came_before() -> None:
    budget = TokenBudget(1000)
    begin(budget, 1, 1)
    budget.begin()
    budget.halve(MemoryError())
    budget.begin_packing(3)
    budget.halve(MemoryError())
    assert [(h.after, h.tokens, h.place) for h in budget.take_halvings()] == [
        (500, None, "before a micro-batch was packed"),
        (250, None, "while a micro-batch of 3 rows was packed"),
    ]
    budget.begin_packing(1)
    with pytest.raises(
        OutOfMemory, match="while a micro-batch of one row was packed, which is one row and is not"
    ):
        budget.halve(MemoryError())


def test_halving_what_is_never_packed_comes_to_an_end() -> None:
    budget = TokenBudget(4)
    for _ in range(2):
        budget.halve(MemoryError())
    with pytest.raises(
        OutOfMemory, match="before a micro-batch was packed, so no smaller .*it was 1 by then"
    ):
        budget.halve(MemoryError())


def test_one_of_several_ranks_names_the_bound_that_cuts_what_failed() -> None:
    """The sentence and the numbers for the controller are one; ranks that share a sequence share its tokens."""
    shared = dataclasses.replace(ALONE, sp_size=2, cp_size=2)
    for tokens, num_rows, parallel, facts in [
        (3000, 5, ALONE, {"smaller": 2048, "tokens": 3000}),
        (30_000, 5, shared, {"smaller": 4096, "tokens": 7500}),
        (60_000, 5, shared, {"smaller": 8192, "tokens": 15_000}),
        (3000, 1, ALONE, {"tokens": 3000}),
        (1, 0, ALONE, {"tokens": 1}),
    ]:
        budget = TokenBudget(16384)
        begin(budget, tokens, num_rows, parallel)
        error = on_one_rank(budget, MemoryError())
        assert error.facts == facts
        assert f"in a micro-batch of {facts['tokens']} tokens" in str(error)
        assert (f"max_tokens_per_device of this role to {facts.get('smaller')} or" in str(error)) == (
            "smaller" in facts
        )
        assert pickle.loads(pickle.dumps(error)).facts == error.facts


def test_one_of_several_ranks_that_has_not_packed_names_no_tokens() -> None:
    budget = TokenBudget(16384)
    budget.begin()
    assert on_one_rank(budget, MemoryError()).facts == {"smaller": 8192}


def test_halvings_are_told_once() -> None:
    budget, error = TokenBudget(1000), MemoryError()
    for tokens in (990, 480):
        begin(budget, tokens, 4)
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
    begin(budget, 900, 3)
    budget.halve(MemoryError())
    begin(budget, tokens, num_rows)
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
