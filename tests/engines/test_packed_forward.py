"""Packed log-probs, entropies and gradients are those of the model run on one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references.language_models import SUPPORTED, VOCAB, load_plain, plain_log_probs
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.packing import make_rows, micro_batches, token_rows
from strop.engines.parallel.ranks import alone
from strop.engines.training import TrainEngine
from strop.protocol import DataProto

pytestmark = pytest.mark.usefixtures("float64_models")

Tiny = Callable[..., CausalLM]
Pair = tuple[list[int], list[int]]


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(pairs: Sequence[Pair]) -> DataProto:
    return make_rows([torch.tensor(p) for p, _ in pairs], [torch.tensor(r) for _, r in pairs])


# Three samples of one prompt, one of them a single token; two lone rows, one of them as short as can be; a pair.
# Longer than the window of the models that have one.
A, B, C, D = tokens(9, 1), tokens(1, 2), tokens(14, 3), tokens(6, 4)
PAIRS: list[Pair] = [
    (A, tokens(7, 11)),
    (B, tokens(1, 12)),
    (A, tokens(1, 13)),
    (C, tokens(12, 14)),
    (D, tokens(2, 15)),
    (A, tokens(13, 16)),
    (D, tokens(11, 17)),
]
NUM_TOKENS = sum(len(response) for _, response in PAIRS)


def loss(log_probs: Tensor, entropies: Tensor, token_index: Tensor) -> Tensor:
    """Weighted terms that are not linear in the log-probs; the weight depends on the token's place in the batch."""
    weight = torch.cos(1.0 + token_index.to(log_probs))
    return (weight * (log_probs + 0.3 * torch.exp(log_probs) + 0.2 * entropies)).sum()


def engine_of(model: CausalLM, max_tokens: int) -> TrainEngine:
    return TrainEngine(
        model, EngineConfig(max_tokens_per_device=max_tokens), OptimizerConfig(), total_steps=None
    )


