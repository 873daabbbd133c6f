"""Context parallelism: the tokens of one packed row over several ranks, which exchange keys and values.

Each of the C ranks of a context group runs every layer on N / C tokens of the row. Only attention needs the others:
there each rank gathers the keys and values of all tokens and attends with the queries of its own, by the kernels and
for the forms of attention that one process has (attention.py). Heads are not divided, so there may be any number.

    keys, values of a rank  --all-gather-->  those of all tokens  --attention, own queries-->  outputs of a rank

Later tokens see more keys. A long segment is therefore cut into 2 C runs of equal length, of which rank r has run r and
run 2 C - 1 - r; segments shorter than 1 / 2C of the row lie end to end, ordered by the keys that they see, and are cut
as if they were one. Every rank has the same number of tokens, up to C - 1 of padding in all. The work of attention is
equal where one sequence fills the row; in mixtures of short ones it differs by a few percent.

Costs of a rank, with n = ceil(N / C), Hkv key heads, D and Dv entries of a key and a value, b bytes of each:

    traffic of a layer    (C - 1) n Hkv (D + Dv) b bytes sent forward (keys and values), as many backward (their
                          gradients), and once more forward where the layer is computed again
    memory of a layer     N Hkv (D + Dv) b bytes while it attends; and, until the layer's backward pass, the keys and
                          values that each run of queries sees, gathered: at most twice that for one sequence

What queries bring is never sent, so with few key heads this is less than Ulysses sends, as long as C is small. A ring
would keep one rank's keys at a time, but needs the normalizers of partial results, which no kernel of a CPU and none
with windows, caps or sinks gives.

The head is divided as with Ulysses (ulysses.py), with the same gradients. Inside a context rank its tokens can be
divided again, over the ranks of Ulysses or of tensor parallelism: what is said here of heads then holds for the heads
of such a rank.

Concurrency: all ranks of a group pack the same rows and call the same collectives in the same order: one per layer and
one before the head, each with its inverse in the backward pass, and one after the head. Recomputing a layer repeats
that layer's, on all ranks alike.

Sources: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2 (keys and values gathered, 2 C runs); together with
Ulysses: Fang and Zhao 2024, arXiv:2405.07719. Exercised on gloo with CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.tensor import TensorShard, tensor_shard
from strop.engines.parallel.token_exchange import gather_tokens
from strop.engines.parallel.ulysses import (
    SequenceShard,
    TokenShare,
    UlyssesAttention,
    check_tokens_divide,
    piece,
    sequence_shard,
    tokens_per_rank,
)
from strop.engines.segments import Places, Segment
from strop.utils.device import sent


def check_context_parallel(config: Any, cp_size: int, *, section: str = "engine") -> None:
    """Refuse a model whose sequences cannot be divided over ranks.

    Args:
        config: the model's configuration as transformers reads it.
        cp_size: engine.context_parallel, ranks per sequence.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: layers carry a state from token to token, or positions are encoded by the longest sequence.
    """
    check_tokens_divide(config, f"{section}.context_parallel", cp_size)


@dataclass(frozen=True)
class ContextLayout:
    """The tokens of a row that each of C ranks has; the row is padded to a multiple of C."""

    segments: tuple[tuple[Segment, ...], ...]
    """Of each rank, in the order of its tokens, in places of the row; padding is a segment too."""
    tokens: Tensor
    """[C, n] int64: place in the row of each rank's tokens; from N on padding."""

    @property
    def where(self) -> Tensor:
        """[C n]: place of each token among those of all ranks, end to end; divided by n it is the rank."""
        return torch.argsort(self.tokens.flatten())

    def places(self, rank: int) -> Places:
        """Places of a rank's queries and of gathered keys."""
        mine = self.tokens[rank]
        queries = torch.zeros(self.tokens.numel(), dtype=torch.int64)
        queries[mine] = torch.arange(len(mine))
        return Places(queries=queries, keys=self.where)


