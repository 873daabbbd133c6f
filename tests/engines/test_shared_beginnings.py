"""Rows that begin alike, computed together: log-probs and gradients are those of each row alone, for any tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references.language_models import VOCAB, load_plain, plain_log_probs
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.head import Head
from strop.engines.micro_batch import pack
from strop.engines.model import load_model
from strop.engines.moe.losses import RouterLoss
from strop.engines.packing import make_rows, micro_batches
from strop.engines.parallel.ranks import alone
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.engines.value_models import load_value_model
from strop.protocol import DataProto

pytestmark = pytest.mark.usefixtures("float64_models")
SLOW = pytest.mark.slow
Tiny = Callable[..., CausalLM]
Pair = tuple[list[int], list[int]]


def tree(depth: int, branching: int, lengths: Sequence[int], seed: int = 0) -> list[Pair]:
    """Rows of all ways from the root to a leaf; node k of a way has lengths[k] tokens."""
    generator = torch.Generator().manual_seed(seed)
    ways: list[list[list[int]]] = [[]]
    for level in range(depth):
        grown = []
        for way in ways:
            for _ in range(branching if level else 1):
                run = torch.randint(0, VOCAB, (lengths[level],), generator=generator).tolist()
                grown.append([*way, run])
        ways = grown
    return [(way[0], [token for run in way[1:] for token in run]) for way in ways]


def episode(seed: int = 5) -> list[Pair]:
    """Rows of the turns of an episode, each behind all that was before, and of one with its history rewritten."""
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    turns = [(tokens[:a], tokens[a:b]) for a, b in ((6, 11), (14, 19), (22, 30))]
    return [*turns, (tokens[:14] + tokens[30:34], tokens[34:40])]


IN_FLOAT32 = 1e-4
"""Tolerance for models of which parts compute in float32 whatever they are given."""

# Trees of four levels and of two, turns, a row twice, a row alone.
ROWS = [*tree(4, 2, (5, 3, 4, 2)), *episode(), *tree(2, 3, (9, 7), seed=1), *episode(), ([3], [4])]


def rows_of(pairs: Sequence[Pair]) -> DataProto:
    return make_rows([torch.tensor(p) for p, _ in pairs], [torch.tensor(r) for _, r in pairs])


def loss(log_probs: Tensor, entropies: Tensor, token_index: Tensor) -> Tensor:
    """Terms that are not linear, with a weight of each token of each row: also of one that several rows share."""
    weight = torch.cos(1.0 + token_index.to(log_probs))
    return (weight * (log_probs + 0.3 * torch.exp(log_probs) + 0.2 * entropies)).sum()


POLICY_LOSS = of_log_probs(loss, temperature=0.7)


def gradient(
    model: CausalLM,
    rows: DataProto,
    asked: Callable[[Tokens], Tensor] = POLICY_LOSS,
    *,
    max_tokens: int = 10_000,
    apart: bool = False,
    router_loss: Callable[[], RouterLoss] | None = None,
) -> tuple[float, Tensor]:
    """Loss and flat gradient of these rows, together or one after the other."""
    for _, parameter in model.named_parameters():
        parameter.grad = None
    config = EngineConfig(max_tokens_per_device=max_tokens)
    engine = TrainEngine(model, config, OptimizerConfig(), total_steps=None)
    parts = [[row] for row in range(len(rows))] if apart else [None]
    given = None if router_loss is None else router_loss()
    value = sum(float(engine.accumulate(rows, asked, rows=part, router_loss=given)) for part in parts)
    return value, torch.cat([p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None])


def check(
    model: CausalLM,
    rows: DataProto,
    asked: Callable[[Tokens], Tensor] = POLICY_LOSS,
    *,
    budgets: Sequence[int] = (10_000,),
    tolerance: float = 1e-10,
    router_loss: Callable[[], RouterLoss] | None = None,
) -> None:
    """Whatever rows are computed together, loss and gradient are those of each alone."""
    value, grad = gradient(model, rows, asked, apart=True, router_loss=router_loss)
    assert float(grad.abs().max()) > 1e-3
    for budget in budgets:
        shared_value, shared_grad = gradient(model, rows, asked, max_tokens=budget, router_loss=router_loss)
        assert shared_value == pytest.approx(value, abs=tolerance)
        torch.testing.assert_close(shared_grad, grad, atol=tolerance, rtol=tolerance)


# Grouped key heads; as many key heads as heads; one; windows; both kinds of layers; learned positions; experts; chunks;
# capped scores; sinks; a state from token to token.
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("qwen3", 1e-10),
        pytest.param("llama_mqa", 1e-10, marks=pytest.mark.slow),
        pytest.param("mistral", 1e-10, marks=pytest.mark.slow),
        ("gemma3", 1e-10),
        ("qwen3_moe", 1e-10),
        ("qwen3_next_hybrid", IN_FLOAT32),
        pytest.param("qwen3_mha", 1e-10, marks=SLOW),
        pytest.param("gpt2", 1e-10, marks=SLOW),
        pytest.param("mixtral", 1e-10, marks=SLOW),
        pytest.param("llama4", IN_FLOAT32, marks=SLOW),
        pytest.param("gemma2", 1e-10, marks=SLOW),
        pytest.param("gpt_oss", 1e-10, marks=SLOW),
    ],
)
def test_gradients_are_those_of_each_row_alone(tiny: Tiny, kind: str, tolerance: float) -> None:
    model, rows = tiny(kind), rows_of(ROWS)
    apart = sum(pack(rows, model, rows=[row]).num_tokens for row in range(len(rows)))
    assert 2 * pack(rows, model).num_tokens < apart
    check(model, rows, budgets=(10_000, 70, 40), tolerance=tolerance)


def test_budgets_cut_the_trees_of_the_tests() -> None:
    for budget, count in ((70, 2), (40, 3)):
        parts = micro_batches(rows_of(ROWS), max_tokens=budget, parallel=alone("cpu"))
        assert len(parts) >= count
        assert max(map(len, parts)) > 1


# Few ids, so that rows begin alike in many ways, end within others and are equal.
any_rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=7),
        st.lists(st.integers(0, 2), min_size=1, max_size=7),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.draws
@settings(max_examples=draws(12, by_default=4), deadline=None)
@given(pairs=any_rows, spare=st.integers(0, 20), kind=st.sampled_from(["qwen3", "mistral", "qwen3_moe"]))
def test_any_rows_and_any_budget(
    tiny_folder: Callable[[str], Path], pairs: list[Pair], spare: int, kind: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="float64"), device="cpu")
    longest = max(len(prompt) + len(response) - 1 for prompt, response in pairs)
    check(model, rows_of(pairs), budgets=(10_000, longest + spare))


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"attn_implementation": "eager"}])
def test_the_same_with_other_ways_to_compute(tiny: Tiny, options: dict[str, Any]) -> None:
    _, grad = gradient(tiny("qwen3"), rows_of(ROWS), apart=True)
    _, again = gradient(tiny("qwen3", **options), rows_of(ROWS), max_tokens=70)
    torch.testing.assert_close(again, grad, atol=1e-10, rtol=1e-10)


def test_the_same_of_adapters(tiny: Tiny) -> None:
    model = tiny("qwen3", lora=LoraConfig(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for _, p in model.named_parameters() if p.requires_grad):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    check(model, rows_of(ROWS), budgets=(10_000, 40))


def test_the_same_of_the_losses_of_routers(tiny: Tiny) -> None:
    model, rows = tiny("qwen3_moe"), rows_of(ROWS)
    assert model.routers is not None
    num_layers, num_experts = model.routers.num_layers, model.routers.num_experts
    shares = torch.linspace(1, 2, num_layers * num_experts, dtype=torch.float64).view(num_layers, num_experts)
    losses = partial(
        RouterLoss, z_coef=0.3, balance_coef=0.7, num_tokens=100, shares=shares / shares.sum(1, keepdim=True)
    )
    check(model, rows, budgets=(10_000, 40), router_loss=losses)


def test_values_before_shared_tokens(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("qwen3_score"))
    model = load_value_model(ModelConfig(path=folder, dtype="float64"), device="cpu")

    def value_loss(tokens: Tokens) -> Tensor:
        weight = torch.cos(1.0 + tokens.response_index.double())
        return ((tokens.values() - weight) ** 2).sum()

    check(model, rows_of(ROWS), value_loss, budgets=(10_000, 40))


def test_rows_that_share_a_token_may_ask_for_different_ones_there(tiny: Tiny) -> None:
    """As for distillation: three tokens in the place of each, of each row."""
    model, rows = tiny("qwen3"), rows_of(ROWS)
    num_tokens = sum(len(response) for _, response in ROWS)
    chosen = torch.randint(0, VOCAB, (num_tokens, 3), generator=torch.Generator().manual_seed(1))

    def asked(tokens: Tokens) -> dict[str, Tensor]:
        log_probs, _, at = tokens.log_probs_at(chosen[tokens.response_index], temperature=0.7)
        return {"own": log_probs, "at": at.log_probs, "likely": at.is_likely}

    def chosen_loss(tokens: Tokens) -> Tensor:
        made = asked(tokens)
        weight = torch.cos(1.0 + tokens.response_index.double())[:, None]
        return (weight * made["at"].exp()).sum() + (weight[:, 0] * made["own"]).sum()

    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(), total_steps=None)
    together = engine.map_tokens(rows, asked)
    alone_each = [engine.map_tokens(rows, asked, rows=[row]) for row in range(len(rows))]
    for name, values in together.items():
        torch.testing.assert_close(
            values, torch.cat([made[name] for made in alone_each]), atol=1e-10, rtol=1e-10
        )
    check(model, rows, chosen_loss)


def test_a_row_of_the_head_has_the_chosen_tokens_of_one_row_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of eight asks for three tokens in the place of the first of each answer, which all eight share."""
    asked: list[tuple[int, ...]] = []
    run = Head.log_probs_at

    def counted(head: Head, hidden: Tensor, targets: Tensor, chosen: Tensor, **rest: Any) -> Any:
        asked.append(tuple(chosen.shape))
        return run(head, hidden, targets, chosen, **rest)

    monkeypatch.setattr(Head, "log_probs_at", counted)
    rows = rows_of([([5, 6, 7, 8], [1, 10 + row]) for row in range(8)])
    engine = TrainEngine(tiny("qwen3"), EngineConfig(), OptimizerConfig(), total_steps=None)
    chosen = torch.arange(48).view(16, 3)
    engine.map_tokens(
        rows, lambda tokens: {"own": tokens.log_probs_at(chosen[tokens.response_index], temperature=1.0)[0]}
    )
    assert asked == [(16, 3)]


