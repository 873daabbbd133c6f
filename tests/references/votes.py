"""Statistics of k draws, by listing every outcome."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence


def over_all_draws(n: int, k: int, value_of: Callable[[tuple[int, ...]], float]) -> tuple[float, float]:
    """Mean and standard deviation of `value_of` over all n^k ordered draws with replacement."""
    outcomes = [value_of(draw) for draw in itertools.product(range(n), repeat=k)]
    mean = math.fsum(outcomes) / len(outcomes)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in outcomes) / len(outcomes))


def majority_value(values: Sequence[float], predictions: Sequence[Hashable], draw: tuple[int, ...]) -> float:
    """Value of the first drawn sample that carries the most frequent prediction, first seen wins ties."""
    votes = Counter(predictions[i] for i in draw)
    first = next(i for i in draw if votes[predictions[i]] == max(votes.values()))
    return values[first]


def pass_rate_of_subsets(correct: Sequence[bool], k: int) -> float:
    """Share of the k-subsets that contain a correct sample."""
    subsets = list(itertools.combinations(correct, k))
    return sum(any(subset) for subset in subsets) / len(subsets)