def context_layout(segments: Sequence[Segment], num_tokens: int, num_ranks: int) -> ContextLayout:
    """Tokens of a row for each rank: as many on every rank, and nearly the same number of keys that they see.

    Args:
        segments: that cover the row of `num_tokens`, without blocks whose tokens see later ones.
        num_tokens: N.
        num_ranks: C.
    """
    size = tokens_per_rank(num_tokens, num_ranks)
    padded = [s for s in segments if s.length]
    if spare := size * num_ranks - num_tokens:
        padded.append(Segment(start=num_tokens, length=spare))
    short = [s for s in padded if s.length * 2 * num_ranks <= num_tokens]
    long = [s for s in padded if s.length * 2 * num_ranks > num_tokens]
    counts = [0] * num_ranks
    of_rank: list[list[Segment]] = [[] for _ in range(num_ranks)]
    for together in (*([segment] for segment in long), sorted(short, key=_keys_seen, reverse=True)):
        lengths = _run_lengths(sum(s.length for s in together), counts)
        for rank, run in _cut(together, lengths):
            of_rank[rank].append(run)
    runs = [[torch.arange(s.start, s.start + s.length) for s in mine] for mine in of_rank]
    return ContextLayout(
        segments=tuple(tuple(mine) for mine in of_rank),
        tokens=torch.stack([torch.cat(mine) for mine in runs]),
    )


def _keys_seen(segment: Segment) -> float:
    """By a token in the middle."""
    return segment.num_keys - segment.length / 2


def _run_lengths(num_tokens: int, counts: list[int]) -> list[int]:
    """Lengths of 2 C - 1 runs, of which the one in the middle is two; what does not divide goes to the ranks with the
    fewest tokens so far, `counts`, which grow."""
    num_ranks = len(counts)
    each, left = divmod(num_tokens, 2 * num_ranks)
    lengths = [each] * (2 * num_ranks)
    for rank in range(num_ranks):
        counts[rank] += 2 * each
    for _ in range(left):
        rank = counts.index(min(counts))
        counts[rank] += 1
        run = rank if lengths[rank] == each else 2 * num_ranks - 1 - rank
        lengths[run] += 1
    lengths[num_ranks - 1 : num_ranks + 1] = [lengths[num_ranks - 1] + lengths[num_ranks]]
    return lengths


def _cut(segments: Sequence[Segment], lengths: Sequence[int]) -> Iterator[tuple[int, Segment]]:
    """Segments that lie end to end, cut into runs of these lengths: the rank of each piece, and the piece."""
    last, room, run = len(lengths) - 1, lengths[0], 0
    for segment in segments:
        done = 0
        while done < segment.length:
            while not room:
                run += 1
                room = lengths[run]
            length = min(room, segment.length - done)
            yield (
                min(run, last - run),
                Segment(
                    start=segment.start + done,
                    length=length,
                    prefix=(*segment.prefix, (segment.start, segment.start + done)),
                ),
            )
            done += length
            room -= length


