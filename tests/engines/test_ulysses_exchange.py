"""Attention and the head over the ranks of a sequence give what one process computes, forward and backward.

Every case runs in real processes over gloo. The expected values come from one process that holds the whole row:
a plain loop over queries for the attention, plain indexing for the head's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import packed_attention
from references.rank_processes import Ranks, run_ranks
from references.token_passes import TEXT_MODEL
from strop.engines.attention_form import AttentionForm
from strop.engines.micro_batch import pack
from strop.engines.packing import make_rows, token_rows
from strop.engines.parallel.ulysses import SequenceShard, shard_micro_batch, tokens_per_rank
from strop.engines.segments import Segment
from strop.engines.tokens import Tokens
from strop.protocol import DataProto

DIM = 3
SCALING = 0.6

Lengths = tuple[tuple[int, tuple[int, ...]], ...]
"""Prompts of a batch: (prompt tokens, response tokens of each of its samples)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of packed tokens and one layer's heads."""

    prompts: Lengths
    heads: int
    key_heads: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int = DIM

    def form(self, sinks: Tensor | None) -> AttentionForm:
        """How the layer attends."""
        return AttentionForm(scaling=SCALING, window=self.window, softcap=self.softcap, sinks=sinks)


def rows_of(prompts: Lengths) -> DataProto:
    """Rows whose token ids are all different, samples of one prompt apart from each other."""
    pairs = []
    first = 0
    for prompt_length, responses in prompts:
        prompt = torch.arange(first, first + prompt_length)
        first += prompt_length
        for length in responses:
            pairs.append((prompt, torch.arange(first, first + length)))
            first += length
    pairs = pairs[::2] + pairs[1::2]
    return make_rows([p for p, _ in pairs], [r for _, r in pairs])


def micro_batch_of(case: Case) -> Tokens:
    return pack(rows_of(case.prompts), TEXT_MODEL)


def tensors_of(case: Case, num_tokens: int) -> tuple[Tensor, ...]:
    """Query, key, value and the loss's weight of each output, for the whole row."""
    generator = torch.Generator().manual_seed(num_tokens)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    dims = (DIM, DIM, case.value_dim, case.value_dim)
    shapes = zip(heads, dims, strict=True)
    return tuple(torch.randn(num_tokens, *s, generator=generator, dtype=torch.float64) for s in shapes)


def sinks_of(case: Case) -> Tensor | None:
    """A sink of each head, where the case has them."""
    if not case.has_sinks:
        return None
    return torch.linspace(-1, 2, case.heads, dtype=torch.float64).requires_grad_()


def piece(whole: Tensor, rank: int, size: int) -> Tensor:
    """A rank's tokens; rows of ones where the row of tokens has ended."""
    n = tokens_per_rank(len(whole), size)
    padded = torch.cat([whole, whole.new_ones(n * size - len(whole), *whole.shape[1:])])
    return padded[rank * n : (rank + 1) * n].clone()


def shard_of(micro_batch: Tokens, group: dist.ProcessGroup | None) -> SequenceShard:
    """This rank's part of a micro-batch."""
    assert group is not None
    return shard_micro_batch(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        attention=micro_batch.attention,
        hidden_index=micro_batch.hidden_index,
        targets=micro_batch.targets,
        group=group,
    )


def attention_pieces(ranks: Ranks, cases: Sequence[Case]) -> list[list[Tensor]]:
    """In a rank: for each case this rank's piece of the output and of the gradients of query, key and value."""
    group = ranks.join(sequence_parallel=ranks.world_size).sp_group
    results = []
    for case in cases:
        micro_batch = micro_batch_of(case)
        local = [piece(t, ranks.rank, ranks.world_size) for t in tensors_of(case, micro_batch.num_tokens)]
        query, key, value = (t.requires_grad_() for t in local[:3])
        attention = shard_of(micro_batch, group).attention
        sinks = sinks_of(case)
        out = attention.attend(0, query, key, value, case.form(sinks))
        (out * local[3]).sum().backward()
        results.append([out.detach(), query.grad, key.grad, value.grad])
        if sinks is not None:
            assert sinks.grad is not None
            dist.all_reduce(sinks.grad, group=group)  # each rank has the gradients of its heads
            torch.testing.assert_close(sinks.grad, expected_attention(case)[4])
    return results


