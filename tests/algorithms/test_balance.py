from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engines.parallel.balance import get_seqlen_balanced_partitions, sequence_workload
from strop.trainer.config import even_bounds


def sums(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


def test_even_bounds_by_hand() -> None:
    assert even_bounds(21, 10) == [0, 7, 14, 21]
    assert even_bounds(20, 8) == [0, 7, 14, 20]
    assert even_bounds(16, 8) == [0, 8, 16]
    assert even_bounds(3, 256) == [0, 3]
    assert even_bounds(0, 4) == [0]


@given(st.integers(0, 500), st.integers(1, 60))
def test_even_parts_are_as_few_as_the_limit_allows_and_differ_by_one(count: int, at_most: int) -> None:
    bounds = even_bounds(count, at_most)
    sizes = [after - first for first, after in itertools.pairwise(bounds)]
    assert sum(sizes) == count
    assert len(sizes) == math.ceil(count / at_most)
    assert all(1 <= size <= at_most for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_differencing_by_hand() -> None:
    # 8, 7, 6, 5, 4: 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2. Sums 16 and 14.
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, get_seqlen_balanced_partitions(lengths, 2))) == [14, 16]


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=30), k=st.integers(1, 8))
@settings(max_examples=120, deadline=None)
def test_every_index_once_no_part_empty_and_loads_near(lengths: list[int], k: int) -> None:
    k = min(k, len(lengths))
    parts = get_seqlen_balanced_partitions(lengths, k)
    assert len(parts) == k
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in parts)
    assert parts == sorted(parts, key=lambda part: part[0])
    loads = sums(lengths, parts)
    assert max(loads) - min(loads) <= max(lengths)


def test_the_load_of_a_part_is_bounded_though_no_token_cap_is_promised() -> None:
    # 64 log-normal lengths in ceil(total / 8192) parts sometimes go above 8192: that count promises no
    # cap; what holds is largest <= (total + (k - 1) * longest) / k.
    generator = random.Random(0)
    for _ in range(200):
        lengths = [min(8192, int(generator.lognormvariate(6, 0.8)) + 1) for _ in range(64)]
        k = math.ceil(sum(lengths) / 8192)
        largest = max(sums(lengths, get_seqlen_balanced_partitions(lengths, k)))
        assert largest <= (sum(lengths) + (k - 1) * max(lengths)) / k


def test_workload_counts_attention() -> None:
    assert sequence_workload(0) == 0
    assert sequence_workload(1000) == 24_576_000 + 1_000_000


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match="2 sequences cannot fill 3 partitions"):
        get_seqlen_balanced_partitions([1, 2], 3)
    with pytest.raises(ValueError, match="a sequence has length -1"):
        get_seqlen_balanced_partitions([1, -1], 1)
