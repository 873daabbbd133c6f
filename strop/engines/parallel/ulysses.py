"""Sequence parallelism: the tokens of one packed row over several ranks, exchanged around attention.

Each of the S ranks of a sequence group runs every layer on N / S neighbouring tokens of the row, so the
activations of a long sequence are divided by S; no rank ever holds the hidden states of the whole row. Only
attention needs all tokens: there each rank takes H / S heads of all N tokens instead.

    tokens of a rank, all heads  --all-to-all-->  all tokens, heads of a rank  --attention, all-to-all-->  back

The head is divided too: each rank fetches the hidden states of its share of the U predictions and runs the head
on them, and the results are gathered, so that every rank evaluates the same loss on the tokens of all of them.

Gradients: each exchange sends the gradient back the way its rows came. Gathering the results does not add:
the loss is the same on all S ranks and counts once, so each rank keeps the gradient of its own share. The
gradient of a parameter, summed over the ranks of the group, is then that of one process.

Concurrency: all ranks of a group pack the same rows and call the same collectives in the same order: two per
layer and one before the head, each with its inverse in the backward pass, and one after the head. Recomputing
a layer repeats that layer's, on all ranks alike. None depends on the data, so none is skipped on one rank only.

Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed-Ulysses). Exercised on gloo with CPU tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.parallel.ranks import exchanged
from strop.utils.device import sent


def check_sequence_parallel(config: Any, sp_size: int, world_size: int, *, section: str = "engine") -> None:
    """Refuse a model or a number of processes over which sequences cannot be divided.

    Args:
        config: the model's configuration as transformers reads it.
        sp_size: engine.sequence_parallel, ranks per sequence.
        world_size: ranks of the role.
        section: what the sentence calls the settings, such as critic.engine.

    Raises:
        ValueError: the ranks do not divide into groups, the heads do not divide over the ranks, or as
            `check_tokens_divide`.
    """
    if sp_size == 1:
        return
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    if world_size % sp_size:
        raise ValueError(
            f"{section}.sequence_parallel is {sp_size}, but {world_size} processes do not divide into groups of "
            f"{sp_size}; use a multiple of {sp_size} processes, or "
            f"{section}.sequence_parallel={_choices(world_size, heads)}"
        )
    if heads % sp_size:
        raise ValueError(
            f"{section}.sequence_parallel is {sp_size}, but the {heads} attention heads of the model do not divide "
            f"over {sp_size} ranks; use {section}.sequence_parallel={_choices(world_size, heads)}"
        )
    check_tokens_divide(config, f"{section}.sequence_parallel", sp_size)


def check_tokens_divide(config: Any, key: str, size: int) -> None:
    """Refuse a model whose layers ranks with a part of the tokens cannot run.

    Args:
        config: the model's configuration as transformers reads it.
        key: the setting that divides tokens, for the sentence.
        size: its value.

    Raises:
        ValueError: layers carry a state from token to token, or positions are encoded by the longest sequence of the
            row, which one rank alone does not see.
    """
    text = config.get_text_config()
    if size == 1:
        return
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"{key} is {size}, but layers of {text.model_type} carry a state from token to token, which no rank can "
            f"begin in the middle of; use {key}=1"
        )
    growing = _rope_types(text) & {"dynamic", "longrope"}
    if growing:
        raise ValueError(
            f"{key} is {size}, but the model's rotary embedding of type {growing.pop()!r} depends on the longest "
            f"sequence, of which a rank sees only a part; use {key}=1"
        )


def _choices(world_size: int, heads: int) -> str:
    """The sizes that divide both, for an error: `1, 2 or 4`."""
    both = math.gcd(world_size, heads)
    *some, last = [str(size) for size in range(1, both + 1) if both % size == 0]
    return f"{', '.join(some)} or {last}" if some else last


def _rope_types(config: object) -> set[str]:
    """Kinds of rotary embedding, of all layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer = [value for value in parameters.values() if isinstance(value, dict)]  # a table per layer type
    return {str(table.get("rope_type", "default")) for table in per_layer or [parameters]}


