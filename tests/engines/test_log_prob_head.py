"""Log-probs and entropies through the chunked head, and their gradients, against log_softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.engines import head
from strop.engines.head import Head

N, V, D = 23, 17, 6


def inputs(*, bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """hidden, weight, (bias,) with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, D), (V, D), *([(V,)] if bias else [])]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def targets() -> Tensor:
    return torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))


def reference(leaves: list[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    logits = leaves[0] @ leaves[1].T + (leaves[2] if len(leaves) == 3 else 0.0)
    log_probs = torch.log_softmax(logits / temperature, -1)
    return log_probs[torch.arange(N), targets()], -(log_probs.exp() * log_probs).sum(-1)


def ours(leaves: list[Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    bias = leaves[2] if len(leaves) == 3 else None
    return Head(leaves[1], bias).log_probs(leaves[0], targets(), temperature=temperature)


@pytest.mark.parametrize("tokens_per_chunk", [1, 5, N, 1000])  # 5 leaves a last chunk of 3
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2])
def test_values_and_gradients_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, bias: bool, temperature: float
) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", tokens_per_chunk * V)
    leaves = inputs(bias=bias)
    values, wanted = ours(leaves, temperature), reference(leaves, temperature)
    torch.testing.assert_close(values, wanted, atol=1e-12, rtol=1e-12)
    weight = torch.linspace(-1, 2, N, dtype=torch.float64)
    for share in (0.0, 0.8):  # with and without the entropy

        def loss(pair: tuple[Tensor, Tensor], share: float = share) -> Tensor:
            return (weight * pair[0]).sum() + share * (weight.flip(0) * pair[1]).sum()

        grads = torch.autograd.grad(loss(values), leaves, retain_graph=True)
        wanted_grads = torch.autograd.grad(loss(wanted), leaves, retain_graph=True)
        torch.testing.assert_close(grads, wanted_grads, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 1.5), (3.0, 0.8)])