def expected_attention(case: Case) -> list[Tensor]:
    """The same of the whole row, one query at a time."""
    segments = segments_of(case)
    num_tokens = sum(s.length for s in segments)
    query, key, value, weight = tensors_of(case, num_tokens)
    sinks = sinks_of(case)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = packed_attention.attend(
        *leaves,
        [(s.start, s.length, s.prefix) for s in segments],
        scaling=SCALING,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
    )
    (out * weight).sum().backward()
    if sinks is not None:
        leaves.append(sinks)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def segments_of(case: Case) -> list[Segment]:
    """Where packing puts the rows: a lone row as one run, else the prompt and then the samples' responses."""
    groups: dict[object, list[tuple[Tensor, Tensor]]] = {}
    for row in token_rows(rows_of(case.prompts)):
        groups.setdefault(tuple(row.prompt.tolist()), []).append((row.prompt, row.response))
    segments, at = [], 0
    for group in groups.values():
        prompt = len(group[0][0])
        if len(group) == 1:
            segments.append(Segment(start=at, length=prompt + len(group[0][1]) - 1))
            at += segments[-1].length
            continue
        segments.append(Segment(start=at, length=prompt))
        start, at = at, at + prompt
        for _, response in group:
            length = len(response) - 1
            segments.append(Segment(start=at, length=length, prefix=((start, start + prompt),)))
            at += length
    return segments


def check_attention(cases: Sequence[Case], size: int) -> None:
    per_rank = run_ranks(attention_pieces, size, cases)
    for number, case in enumerate(cases):
        wanted = expected_attention(case)[:4]
        for name, expected, *pieces in zip(
            ("output", "query", "key", "value"), wanted, *(r[number] for r in per_rank), strict=True
        ):
            joined = torch.cat(pieces)
            torch.testing.assert_close(
                joined[: len(expected)],
                expected,
                atol=1e-10,
                rtol=1e-10,
                msg=lambda text, name=name, case=case: f"{name} of {case}: {text}",
            )
            assert not joined[len(expected) :].any(), f"padding of {name} of {case}"


# A group of 4 + 1 + 4 + 0 tokens, a lone row of 3 + 4, the shortest row there is: 17 tokens, 13 predicted.
UNEVEN: Lengths = ((4, (2, 5, 1)), (3, (5,)), (1, (1,)))
EVEN: Lengths = ((3, (3, 2)), (1, (2,)))  # 6 + 2 tokens
TWO_TOKENS: Lengths = ((1, (2,)),)
ONE_TOKEN: Lengths = ((1, (1,)),)

HEADS = {
    2: [(4, 4), (4, 2), (2, 1), (6, 3), (6, 2)],  # (6, 3): two queries per key, three queries per rank
    4: [(4, 4), (8, 2), (4, 1), (12, 3), (12, 4)],
}


def all_cases(size: int) -> list[Case]:
    """Each pair of head counts on a row that does not divide; each row, and a window, with one pair; other forms of
    attention."""
    rows = [(EVEN, None), (TWO_TOKENS, None), (ONE_TOKEN, None), (UNEVEN, 3)]
    return [
        *(Case(prompts=UNEVEN, heads=heads, key_heads=key_heads) for heads, key_heads in HEADS[size]),
        *(Case(prompts=prompts, heads=size, key_heads=1, window=window) for prompts, window in rows),
        Case(prompts=UNEVEN, heads=2 * size, key_heads=size, value_dim=2),
        Case(prompts=UNEVEN, heads=2 * size, key_heads=1, softcap=0.7, has_sinks=True, window=3),
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.dist)])
def test_attention_over_ranks_equals_that_of_one_process(size: int) -> None:
    check_attention(all_cases(size), size)


lengths = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)),
    min_size=1,
    max_size=3,
).map(tuple)
any_case = st.builds(
    lambda prompts, heads, window: Case(prompts=prompts, heads=heads[0], key_heads=heads[1], window=window),
    lengths,
    st.sampled_from(HEADS[2]),
    st.none() | st.integers(1, 6),
)


@pytest.mark.draws
@settings(max_examples=draws(10, by_default=4), deadline=None)
@given(cases=st.lists(any_case, min_size=1, max_size=4))
def test_attention_over_two_ranks_of_any_rows(cases: list[Case]) -> None:
    check_attention(cases, 2)