class UlyssesAttention:
    """Attention of a whole packed row, called with the tokens of one rank."""

    def __init__(self, inner: AttentionContext, *, num_tokens: int, group: dist.ProcessGroup) -> None:
        """`inner` attends over the row of `num_tokens` tokens; see `tokens_per_rank` for how they are divided."""
        self._inner = inner
        self._num_tokens = num_tokens
        self._group = group
        self._size = dist.get_world_size(group)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [n, H, Dv] for query [n, H, D], key [n, Hkv, D], value [n, Hkv, Dv] of this rank's n tokens.

        Raises:
            ValueError: the heads do not divide over the ranks.
        """
        num_local, heads, dim = query.shape
        if heads % self._size:
            raise ValueError(
                f"layer {layer} has {heads} attention heads, which do not divide over the {self._size} ranks of "
                f"this role's engine.sequence_parallel; set it to a divisor of {heads}"
            )
        q = heads // self._size  # query heads of a rank
        repeats = _key_repeats(heads, key.shape[1], q)
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        kv, value_dim = key.shape[1] // self._size, value.shape[2]  # key heads of a rank

        # One exchange moves queries, keys and values; row r of the first axis is for rank r.
        sent = torch.cat(
            [x.reshape(num_local, self._size, -1).transpose(0, 1) for x in (query, key, value)], dim=2
        )  # [S, n, (q + kv) D + kv Dv]
        rows = self._exchange(sent.flatten(0, 1))[: self._num_tokens]  # the pieces in the order of tokens
        queries, keys, values = torch.split(rows, [q * dim, kv * dim, kv * value_dim], dim=1)
        if form.sinks is not None:
            rank = dist.get_rank(self._group)
            form = dataclasses.replace(form, sinks=form.sinks[rank * q : (rank + 1) * q])
        output = self._inner.attend(
            layer, queries.view(-1, q, dim), keys.view(-1, kv, dim), values.view(-1, kv, value_dim), form
        )  # [N, q, Dv]
        padding = num_local * self._size - self._num_tokens
        back = self._exchange(
            F.pad(output, (0, 0, 0, 0, 0, padding))
        )  # [S n, q, Dv]: a row per rank of heads
        return back.view(self._size, num_local, q, -1).transpose(0, 1).reshape(num_local, heads, -1)

    def _exchange(self, rows: Tensor) -> Tensor:
        counts = [len(rows) // self._size] * self._size
        return exchange_rows(rows, counts, counts, self._group)


def _key_repeats(heads: int, key_heads: int, heads_per_rank: int) -> int:
    """Number of copies of each key head, side by side, with which every rank gets the key heads of its queries.

    A key head serves heads / key_heads neighbouring queries. If a rank's queries begin or end inside such a run,
    the run is cut into pieces that fit both, each with a copy of the key head; 1 when the key heads divide over
    the ranks. The copies' gradients add up in the key head.
    """
    run = heads // key_heads
    return run // math.gcd(run, heads_per_rank)


@dataclass(frozen=True, kw_only=True)
class SequenceShard:
    """One rank's part of a micro-batch of N tokens with U predictions."""

    input_ids: Tensor  # [1, n]
    position_ids: Tensor  # [1, n]
    attention: AttentionContext
    targets: Tensor
    """[u]: the tokens that this rank's share of the predictions predicts; the last shares end in padding."""
    num_predicted: int
    """U, of all shares together, without padding."""
    group: dist.ProcessGroup
    send_index: Tensor
    """Local positions whose hidden states other shares, or this one, need, ordered by rank."""
    send_counts: Sequence[int]
    """Number of them that go to each rank."""
    receive_counts: Sequence[int]
    """Number of hidden states of this share that come from each rank."""
    receive_index: Tensor
    """[u]: place of each prediction's hidden state among the received ones."""

    @property
    def num_local(self) -> int:
        """Tokens of this rank, n."""
        return self.input_ids.shape[1]

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [u, D] of this rank's share of the predictions, from those of this rank's tokens [n, D]."""
        asked = F.embedding(self.send_index, hidden)
        received = exchange_rows(asked, self.send_counts, self.receive_counts, self.group)
        return F.embedding(self.receive_index, received)

    def token_share(self, prediction_index: Tensor) -> TokenShare:
        """The response tokens [M], in host memory, whose predictions are in this rank's share."""
        size, rank, u = dist.get_world_size(self.group), dist.get_rank(self.group), len(self.targets)
        holder = prediction_index // u
        order = torch.argsort(holder, stable=True)
        counts = torch.bincount(holder, minlength=size)
        starts = counts.cumsum(0) - counts
        width = max(1, int(counts.max()))  # shares of one length are gathered
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) + (torch.arange(size) * width - starts)[holder[order]]
        own = order[starts[rank] : starts[rank] + counts[rank]]
        padding = (0, width - len(own))
        return TokenShare(
            prediction=F.pad(prediction_index[own] - rank * u, padding),
            token=F.pad(own, padding, value=len(order)),
            place=place,
            group=self.group,
        )

    def gather(self, share: Tensor) -> Tensor:
        """Results [U, ...] of all predictions, on every rank, from those of this rank's share [u, ...].

        The backward pass takes this rank's slice of the gradient and adds nothing up: use the same loss on all ranks.
        """
        return gather_shares(share, self.group)[: self.num_predicted]

    def of_each(self, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Results [U, ...] of a function of hidden states, from those of this rank's share [u, D]."""
        return self.gather(function(hidden))


@dataclass(frozen=True, kw_only=True)
class TokenShare:
    """This rank's share of M response tokens, each by itself where several have one prediction; in host memory."""

    prediction: Tensor
    """[w]: number of each token's prediction in this rank's share of the predictions."""
    token: Tensor
    """[w]: number of each among the M; M of padding."""
    place: Tensor
    """[M]: place of each in the shares of all ranks, end to end."""
    group: dist.ProcessGroup | None
    """Ranks that have a share; None: this one has all."""

    def gather(self, results: Tensor) -> Tensor:
        """Results [M, ...] of all tokens, from those of this rank's share [w, ...], as `SequenceShard.gather`."""
        every = results if self.group is None else gather_shares(results, self.group)
        return every[sent(self.place, every.device)]


def whole_share(prediction_index: Tensor) -> TokenShare:
    """All response tokens [M] of these predictions, on a rank that has all predictions."""
    every = torch.arange(len(prediction_index))
    return TokenShare(prediction=prediction_index, token=every, place=every, group=None)


def tokens_per_rank(num_tokens: int, num_ranks: int) -> int:
    """Neighbouring tokens of each rank; up to `num_ranks - 1` tokens of padding follow the row's last."""
    return max(1, math.ceil(num_tokens / num_ranks))


def token_share(row: Tensor, group: dist.ProcessGroup, *, fill: int) -> Tensor:
    """This rank's part [n] of a row [N] of numbers of all tokens; the last parts end in `fill`."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    n = tokens_per_rank(len(row), size)
    return F.pad(row, (0, n * size - len(row)), value=fill)[rank * n : (rank + 1) * n]


def shard_micro_batch(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention: AttentionContext,
    hidden_index: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
) -> SequenceShard:
    """This rank's part of a micro-batch that all ranks of the group packed alike. Communicates nothing.

    Args:
        input_ids, position_ids: [1, N].
        attention: over the N tokens.
        hidden_index: [U], in host memory: packed position whose hidden state makes each prediction.
        targets: [U].
        group: the ranks that share each sequence.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    num_tokens = input_ids.shape[1]
    n = tokens_per_rank(num_tokens, size)
    return sequence_shard(
        input_ids=piece(input_ids, n, size, rank),
        position_ids=piece(position_ids, n, size, rank),
        attention=UlyssesAttention(attention, num_tokens=num_tokens, group=group),
        holders=hidden_index // n,
        places=hidden_index % n,
        targets=targets,
        group=group,
    )


def sequence_shard(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention: AttentionContext,
    holders: Tensor,
    places: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
) -> SequenceShard:
    """A rank's part of a micro-batch, with its share of the predictions.

    Args:
        input_ids, position_ids: [1, n], of this rank.
        attention: over the row, called with this rank's tokens.
        holders: [U], in host memory: rank of the group that has the hidden state of each prediction.
        places: [U], in host memory: its place among the tokens of that rank.
        targets: [U].
        group: the ranks that share each sequence.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    u = tokens_per_rank(len(targets), size)
    padding = (0, u * size - len(targets))
    holders, places = (F.pad(index, padding).view(size, u) for index in (holders, places))
    here = holders == rank  # row r: what the share of rank r needs
    device = input_ids.device
    return SequenceShard(
        input_ids=input_ids,
        position_ids=position_ids,
        attention=attention,
        targets=piece(targets, u, size, rank),
        num_predicted=len(targets),
        group=group,
        send_index=sent(places[here], device),
        send_counts=here.sum(1).tolist(),
        receive_counts=torch.bincount(holders[rank], minlength=size).tolist(),
        # Rows arrive ordered by the rank that held them, then as they were wanted.
        receive_index=sent(torch.argsort(torch.argsort(holders[rank], stable=True)), device),
    )


def piece(row: Tensor, length: int, size: int, rank: int) -> Tensor:
    """A rank's neighbours [..., length] of a row, padded with zeros: token 0 at position 0, which nothing looks at."""
    padded = F.pad(row, (0, length * size - row.shape[-1]))
    return padded[..., rank * length : (rank + 1) * length]


def exchange_rows(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """`exchanged` with a gradient, which goes back the way the rows came."""
    received: Tensor = _AllToAll.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]
    return received


def gather_shares(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shares [u, ...] of all ranks, in order; see `SequenceShard.gather`."""
    gathered: Tensor = _GatherShares.apply(share, group)  # type: ignore[no-untyped-call]
    return gathered


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, `send[r]` of them to rank r; a row's gradient returns to where it came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.plan = (receive, send, group)
        return exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchanged(grads[0], *ctx.plan), None, None, None


class _GatherShares(torch.autograd.Function):
    """Equal shares of all ranks, in order; backward keeps this rank's slice of a gradient equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ctx.own = slice(rank * len(share), (rank + 1) * len(share))
        gathered = share.new_empty((size * len(share), *share.shape[1:]))
        dist.all_gather(list(gathered.chunk(size)), share.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None
