"""Bytes that a rank sends for a collective, by the usual algorithms: in a ring an all-gather of W ranks passes W - 1
parts on, a reduce-scatter as many, an all-reduce both.
"""

from __future__ import annotations


def all_gather(part: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which all have a part of so many bytes and get those of all."""
    return (ranks - 1) * part


def reduce_scatter(part: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which get a part of so many bytes of the sum."""
    return (ranks - 1) * part


def all_reduce(size: float, ranks: int) -> float:
    """Bytes sent by each of the ranks for a sum of so many bytes on all of them."""
    return 2 * (ranks - 1) / ranks * size


def summed(part: float, *, shards: int, copies: int) -> float:
    """Bytes sent by each of the ranks for the sum of gradients, of which each keeps a part of so many bytes: over its
    shards, and over groups of them that hold the same."""
    return reduce_scatter(part, shards) + all_reduce(part, copies)


def all_to_all(size: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which deal so many bytes out evenly."""
    return (ranks - 1) / ranks * size