def head_pieces(ranks: Ranks, prompts: Lengths) -> tuple[Tensor, ...]:
    """In a rank: what is predicted from, the gathered result, and the gradients of hidden states and weight."""
    micro_batch = pack(rows_of(prompts), TEXT_MODEL)
    shard = shard_of(micro_batch, ranks.join(sequence_parallel=ranks.world_size).sp_group)
    hidden, weight, bias, loss_weight = head_tensors(micro_batch)
    local = piece(hidden, ranks.rank, ranks.world_size).requires_grad_()
    weight.requires_grad_()
    bias.requires_grad_()
    out = shard.gather(head(shard.predicting(local), weight, bias, shard.targets))
    (out * loss_weight).sum().backward()
    assert local.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return out.detach(), local.grad, weight.grad, bias.grad


def head_tensors(micro_batch: Tokens) -> tuple[Tensor, ...]:
    """Hidden states [N, D], a head's weight [D, 2] and bias [2], the loss's weight of each result [M, 2]."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((micro_batch.num_tokens, 5), (5, 2), (2,), (len(micro_batch.targets), 2))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def head(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """[m, 2]: not linear, and different for each target."""
    return torch.tanh(hidden @ weight + bias) * (1.0 + targets[:, None])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.dist)])
@pytest.mark.parametrize("prompts", [UNEVEN, EVEN, TWO_TOKENS, ONE_TOKEN])
def test_each_rank_computes_its_share_of_the_head(prompts: Lengths, size: int) -> None:
    micro_batch = pack(rows_of(prompts), TEXT_MODEL)
    hidden, weight, bias, loss_weight = head_tensors(micro_batch)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    wanted = head(hidden[micro_batch.hidden_index], weight, bias, micro_batch.targets)
    (wanted * loss_weight).sum().backward()

    per_rank = run_ranks(head_pieces, size, prompts)
    for out, *_ in per_rank:
        torch.testing.assert_close(out, wanted.detach(), atol=1e-10, rtol=1e-10)
    grad_hidden = torch.cat([grad for _, grad, _, _ in per_rank])
    close = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(grad_hidden[: micro_batch.num_tokens], leaves[0].grad, **close)
    assert not grad_hidden[micro_batch.num_tokens :].any()
    torch.testing.assert_close(sum(r[2] for r in per_rank), leaves[1].grad, **close)
    torch.testing.assert_close(sum(r[3] for r in per_rank), leaves[2].grad, **close)


def shard_sizes(ranks: Ranks, prompts: Lengths) -> tuple[int, ...]:
    micro_batch = pack(rows_of(prompts), TEXT_MODEL)
    shard = shard_of(micro_batch, ranks.join(sequence_parallel=ranks.world_size).sp_group)
    hidden = shard.predicting(torch.zeros(shard.input_ids.shape[1], 1))
    return shard.input_ids.shape[1], len(shard.targets), len(hidden)


def test_no_rank_has_more_than_its_share_of_tokens_or_predictions() -> None:
    # Prompts of 30 and 20 tokens, of which 12 + 1 and 3 tokens are sampled: 30 + 11 + 0 + 20 + 2 = 63 tokens.
    assert run_ranks(shard_sizes, 2, ((30, (12, 1)), (20, (3,)))) == [(32, 8, 8), (32, 8, 8)]


def wrong_heads(ranks: Ranks) -> str:
    case = Case(prompts=EVEN, heads=3, key_heads=3)
    micro_batch = micro_batch_of(case)
    shard = shard_of(micro_batch, ranks.join(sequence_parallel=ranks.world_size).sp_group)
    query, key, value, _ = (
        piece(t, ranks.rank, ranks.world_size) for t in tensors_of(case, micro_batch.num_tokens)
    )
    try:
        shard.attention.attend(7, query, key, value, AttentionForm(scaling=1.0))
    except ValueError as error:
        return str(error)
    return "no error"


def test_heads_that_do_not_divide_are_named_before_anything_is_sent() -> None:
    for message in run_ranks(wrong_heads, 2):
        assert message == (
            "layer 7 has 3 attention heads, which do not divide over the 2 ranks of this role's "
            "engine.sequence_parallel; set it to a divisor of 3"
        )
