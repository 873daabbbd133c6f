"""The tree of rows that begin alike: what several of them share is one run of tokens.

A row is the tokens that a model reads of it: its prompt, and its response but for the last token. Rows share what they
have in common from the beginning: the prompt of a group, the turns before in an episode, the way to a fork of a search.

    a: 1 2 3 4 5        1 2 | 3 4 5      nodes: [1 2], and below it [3 4 5] and [7 8 9]
    b: 1 2 7 8          1 2 | 7 8        b ends within a node: whatever goes on behind it, there is no other way from
    c: 1 2 7 8 9        1 2 | 7 8 9      there, and the node is not cut

A medium is shared whole or not at all, and the first few tokens of different prompts are not shared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strop.protocol.trajectory import Media

MIN_SHARED = 8
"""Fewest tokens at the beginning of different prompts that are computed once: more than the 3 to 6 of a chat template's
header. From 16 on, a pass over 16 rows of 128 tokens takes a tenth less time on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row as a model reads it."""

    prompt: Tensor
    """[P] token ids."""
    response: Tensor
    """[R] token ids, the last of which predicts nothing and is not read."""
    media: tuple[Media, ...] = ()
    """Images and videos of both, in order."""
    experts: Tensor | None = None
    """[T, L k], experts that its tokens are to go to, with T = P + R - 1; None: the routers choose."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """[T] token ids."""
        return np.concatenate([self.prompt.numpy(), self.response.numpy()[:-1]])


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of tokens that one or several rows have in common, behind the same tokens."""

    row: int
    """One of these rows."""
    start: int
    """Place of its first token in the row."""
    end: int
    parent: int | None
    """Node of the tokens before; None at the beginning of rows."""

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Trees of rows, each token of which is there once for the rows that are joined up to it."""

    nodes: tuple[Node, ...]
    """Each before what continues it, which follows at once: children in the order of their first rows."""
    last: tuple[int, ...]
    """Of each row, the node that it ends in, at its end or before."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(map(len, self.nodes))


def prefix_tree(rows: Sequence[Row]) -> PrefixTree:
    """The tree of these rows, with rows numbered as they are given.

    Tokens are the same where their ids are, the media that they stand for, and the experts that they are to go to.
    """
    keys = _keys(rows)
    lengths = [len(row) for row in rows]
    texts = [key.tobytes() for key in keys]
    order = sorted(range(len(rows)), key=texts.__getitem__)  # equal ones stay in the order of their numbers
    ways = [
        [row] for row in order[:1]
    ]  # rows that lie on one way from a root to a leaf, the longest one last
    forks: list[int] = []  # tokens that each way has in common with the next one
    for before, row in itertools.pairwise(order):
        if texts[row].startswith(texts[before]):
            ways[-1].append(row)
        else:
            ways.append([row])
            forks.append(_num_shared(rows[before].media, keys[before], keys[row]))
    return _tree(lengths, [row.prompt.shape[0] for row in rows], ways, forks)


def _tree(
    lengths: Sequence[int], prompts: Sequence[int], ways: Sequence[Sequence[int]], forks: Sequence[int]
) -> PrefixTree:
    """The tree of neighbouring ways, with a node wherever some of them part; tokens of rows, and of their prompts."""
    nodes: list[Node] = []
    last = [0] * len(lengths)
    waiting: list[tuple[range, int, int | None]] = [(range(len(ways)), 0, None)]
    while waiting:
        some, start, parent = waiting.pop()
        if not some:
            continue
        row = ways[some[0]][-1]
        if len(some) == 1:
            if lengths[row] > start:
                nodes.append(Node(row=row, start=start, end=lengths[row], parent=parent))
                parent = len(nodes) - 1
            for row in ways[some[0]]:
                last[row] = _holder(nodes, parent, lengths[row] - 1)
            continue
        fork = min(forks[some.start : some.stop - 1])
        joined = (prompts[row] for way in some for row in ways[way])
        end = fork if _is_worth_sharing(joined, fork) else start
        if end > start:
            nodes.append(Node(row=row, start=start, end=end, parent=parent))
            parent = len(nodes) - 1
        cuts = [some.start, *(way + 1 for way in some[:-1] if forks[way] == fork), some.stop]
        parts = {}
        for part in itertools.starmap(range, itertools.pairwise(cuts)):
            first = min([row for way in part for row in ways[way] if lengths[row] > end])
            parts[first] = part
        waiting += [(parts[first], end, parent) for first in sorted(parts, reverse=True)]
    return PrefixTree(nodes=tuple(nodes), last=tuple(last))


def _is_worth_sharing(prompts: Iterable[int], num_tokens: int) -> bool:
    """True where rows with prompts of these lengths are to be joined by so many first tokens.

    A chat template begins all prompts alike. As a node of its own, its few tokens would give every row keys to gather
    and a mask, where it has none by itself. The prompt of a group is shared however short it is.

    Some of the rows are joined wherever all of them are: a part of a tree is never larger than its cut has it.
    """
    return num_tokens >= MIN_SHARED or all(length <= num_tokens for length in prompts)


def _holder(nodes: Sequence[Node], node: int | None, place: int) -> int:
    """This node, or the one before it that holds a place in its rows."""
    while node is not None and nodes[node].start > place:
        node = nodes[node].parent
    assert node is not None, "a row has a token"
    return node


def _keys(rows: Sequence[Row]) -> list[NDArray[Any]]:
    """[T] of each row, or [T, C] with experts: numbers that are equal where tokens are, ids and for media one below 0;
    experts behind."""
    numbers: dict[tuple[str, int], int] = {}
    keys: list[NDArray[Any]] = []
    for row in rows:
        ids = row.ids
        if row.media:
            ids = ids.copy()
            for medium in row.media:
                number = numbers.setdefault((medium.key, medium.num_tokens), -1 - len(numbers))
                ids[slice(*medium.span)] = number
        if row.experts is None:
            keys.append(ids)
        else:
            experts = row.experts.numpy()
            keys.append(np.hstack([ids.view(experts.dtype).reshape(len(ids), -1), experts]))
    return keys


def _num_shared(media: Sequence[Media], one: NDArray[Any], other: NDArray[Any]) -> int:
    """Tokens that two rows which part have in common from their beginning; of a medium in which they part, none.

    Args:
        media: of the first row.
        one, other: keys of both; neither begins with the other.
    """
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    common = int((differs if differs.ndim == 1 else differs.any(1)).argmax())
    return next((medium.start for medium in media if medium.start < common < medium.span[1]), common)