def gradient(
    model: CausalLM, rows: DataProto, *, max_tokens: int, parts: Sequence[Sequence[int] | None] = (None,)
) -> tuple[float, Tensor]:
    """Loss and flat gradient of these rows; `parts`: in several calls, each with the rows of these numbers."""
    for _, parameter in model.named_parameters():
        parameter.grad = None
    engine, asked = engine_of(model, max_tokens), of_log_probs(loss, temperature=0.7)
    value = sum(float(engine.accumulate(rows, asked, rows=part)) for part in parts)
    return value, torch.cat([p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", SUPPORTED)
def test_packed_log_probs_equal_the_models_own_forward(
    tiny: Tiny, tiny_folder: Callable[[str], Path], kind: str
) -> None:
    plain = load_plain(tiny_folder(kind), dtype=torch.float64)
    with torch.no_grad():
        wanted = [plain_log_probs(plain, p, r, temperature=0.7) for p, r in PAIRS]
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        model = tiny(kind, dtype=dtype)
        log_probs, entropies = log_probs_of(model, rows_of(PAIRS), temperature=0.7, max_tokens=10_000)
        assert log_probs.dtype == getattr(torch, dtype)
        torch.testing.assert_close(
            log_probs.double(), torch.cat([w[0] for w in wanted]), atol=tolerance, rtol=tolerance
        )
        torch.testing.assert_close(
            entropies.double(), torch.cat([w[1] for w in wanted]), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kind", SUPPORTED)
def test_packed_gradient_equals_the_models_own(
    tiny: Tiny, tiny_folder: Callable[[str], Path], kind: str
) -> None:
    plain = load_plain(tiny_folder(kind), dtype=torch.float64)
    first = 0
    for prompt, response in PAIRS:
        log_probs, entropies = plain_log_probs(plain, prompt, response, temperature=0.7)
        loss(log_probs, entropies, torch.arange(first, first + len(response))).backward()
        first += len(response)
    wanted = {name: p.grad for name, p in plain.named_parameters()}

    model = tiny(kind)
    gradient(model, rows_of(PAIRS), max_tokens=40)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert wanted[name] is not None, name
        torch.testing.assert_close(parameter.grad, wanted[name], atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_eager_attention_is_the_same_without_a_fused_kernel(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    fused = tiny(kind)
    wanted = log_probs_of(fused, rows_of(PAIRS), temperature=0.7, max_tokens=60)
    wanted_loss = gradient(fused, rows_of(PAIRS), max_tokens=60)
    model = tiny(kind, attn_implementation="eager")

    def no_kernel(*arguments: object, **options: object) -> Tensor:
        raise AssertionError("a fused kernel was called")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_kernel)
    found = log_probs_of(model, rows_of(PAIRS), temperature=0.7, max_tokens=60)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    found_loss = gradient(model, rows_of(PAIRS), max_tokens=60)
    assert found_loss[0] == pytest.approx(wanted_loss[0], abs=1e-10)
    torch.testing.assert_close(found_loss[1], wanted_loss[1], atol=1e-10, rtol=1e-10)
    with pytest.raises(AssertionError, match="a fused kernel"):
        log_probs_of(fused, rows_of(PAIRS), temperature=0.7, max_tokens=60)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma3"])
def test_shared_prompt_equals_separate_prompts(tiny: Tiny, kind: str) -> None:
    model = tiny(kind)
    shared = rows_of(PAIRS)
    separate = [[row] for row in range(len(shared))]
    apart = sum(pack(shared, model, rows=row).num_tokens for row in separate)
    # Two copies of A (9 tokens) and one of D (6) are saved.
    assert apart - pack(shared, model).num_tokens == 2 * 9 + 6
    value, grad = gradient(model, shared, max_tokens=10_000)
    value_apart, grad_apart = gradient(model, shared, max_tokens=10_000, parts=separate)
    assert value == pytest.approx(value_apart, abs=1e-10)
    torch.testing.assert_close(grad, grad_apart, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("mistral", "float64", 1e-10),
        pytest.param("qwen3", "float64", 1e-10, marks=pytest.mark.slow),
        ("qwen3", "float32", 1e-5),
        pytest.param("mistral", "float32", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_any_token_budget_and_order_gives_the_same_numbers(
    tiny: Tiny, kind: str, dtype: str, tolerance: float
) -> None:
    model = tiny(kind, dtype=dtype)
    rows = rows_of(PAIRS)
    value, grad = gradient(model, rows, max_tokens=10_000)
    log_probs, entropies = log_probs_of(model, rows, temperature=0.7, max_tokens=10_000)
    scale = float(grad.abs().max())
    for max_tokens in (25, 26, 31, 50):
        numbers = list(range(len(rows)))
        for order in (numbers, numbers[::-1], [*numbers[3:], *numbers[:3]]):
            cut = micro_batches(rows, max_tokens=max_tokens, parallel=alone("cpu"), rows=order)
            assert len(cut) > 1
            other_value, other_grad = gradient(model, rows, max_tokens=max_tokens, parts=[order])
            assert other_value == pytest.approx(value, abs=tolerance * NUM_TOKENS)
            torch.testing.assert_close(other_grad, grad, atol=tolerance * max(1, scale), rtol=tolerance)
            again = log_probs_of(model, rows, temperature=0.7, max_tokens=max_tokens, rows=order)
            torch.testing.assert_close(again, (log_probs, entropies), atol=tolerance, rtol=tolerance)


lengths = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12)),  # which prompt, response tokens
    min_size=1,
    max_size=9,
)


@pytest.mark.draws
@settings(max_examples=draws(25, by_default=8), deadline=None)
@given(rows=lengths, prompts=st.lists(st.integers(1, 12), min_size=4, max_size=4), data=st.data())
def test_any_cut_of_any_rows_gives_the_same_gradient(
    tiny_qwen: CausalLM, rows: list[tuple[int, int]], prompts: list[int], data: st.DataObject
) -> None:
    pairs = [
        (tokens(prompts[which], which), tokens(length, 100 + index))
        for index, (which, length) in enumerate(rows)
    ]
    batch = rows_of(pairs)
    longest = max(len(row) for row in token_rows(batch))
    budget = data.draw(st.integers(longest, longest + 40), label="budget")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(batch)), max_size=3), label="cuts"))
    value, grad = gradient(tiny_qwen, batch, max_tokens=10_000)

    # The same rows in several calls, as in gradient accumulation, each under a token budget.
    parts = [range(a, b) for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    total, other = gradient(tiny_qwen, batch, max_tokens=budget, parts=parts)
    assert total == pytest.approx(value, abs=1e-10)
    torch.testing.assert_close(other, grad, atol=1e-10, rtol=1e-10)


@pytest.fixture(scope="module")
def tiny_qwen(tiny_folder: Callable[[str], Path], float64_models: None) -> CausalLM:
    return load_model(ModelConfig(path=str(tiny_folder("qwen3")), dtype="float64"), device="cpu")


def test_no_rows_cost_nothing(tiny: Tiny) -> None:
    model = tiny("qwen3")
    assert engine_of(model, 10).accumulate(rows_of([]), of_log_probs(loss, temperature=1.0)) == 0.0
    log_probs, entropies = log_probs_of(model, rows_of([]), temperature=1.0, max_tokens=10)
    assert (log_probs.shape, entropies.shape) == ((0,), (0,))


def test_gradient_checkpointing_changes_no_gradient(tiny: Tiny) -> None:
    for kind in ("qwen3", "opt"):  # opt keeps dropout rates that its training mode would use
        _, grad = gradient(tiny(kind), rows_of(PAIRS), max_tokens=40)
        _, again = gradient(tiny(kind, gradient_checkpointing=True), rows_of(PAIRS), max_tokens=40)
        torch.testing.assert_close(again, grad, atol=1e-12, rtol=1e-12)


def test_bfloat16_stays_near_float32(tiny: Tiny) -> None:
    # bfloat16 has 8 bits of precision: a relative error of 2^-9 = 0.002 per operation, some ten layers of them,
    # on log-probs of size 4 (log 61). Seen: 0.05 at most.
    exact, _ = log_probs_of(tiny("qwen3", dtype="float32"), rows_of(PAIRS), temperature=1.0, max_tokens=99)
    model = tiny("qwen3", dtype="bfloat16")
    rough, entropies = log_probs_of(model, rows_of(PAIRS), temperature=1.0, max_tokens=99)
    assert rough.dtype == entropies.dtype == torch.float32
    assert 1e-4 < float((rough - exact).abs().max()) < 0.3
    _, grad = gradient(model, rows_of(PAIRS), max_tokens=40)
    _, exact_grad = gradient(tiny("qwen3", dtype="float32"), rows_of(PAIRS), max_tokens=40)
    assert grad.dtype == torch.float32  # master weights and their gradients
    assert float(torch.cosine_similarity(grad, exact_grad, dim=0)) > 0.99
