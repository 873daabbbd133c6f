"""Metrics that are added up as tensors: the numbers that reductions of Python numbers would give, read at once."""

from __future__ import annotations

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strop.utils.metrics import Max, Mean, Min, merge_metrics
from strop.utils.tensor_metrics import TensorMetrics

MASK = torch.tensor([True, False, True])


def test_means_over_tokens_divide_by_the_tokens_of_the_whole_batch() -> None:
    metrics = TensorMetrics()
    metrics.add_tokens("a", torch.tensor([1.0, math.nan, 2.5]), MASK, count=5)
    metrics.add_tokens("a", torch.tensor([4.0]), torch.tensor([True]), count=5)
    metrics.add_tokens("a", torch.zeros(0), torch.zeros(0, dtype=torch.bool), count=5)
    assert metrics.read() == {"a": Mean(7.5, 5)}


def test_counts_that_are_tensors_are_added_up() -> None:
    metrics = TensorMetrics()
    metrics.add_mean("a", torch.tensor(6.0), torch.tensor(3))
    metrics.add_mean("a", torch.tensor(1.0), torch.tensor(2))
    metrics.add_mean("b", torch.tensor(1.0), 0)
    metrics.add_mean("b", torch.tensor(2.0), 0)
    assert metrics.read() == {"a": Mean(7.0, 5), "b": Mean(3.0, 0)}


def test_totals_are_added_in_float64() -> None:
    # 2^24 + 1 is no float32.
    metrics = TensorMetrics()
    for value in (2.0**24, 1.0):
        metrics.add_mean("a", torch.tensor(value), 1)
    assert metrics.read() == {"a": Mean(2.0**24 + 1, 1)}


def test_extremes_are_those_under_the_mask_and_never_hide_nan() -> None:
    metrics = TensorMetrics()
    metrics.add_extremes("low", "high", torch.tensor([1.0, 99.0, -2.0]), MASK)
    metrics.add_extremes("low", "high", torch.tensor([0.5]), torch.tensor([True]))
    metrics.add_extremes("low", "high", torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert metrics.read() == {"low": Min(-2.0), "high": Max(1.0)}
    metrics.add_extremes("low", "high", torch.tensor([math.nan]), torch.tensor([True]))
    found = metrics.read()
    assert math.isnan(found["low"].value)
    assert math.isnan(found["high"].value)


def test_no_token_leaves_the_extremes_of_other_parts() -> None:
    metrics = TensorMetrics()
    metrics.add_extremes("low", "high", torch.tensor([3.0]), torch.tensor([False]))
    merged = merge_metrics([metrics.read(), {"low": Min(1.0), "high": Max(2.0)}])
    assert merged == {"low": Min(1.0), "high": Max(2.0)}


def test_nothing_was_measured() -> None:
    assert TensorMetrics().read() == {}


class Operations(TorchDispatchMode):
    """Notes the name of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_adding_fetches_no_number_from_a_tensor() -> None:
    metrics = TensorMetrics()
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with Operations() as seen:
        for _ in range(3):
            metrics.add_tokens("a", values, MASK, count=2)
            metrics.add_mean("b", values.sum(), MASK.sum())
            metrics.add_extremes("low", "high", values, MASK)
    assert "_local_scalar_dense.default" not in seen.names
    assert seen.names.count("amin.default") == 3
    assert metrics.read()["a"] == Mean(12.0, 2)