class ContextAttention:
    """Attention of the queries of one rank to the keys and values of all ranks of its group."""

    def __init__(self, layout: ContextLayout, group: dist.ProcessGroup, device: torch.device) -> None:
        """`layout` says which tokens the ranks have; those of this one are on `device`."""
        self._group = group
        rank = dist.get_rank(group)
        self._plan = PackedAttention(layout.segments[rank], device=device, places=layout.places(rank))
        self._plan.prepare()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [n, H, Dv] for query [n, H, D], key [n, Hkv, D], value [n, Hkv, Dv] of this rank's n tokens.

        The backward pass adds up what the ranks' queries say about each key and value.
        """
        (heads, dim), value_dim = key.shape[1:], value.shape[2]
        rows = gather_tokens(torch.cat([key.flatten(1), value.flatten(1)], dim=1), self._group)
        keys, values = torch.split(rows, [heads * dim, heads * value_dim], dim=1)
        return self._plan.attend(
            layer, query, keys.view(-1, heads, dim), values.view(-1, heads, value_dim), form
        )


@dataclass(frozen=True, kw_only=True)
class ContextTensorShard:
    """The tokens of a context rank, over the ranks of its tensor-parallel group."""

    between: TensorShard
    """The rank's tokens, of which it has all where it is asked for hidden states."""
    row: SequenceShard
    """The same tokens among those of the other context ranks."""

    @property
    def input_ids(self) -> Tensor:
        """[1, n']: as of TensorShard."""
        return self.between.input_ids

    @property
    def position_ids(self) -> Tensor:
        """[1, n']."""
        return self.between.position_ids

    @property
    def attention(self) -> AttentionContext:
        """Of this rank's heads."""
        return self.between.attention

    @property
    def targets(self) -> Tensor:
        """[u]: as of SequenceShard, the same on the ranks of the tensor-parallel group."""
        return self.row.targets

    @property
    def num_local(self) -> int:
        """Tokens of this rank between layers."""
        return self.between.num_local

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [u, D] that predict the context rank's share, from those of this rank's tokens."""
        return self.row.predicting(self.between.predicting(hidden))

    def token_share(self, prediction_index: Tensor) -> TokenShare:
        """As of SequenceShard."""
        return self.row.token_share(prediction_index)

    def gather(self, share: Tensor) -> Tensor:
        """As of SequenceShard."""
        return self.row.gather(share)

    def of_each(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Results [U, ...] of a function of hidden states [u, D], each evaluated on one rank alone."""
        return self.row.gather(self.between.of_each(function, hidden))


def context_shard(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention: PackedAttention,
    hidden_index: Tensor,
    targets: Tensor,
    parallel: Parallel,
    key_heads: slice | None,
) -> SequenceShard | ContextTensorShard:
    """This rank's part of a micro-batch that all ranks of its row packed alike. Communicates nothing.

    Args:
        input_ids, position_ids, hidden_index, targets: as of `shard_micro_batch`.
        attention: over the N tokens.
        parallel: with a context group.
        key_heads: of `TensorParallel`, where the rank's tokens are divided again so.
    """
    assert parallel.cp_group is not None, "the row is divided over context ranks"
    group, device, num_tokens = parallel.cp_group, input_ids.device, input_ids.shape[1]
    layout = context_layout(attention.segments, num_tokens, dist.get_world_size(group))
    rank, n = dist.get_rank(group), layout.tokens.shape[1]
    mine = sent(layout.tokens[rank], device)
    where = layout.where[hidden_index]
    holders, places = where // n, where % n

    def own(row: Tensor) -> Tensor:
        return F.pad(row, (0, layout.tokens.numel() - num_tokens))[:, mine]

    ids, positions = own(input_ids), own(position_ids)
    inner = ContextAttention(layout, group, device)
    if parallel.sp_group is not None:
        assert parallel.row_group is not None, "a group for both axes"
        size, sp_rank = parallel.sp_size, dist.get_rank(parallel.sp_group)
        each = tokens_per_rank(n, size)
        return sequence_shard(
            input_ids=piece(ids, each, size, sp_rank),
            position_ids=piece(positions, each, size, sp_rank),
            attention=UlyssesAttention(inner, num_tokens=n, group=parallel.sp_group),
            holders=holders * size + places // each,
            places=places % each,
            targets=targets,
            group=parallel.row_group,
        )
    row = sequence_shard(
        input_ids=ids, position_ids=positions, attention=inner, holders=holders, places=places, targets=targets,
        group=group,
    )  # fmt: skip
    if parallel.tp_mesh is None:
        return row
    between = tensor_shard(
        input_ids=ids,
        position_ids=positions,
        attention=inner,
        hidden_index=torch.arange(n, device=device),
        targets=row.targets,
        group=parallel.tp_mesh.get_group(),
        key_heads=key_heads,
    )
    return ContextTensorShard(between=between, row=row)
