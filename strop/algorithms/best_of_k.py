"""Quality of a set of answers: pass@k, best@k, worst@k and maj@k, in closed form.

Nothing is resampled, so there is no seed, no noise, and no random state is touched. Two questions differ:

* pass@k, and the vote of k in `vote_at_k`, ask what k fresh samples would reach: k of the n answers without
  replacement, unbiased.
* best@k, worst@k and maj@k describe k draws *with* replacement from the n answers: the exact mean and
  standard deviation of the bootstrap that verl charts. For the best of k this is biased low.

All arithmetic is float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean and standard deviation of a statistic over its draws."""

    mean: float
    std: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of n samples contain one of the c correct ones: 1 - C(n-c, k) / C(n, k).

    Unbiased for the pass rate of k fresh samples.

    Raises:
        ValueError: k is not between 1 and num_samples, or num_correct not between 0 and num_samples.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples are said to be correct: count again")
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be estimated without bias from {num_samples} samples: use a k between 1 and "
            f"{num_samples}, or draw at least {k} samples per prompt"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def best_at_k(values: Sequence[float], k: int) -> Moments:
    """The largest of k draws with replacement: E = sum_i x_(i) ((i/n)^k - ((i-1)/n)^k), x ascending.

    Raises:
        ValueError: no values, a value that is not finite, or k below 1.
    """
    _check_draws(values, k)
    n = len(values)
    weights = [(i / n) ** k - ((i - 1) / n) ** k for i in range(1, n + 1)]
    return _moments(sorted(values), weights)


def worst_at_k(values: Sequence[float], k: int) -> Moments:
    """The smallest of k draws with replacement; the mirror image of `best_at_k`."""
    best_of_negated = best_at_k([-value for value in values], k)
    return Moments(mean=-best_of_negated.mean, std=best_of_negated.std)


def maj_at_k(values: Sequence[float], predictions: Sequence[Hashable], k: int) -> Moments:
    """The value of the majority answer among k draws with replacement.

    The most frequent prediction wins; of tied ones, the one drawn first; its first drawn sample gives the
    value. Draws are exchangeable, so each tied prediction is first equally often, and the sample is uniform
    among those with that prediction: E = sum_c P(c wins) * mean of the values with prediction c.

    Raises:
        ValueError: lengths differ, no values, a value that is not finite, or k below 1.
    """
    _check_draws(values, k)
    if len(values) != len(predictions):
        raise ValueError(f"{len(values)} values and {len(predictions)} predictions: pass one for each sample")
    counts = Counter(predictions)
    win = majority_probabilities(tuple(sorted(counts.values())), k)
    # A sample stands for its prediction with 1/count of that prediction's chance.
    weights = [win[counts[prediction]] / counts[prediction] for prediction in predictions]
    return _moments(values, weights)


def vote_at_k(values: Sequence[float], predictions: Sequence[Hashable], k: int) -> float:
    """The mean value of the majority answer among k of the n samples, over all ways to choose them.

    Unbiased for the vote of k fresh samples, as `pass_at_k` is for the best of them; with k = n it is the vote of all.
    Ties are settled as in `maj_at_k`.

    Raises:
        ValueError: lengths differ, k is not between 1 and n, or a value is not finite.

    Source: the vote: Wang et al. 2022, arXiv:2203.11171.
    """
    _check_draws(values, k)
    if len(values) != len(predictions):
        raise ValueError(f"{len(values)} values and {len(predictions)} predictions: pass one for each sample")
    if k > len(values):
        raise ValueError(
            f"maj@{k} cannot be estimated without bias from {len(values)} samples: draw {k} per prompt"
        )
    counts = Counter(predictions)
    win = majority_probabilities(tuple(sorted(counts.values())), k, replacement=False)
    return math.fsum(
        win[counts[prediction]] / counts[prediction] * value
        for value, prediction in zip(values, predictions, strict=True)
    )


