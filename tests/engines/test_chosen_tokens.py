"""Log-probs of chosen tokens and the most likely ones through the chunked head, against log_softmax of all logits."""

from __future__ import annotations

import pytest
import torch
from test_log_prob_head import Largest
from torch import Tensor

from strop.engines import head
from strop.engines.head import Head

N, V, D, K = 11, 17, 5, 4


def inputs(*, bias: bool) -> list[Tensor]:
    """hidden, weight, (bias,) with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, D), (V, D), *([(V,)] if bias else [])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def tokens() -> tuple[Tensor, Tensor]:
    """Targets [N], and chosen tokens [N, K], of which the first is the target in every second row."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, V, (N,), generator=generator)
    chosen = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(N)])
    for row in range(0, N, 2):
        others = chosen[row][chosen[row] != targets[row]][: K - 1]
        chosen[row] = torch.cat([targets[row, None], others])
    return targets, chosen


def all_log_probs(leaves: list[Tensor], temperature: float, banned: Tensor | None = None) -> Tensor:
    logits = leaves[0] @ leaves[1].T + (leaves[2] if len(leaves) == 3 else 0.0)
    logits = logits / temperature
    if banned is not None:
        logits = logits.index_fill(1, banned, -torch.inf)
    return torch.log_softmax(logits, -1)


def ours(leaves: list[Tensor], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    targets, chosen = tokens()
    bias = leaves[2] if len(leaves) == 3 else None
    log_probs, entropies, at = Head(leaves[1], bias).log_probs_at(
        leaves[0], targets, chosen, temperature=temperature, num_likely=K
    )
    return log_probs, entropies, at.log_probs


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 1000])  # 4 leaves a last chunk of 3
@pytest.mark.parametrize(("bias", "temperature"), [(False, 1.0), (True, 0.7)])
def test_values_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, bias: bool, temperature: float
) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", tokens_per_chunk * V)
    leaves, (targets, chosen) = inputs(bias=bias), tokens()
    every = all_log_probs(leaves, temperature)
    wanted = (
        every.gather(1, targets[:, None])[:, 0],
        -(every.exp() * every).sum(-1),
        every.gather(1, chosen),
    )
    values = ours(leaves, temperature)
    torch.testing.assert_close(values, wanted, atol=1e-12, rtol=1e-12)
    weights = [torch.linspace(-1, 2, v.numel(), dtype=torch.float64).view(v.shape) for v in wanted]

    def gradients(three: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        loss = sum(((w * v).sum() for w, v in zip(weights, three, strict=True)), torch.zeros(()))
        return torch.autograd.grad(loss, leaves, retain_graph=True)

    torch.testing.assert_close(gradients(values), gradients(wanted), atol=1e-12, rtol=1e-12)


def test_gradients_equal_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", 4 * V)
    leaves = inputs(bias=True)
    assert torch.autograd.gradcheck(lambda *three: ours(list(three), 0.7), leaves, atol=1e-7)


def test_the_sampled_token_is_what_it_is_without_the_others() -> None:
    leaves, (targets, _) = inputs(bias=True), tokens()
    log_probs, entropies, _ = ours(leaves, 0.7)
    alone = Head(leaves[1], leaves[2]).log_probs(leaves[0], targets, temperature=0.7)
    assert torch.equal(log_probs, alone[0])
    assert torch.equal(entropies, alone[1])


def test_tokens_are_likely_where_they_are_among_the_policys_own() -> None:
    leaves, (targets, chosen) = inputs(bias=True), tokens()
    _, _, at = Head(leaves[1], leaves[2]).log_probs_at(
        leaves[0], targets, chosen, temperature=0.7, num_likely=K
    )
    for row, likely in enumerate(at.is_likely.tolist()):
        order = all_log_probs(leaves, 0.7)[row].argsort(descending=True).tolist()
        assert likely == [token in order[:K] for token in chosen[row].tolist()]
    assert 0 < int(at.is_likely.sum()) < N * K


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 1000])
def test_the_most_likely_tokens_are_those_of_log_softmax_without_the_banned_ones(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int
) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", tokens_per_chunk * V)
    leaves = inputs(bias=True)
    banned = all_log_probs(leaves, 0.7)[0].argsort(descending=True)[:2]  # the best ones of the first row
    for passed_over in (None, banned):
        ids, log_probs = Head(leaves[1], leaves[2], passed_over).top_k(leaves[0], K, temperature=0.7)
        wanted = all_log_probs(leaves, 0.7, passed_over).topk(K, dim=-1)
        assert torch.equal(ids, wanted.indices)
        torch.testing.assert_close(log_probs, wanted.values, atol=1e-12, rtol=1e-12)
        assert not log_probs.requires_grad


def test_no_tokens() -> None:
    leaves, none = inputs(bias=True), torch.zeros((0, K), dtype=torch.int64)
    log_probs, entropies, at = Head(leaves[1], leaves[2]).log_probs_at(
        leaves[0][:0], none[:, 0], none, temperature=1.0, num_likely=K
    )
    (log_probs.sum() + entropies.sum() + at.log_probs.sum()).backward()
    assert (at.log_probs.shape, at.is_likely.shape) == ((0, K), (0, K))
    assert torch.equal(leaves[1].grad, torch.zeros(V, D, dtype=torch.float64))  # type: ignore[arg-type]
    ids, best = Head(leaves[1], leaves[2]).top_k(leaves[0][:0], K, temperature=1.0)
    assert (ids.shape, best.shape) == ((0, K), (0, K))


def test_no_tensor_of_tokens_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    count, vocab, dim, chunk = 96, 400, 4, 10
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", chunk * vocab)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, dim, generator=generator, requires_grad=True)
    with Largest() as seen:
        chosen, _ = Head(weight).top_k(hidden, 7, temperature=0.7)
        log_probs, entropies, at = Head(weight).log_probs_at(
            hidden, torch.arange(count), chosen, temperature=0.7, num_likely=7
        )
        (log_probs.sum() + entropies.sum() + at.log_probs.sum()).backward()
    assert seen.operations["logsumexp.default"] == 20  # 10 chunks: the teacher's, and forward
    assert seen.elements == chunk * vocab