def test_each_row_has_its_own_weight_on_a_token_that_rows_share(tiny: Tiny) -> None:
    """Two rows, equal but for their weights w: the gradient is that of one row with the sum of both."""
    model = tiny("qwen3")
    pair = ([3, 1, 4], [1, 5, 9, 2])

    def weighted(*weights: float) -> Callable[[Tokens], Tensor]:
        def asked(tokens: Tokens) -> Tensor:
            row = tokens.response_index // 4
            return (torch.tensor(weights)[row] * tokens.log_probs(temperature=1.0)[0]).sum()

        return asked

    assert pack(rows_of([pair, pair]), model).num_tokens == 6
    _, both = gradient(model, rows_of([pair, pair]), weighted(2.0, -0.5))
    _, one = gradient(model, rows_of([pair]), weighted(1.5))
    torch.testing.assert_close(both, one, atol=1e-12, rtol=1e-12)


def test_the_models_own_log_probs(tiny: Tiny, tiny_folder: Callable[[str], Path]) -> None:
    plain = load_plain(tiny_folder("qwen3"), dtype=torch.float64)
    with torch.no_grad():
        wanted = [plain_log_probs(plain, *pair, temperature=0.7) for pair in ROWS]
    log_probs, entropies = log_probs_of(tiny("qwen3"), rows_of(ROWS), temperature=0.7)
    torch.testing.assert_close(log_probs, torch.cat([w[0] for w in wanted]), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(entropies, torch.cat([w[1] for w in wanted]), atol=1e-10, rtol=1e-10)