@lru_cache(maxsize=4096)
def majority_probabilities(sizes: tuple[int, ...], k: int, *, replacement: bool = True) -> dict[int, float]:
    """Probability that one given answer wins the vote of k draws, by the number of samples that hold it.

    `sizes` are the numbers of samples per answer, ascending. With m the winner's votes, the other answers
    have at most m, and the winner wins 1/(t+1) of the cases with t ties. Votes of k draws are those of
    independent Poisson(k p_c) variables given their sum k, so the probability is a coefficient of a product
    of polynomials in x (votes so far); y marks ties, and 1/(t+1) is the integral of y^t over [0, 1], which
    Gauss-Legendre nodes give exactly. All terms are positive: no digits cancel. Without replacement the variables are
    binomial, of c's samples each with chance k/n, in place of Poisson.
    """
    repeats = Counter(sizes)
    total = sum(sizes)
    nodes, node_weights, winner_votes = _vote_grid(k)
    draws = _poisson if replacement else _binomial
    votes_of = {size: draws(size, total, k) for size in repeats}
    total_votes_density = float(draws(total, total, k)[k])
    factors = {size: _vote_polynomials(votes_of[size], winner_votes, nodes) for size in repeats}
    rows = torch.arange(len(winner_votes))
    probabilities: dict[int, float] = {}
    for winner in repeats:
        losers = torch.zeros(len(winner_votes), k + 1, dtype=torch.float64)
        losers[:, 0] = 1.0
        for size, repeat in repeats.items():
            power = repeat - (size == winner)
            losers = _multiply(losers, _power(factors[size], power))
        votes = votes_of[winner][winner_votes]
        joint = votes * losers[rows, k - winner_votes] * node_weights
        probabilities[winner] = float(joint.sum()) / total_votes_density
    return probabilities


def _vote_grid(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, their weights and the winner's votes m, for each m in 1..k enough nodes for k // m - 1 ties."""
    nodes, weights, votes = [], [], []
    for m in range(1, k + 1):
        at, weight = _gauss_legendre(max(1, (k // m + 1) // 2))
        nodes.append(at)
        weights.append(weight)
        votes.append(torch.full((len(at),), m))
    return torch.cat(nodes), torch.cat(weights), torch.cat(votes)


def _gauss_legendre(num_nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1], exact up to degree 2 * num_nodes - 1 (Golub and Welsch 1969)."""
    index = torch.arange(1, num_nodes, dtype=torch.float64)
    off_diagonal = index / torch.sqrt(4 * index**2 - 1)
    nodes, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return (nodes + 1) / 2, vectors[0] ** 2


def _vote_polynomials(chances: Tensor, winner_votes: Tensor, nodes: Tensor) -> Tensor:
    """[grid, k+1]: weights of 0..k votes for another answer; y times that of a tie, 0 above the winner."""
    votes = torch.arange(len(chances))
    tie = votes == winner_votes[:, None]
    weights = (votes < winner_votes[:, None]).double() + tie.double() * nodes[:, None]
    return weights * chances


def _poisson(size: int, total: int, k: int) -> Tensor:
    """[k+1]: chances of 0..k votes of `size` of `total` samples, where k votes are expected of all."""
    votes, rate = torch.arange(k + 1, dtype=torch.float64), k * size / total
    return torch.exp(votes * math.log(rate) - rate - torch.lgamma(votes + 1))


def _binomial(size: int, total: int, k: int) -> Tensor:
    """[k+1]: the same where each sample votes once or not at all."""
    votes = torch.arange(k + 1, dtype=torch.float64)
    if k == total:
        return (votes == size).double()
    chance = k / total
    num_without = (size - votes).clamp(min=0)
    ways = torch.lgamma(torch.tensor(size + 1.0, dtype=torch.float64)) - torch.lgamma(votes + 1)
    ways = ways - torch.lgamma(num_without + 1)
    chances = torch.exp(ways + votes * math.log(chance) + num_without * math.log1p(-chance))
    return torch.where(votes <= size, chances, torch.zeros_like(chances))


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Rowwise product of polynomials, cut above degree k: [grid, k+1] each."""
    product = torch.zeros_like(a)
    width = a.shape[1]
    for degree in range(width):
        product[:, degree:] += a[:, : width - degree] * b[:, degree : degree + 1]
    return product


def _power(base: Tensor, exponent: int) -> Tensor:
    result = torch.zeros_like(base)
    result[:, 0] = 1.0
    while exponent:
        if exponent & 1:
            result = _multiply(result, base)
        exponent >>= 1
        if exponent:
            base = _multiply(base, base)
    return result


def _moments(values: Sequence[float], weights: Sequence[float]) -> Moments:
    mean = math.fsum(weight * value for weight, value in zip(weights, values, strict=True))
    variance = math.fsum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    return Moments(mean=mean, std=math.sqrt(variance))


def _check_draws(values: Sequence[float], k: int) -> None:
    if not values or k < 1:
        raise ValueError(f"{k} draws from {len(values)} values: at least one of each is needed")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values must be finite, got {list(values)}; leave failed samples out")
