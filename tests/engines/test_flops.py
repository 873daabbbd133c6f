"""Operations of a pass: by hand, and those of the very pass that is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from references.token_passes import TEXT_MODEL
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, LoraConfig, OptimizerConfig
from strop.engines.flops.work import model_work, num_pairs
from strop.engines.lora.adapters import add_lora
from strop.engines.micro_batch import pack
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto


def rows_of(*sizes: tuple[int, int], shared: bool = False) -> DataProto:
    """Rows of (prompt, response) tokens; `shared`: of one prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.full((prompt,), 5) if shared else torch.randint(0, 61, (prompt,), generator=generator)
        for prompt, _ in sizes
    ]
    return make_rows(prompts, [torch.randint(0, 61, (size,), generator=generator) for _, size in sizes])


def seen(length: int, window: int | None) -> int:
    return sum(
        1 for query in range(length) for key in range(query + 1) if window is None or key > query - window
    )


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_pairs_of_rows_by_hand(window: int | None) -> None:
    rows = rows_of((4, 3), (6, 9))
    assert num_pairs(pack(rows, TEXT_MODEL).attention.segments, window) == seen(4 + 2, window) + seen(
        6 + 8, window
    )


@pytest.mark.parametrize("window", [None, 3])
def test_a_shared_prompt_is_computed_once(window: int | None) -> None:
    rows = rows_of((5, 3), (5, 7), shared=True)
    behind = seen(5 + 2, window) + seen(5 + 6, window) - 2 * seen(5, window)
    assert num_pairs(pack(rows, TEXT_MODEL).attention.segments, window) == seen(5, window) + behind


def total(tokens: Tokens) -> Tensor:
    return tokens.log_probs(temperature=1.0)[0].sum()


class Products(TorchDispatchMode):
    """Counts the operations of products of two matrices."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            (m, k), (_, n) = args[-2].shape, args[-1].shape
            self.operations += 2 * m * k * n
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "rank"), [("qwen3", 0), ("gpt2", 0), ("qwen3", 2)])
def test_products_with_weights_are_those_that_are_run(
    family: str, rank: int, tiny: Callable[..., CausalLM]
) -> None:
    model = tiny(family, dtype="float32")
    if rank:
        add_lora(model, LoraConfig(rank=rank))
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(), total_steps=1)
    work = model_work(model)
    assert work is not None
    rows = rows_of((4, 3), (6, 9))
    with Products() as products:
        engine.accumulate(rows, total)
    once_more = 2 * work.head * 12  # the head's logits are computed again in the backward pass
    unneeded = unneeded_below_the_first_adapter(model) * 20 if rank else 0
    tokens = pack(rows, model)
    of_weights = work.training(tokens) - 3 * work.attention(tokens)
    assert products.operations == of_weights + once_more - unneeded


def unneeded_below_the_first_adapter(model: CausalLM) -> int:
    """Per token: nothing flows back from the first layer's projections of the input, below which nothing is trained."""
    first = model.layers[0].self_attn
    layers = [getattr(first, name) for name in ("q_proj", "k_proj", "v_proj")]
    return sum(
        2 * p.numel() for layer in layers for p in layer.parameters() if p.dim() == 2 and p.shape[1] == 32
    )


def test_a_token_goes_through_the_experts_that_are_chosen(tiny: Callable[..., CausalLM]) -> None:
    model = tiny("mixtral", dtype="float32")
    config = model.config
    work = model_work(model)
    assert work is not None
    width, inner, heads, groups = (
        32,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    attention = 2 * width * (width // heads) * (heads + groups)
    experts = config.num_experts_per_tok * 3 * width * inner + config.num_local_experts * width
    assert config.num_experts_per_tok < config.num_local_experts
    assert work.dense == config.num_hidden_layers * (attention + experts)
    assert work.head == config.vocab_size * width


def test_attention_by_hand(tiny: Callable[..., CausalLM]) -> None:
    model = tiny("qwen3", dtype="float32")
    config = model.config
    work = model_work(model)
    assert work is not None
    rows = rows_of((4, 3))
    pairs = 6 * 7 // 2
    per_pair = (
        2 * config.num_attention_heads * (config.head_dim + config.head_dim)
    )  # scores, and weighted values
    assert work.attention(pack(rows, model)) == config.num_hidden_layers * per_pair * pairs
    plain = 2 * (work.dense * 6 + work.head * 3) + work.attention(pack(rows, model))
    assert work.forward(pack(rows, model)) == plain
    assert work.training(pack(rows, model)) == 3 * plain


def test_what_is_not_attention_has_no_count(tiny: Callable[..., CausalLM]) -> None:
    model = tiny("qwen3", dtype="float32")
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert model_work(model) is None