def test_scaled_and_capped_logits_and_their_gradients(
    monkeypatch: pytest.MonkeyPatch, temperature: float, scale: float, cap: float | None
) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", 5 * V)
    leaves = inputs(bias=True)
    logits = scale * (leaves[0] @ leaves[1].T + leaves[2])
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_probs = torch.log_softmax(logits / temperature, -1)
    wanted = log_probs[torch.arange(N), targets()], -(log_probs.exp() * log_probs).sum(-1)
    made = Head(leaves[1], leaves[2], None, scale, cap).log_probs(
        leaves[0], targets(), temperature=temperature
    )
    torch.testing.assert_close(made, wanted, atol=1e-12, rtol=1e-12)
    weight = torch.linspace(-1, 2, N, dtype=torch.float64)
    grads, wanted_grads = (
        torch.autograd.grad((weight * a).sum() + 0.8 * (weight.flip(0) * b).sum(), leaves)
        for a, b in (made, wanted)
    )
    torch.testing.assert_close(grads, wanted_grads, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_frozen_head_gets_no_gradient_and_changes_that_of_nothing_else(dtype: torch.dtype) -> None:
    trained, frozen = inputs(bias=True, dtype=dtype), inputs(bias=True, dtype=dtype)
    for leaf in frozen[1:]:
        leaf.requires_grad_(False)
    for leaves in (trained, frozen):
        log_probs, entropies = ours(leaves, 0.7)
        (log_probs.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]
    assert frozen[1].grad is None
    assert frozen[2].grad is None
    assert trained[0].grad is not None
    assert torch.equal(trained[0].grad, frozen[0].grad)  # type: ignore[arg-type]


def test_float32_is_near_float64() -> None:
    exact, rough = inputs(bias=True), inputs(bias=True, dtype=torch.float32)
    for value, wanted in zip(ours(rough, 0.7), reference(exact, 0.7), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted, atol=1e-5, rtol=1e-5)


def test_bfloat16_hidden_states_give_float32_log_probs_and_weight_gradients() -> None:
    leaves = inputs(bias=True, dtype=torch.float32)
    hidden = leaves[0].detach().bfloat16().requires_grad_()
    log_probs, entropies = Head(leaves[1], leaves[2]).log_probs(hidden, targets(), temperature=1.0)
    assert log_probs.dtype == entropies.dtype == torch.float32
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert leaves[1].grad is not None
    assert (hidden.grad.dtype, leaves[1].grad.dtype) == (torch.bfloat16, torch.float32)
    log_probs, entropies = reference(inputs(bias=True), 1.0)
    wanted = inputs(bias=True)
    log_probs, entropies = reference(wanted, 1.0)
    (log_probs.sum() + entropies.sum()).backward()
    similar = torch.cosine_similarity(leaves[1].grad.double().flatten(), wanted[1].grad.flatten(), dim=0)
    assert float(similar) > 0.999


def test_extreme_logits_stay_finite() -> None:
    # Logits (1e4, 0): the first token has probability 1 exactly, the second log-prob -1e4; entropy and its
    # gradient are 0.
    hidden = torch.tensor([[1e4], [1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    log_probs, entropies = Head(weight).log_probs(hidden, torch.tensor([0, 1]), temperature=1.0)
    assert log_probs.tolist() == [0.0, -1e4]
    assert entropies.tolist() == [0.0, 0.0]
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0.0, -1.0]


def test_no_tokens() -> None:
    leaves = inputs(bias=True)
    none = leaves[0][:0]
    log_probs, entropies = Head(leaves[1], leaves[2]).log_probs(
        none, torch.zeros(0, dtype=torch.int64), temperature=1.0
    )
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)
    assert torch.equal(leaves[1].grad, torch.zeros(V, D, dtype=torch.float64))


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations[func.__name__] = self.operations.get(func.__name__, 0) + 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab, dim, chunk = 96, 400, 4, 10
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", chunk * vocab)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, dim, generator=generator, requires_grad=True)
    with Largest() as seen:
        log_probs, entropies = Head(weight).log_probs(hidden, torch.arange(tokens), temperature=0.7)
        forward = dict(seen.operations)
        (log_probs.sum() + entropies.sum()).backward()
    assert forward["logsumexp.default"] == 10  # ceil(96 / 10) chunks
    assert seen.operations["logsumexp.default"] == 10  # kept for the backward pass ...
    assert seen.operations["exp.default"] == 20  # ... which was watched as well
    assert seen.elements == chunk * vocab


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_in_half_precision_are_those_of_rounded_numbers(has_bias: bool) -> None:
    # What an accelerator computes: hidden states and weight rounded to bfloat16, the rest in float32.
    leaves = [leaf.detach().float().requires_grad_() for leaf in inputs(bias=True)]
    rounded = [leaf.detach().to(torch.bfloat16).float().requires_grad_() for leaf in leaves]
    bias = leaves[2].detach() if has_bias else None
    ours = Head(leaves[1], bias, product_dtype=torch.bfloat16).log_probs(
        leaves[0], targets(), temperature=0.8
    )
    logits = rounded[0] @ rounded[1].T
    logits = (logits if bias is None else logits + bias) / 0.8
    every = torch.log_softmax(logits, dim=-1)
    wanted = every.gather(-1, targets()[:, None])[:, 0], -(every.exp() * every).sum(-1)
    # The product itself is rounded on a CPU, where it has no output in float32.
    torch.testing.assert_close(ours, wanted, atol=0.05, rtol=0.02)
    loss, wanted_loss = (pair[0].sum() + 0.3 * pair[1].sum() for pair in (ours, wanted))
    grads = torch.autograd.grad(loss, leaves[:2])
    wanted_grads = torch.autograd.grad(wanted_loss, rounded[:2])
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, other, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("vocab", [1000, 8192, 100_000, 151_936, 1 << 24])
def test_a_chunk_on_a_cpu_comes_from_the_system(vocab: int) -> None:
    rows = head.chunk_rows(vocab, torch.device("cpu"))
    assert (rows - 1) * vocab * 4 < 32 << 20 <= rows * vocab * 4


@pytest.mark.parametrize(
    ("vocab", "rows"), [(1000, 268_432), (151_936, 1760), (1 << 24, 16), (1 << 25, 8), (1 << 30, 1)]
)
def test_chunks_on_an_accelerator_begin_at_aligned_addresses(vocab: int, rows: int) -> None:
    # 2^28 logits at most; of 16 rows at a time where there are so many
    assert head.chunk_rows(vocab, torch.device("cuda")) == rows
