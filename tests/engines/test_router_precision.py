"""Routers in half precision, and biases by which they choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.half_weights import hold_half
from strop.engines.linear_attention.packed import _WideProducts
from strop.engines.model import load_model, weights_of_folder
from strop.engines.moe.layers import is_choice_bias, moe_layers
from strop.engines.moe.precision import _multiplies_wide
from strop.engines.packing import make_rows
from strop.engines.parallel.fsdp import full_parameters
from strop.engines.training import TrainEngine
from strop.engines.weights import named_weights, weights_metadata


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3_experts", "ernie4_5_moe", "glm4_moe"])
def test_routers_written_in_float32_multiply_in_it_also_where_the_model_computes_in_bfloat16(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    # A model of transformers in bfloat16 has rounded states and rounded weights, and multiplies them in float32.
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="bfloat16"), device="cpu")
    router: Any = moe_layers(model.module)[0].router
    hidden = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with model.precision():
        logits = router(hidden)[0]
    assert logits.dtype == torch.float32
    wanted = F.linear(hidden[0].bfloat16().float(), router.weight.bfloat16().float())
    if logits.ndim == 2 and torch.allclose(logits.sum(-1), torch.ones(7)):  # the probabilities of them
        wanted = wanted.softmax(-1)
    torch.testing.assert_close(logits.reshape(7, -1), wanted, rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    assert router.weight.grad.dtype == torch.float32
    assert router.weight.grad.any()


def test_routers_written_in_the_precision_of_their_model_keep_it(
    tiny_folder: Callable[[str], Path],
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder("qwen3_moe")), dtype="bfloat16"), device="cpu")
    router: Any = moe_layers(model.module)[0].router
    with model.precision():
        assert router(torch.randn(1, 7, 32))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "name"), [("ernie4_5_moe", "e_score_correction_bias"), ("afmoe", "expert_bias")]
)
def test_biases_of_choices_are_not_moved_by_weight_decay(
    tiny_folder: Callable[[str], Path], kind: str, name: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    biases = {n: p.detach().clone() for n, p in named_weights(model.module).items() if n.endswith(name)}
    assert biases
    assert all(bias.any() for bias in biases.values())
    optim = OptimizerConfig(lr=0.1, weight_decay=0.5)
    TrainEngine(model, EngineConfig(), optim, total_steps=None).step()
    after = named_weights(model.module)
    for n, bias in biases.items():
        assert torch.equal(after[n], bias), n


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_a_checkpoint_with_moments_of_biases_of_choices_is_gone_on_from(
    tiny_folder: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    """Earlier versions trained these biases."""
    optim = OptimizerConfig(lr=0.1)
    model = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    for part in model.module.modules():
        for name, bias in list(part.named_buffers(recurse=False)):
            if is_choice_bias(name):
                delattr(part, name)
                part.register_parameter(name, torch.nn.Parameter(bias))
    old = TrainEngine(model, EngineConfig(), optim, total_steps=None)
    old.step()
    old.save_state(tmp_path / "role")
    again = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    engine = TrainEngine(again, EngineConfig(), optim, total_steps=None)
    engine.load_state(tmp_path / "role")
    moments = engine.optimizer.state()[0]
    assert moments
    assert not any(is_choice_bias(name) for name in moments)
    for name, tensor in old.optimizer.state()[0].items():
        if not is_choice_bias(name):
            assert torch.equal(moments[name], tensor), name


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_biases_of_choices_are_wide_in_a_frozen_model_over_ranks(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="bfloat16"), device="cpu")
    hold_half(model, device=torch.device("cpu"), is_sharded=True)
    types = {is_choice_bias(name): weight.dtype for name, weight in named_weights(model.module).items()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def _types(part: torch.nn.Module) -> set[tuple[bool, torch.dtype]]:
    named = [*part.named_parameters(), *part.named_buffers()]  # a state dict would free what is gathered
    return {(is_choice_bias(name), weight.dtype) for name, weight in named}


def _seen_over_ranks(ranks: Ranks, folder: str) -> list[set[tuple[bool, torch.dtype]]]:
    """Types of the weights of a layer with experts, by whether they are biases of choices: in a pass, in generation,
    and behind a step."""
    parallel = ranks.join()
    model = load_model(ModelConfig(path=folder, dtype="bfloat16"), device="cpu", parallel=parallel)
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=0.1), total_steps=None, parallel=parallel)
    (part,) = (layer for name, layer in model.module.named_modules() if name.endswith("layers.1.mlp"))
    seen: list[set[tuple[bool, torch.dtype]]] = []
    handle = part.register_forward_pre_hook(lambda part, args: seen.append(_types(part)))
    log_probs_of(engine, make_rows([torch.tensor([3, 4])], [torch.tensor([5, 6, 7])]), temperature=1.0)
    handle.remove()
    with full_parameters(model):
        seen.append(_types(part))
    engine.step()
    return [*seen, _types(part)]


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_biases_of_choices_are_wide_in_a_model_that_learns_over_ranks(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    gathered = {(True, torch.float32), (False, torch.bfloat16)}
    for passed, generating, behind in run_ranks(_seen_over_ranks, 2, str(tiny_folder(kind))):
        assert passed == generating == gathered
        assert behind == {(True, torch.float32), (False, torch.float32)}


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_weights_of_a_folder_with_biases_of_choices_are_those_of_its_model(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    config = ModelConfig(path=str(tiny_folder(kind)))
    held = weights_metadata(load_model(config, device="cpu").module)
    assert weights_of_folder(config) == held
    assert any(is_choice_bias(name) for name in held.by_name)


class _OfSequences(torch.nn.Module):
    """A router that takes hidden states [B, T, D] alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = hidden.shape
        return F.linear(hidden.view(rows * tokens, width).float(), self.weight.float())


def test_a_router_of_another_form_is_left_as_it_is() -> None:
    assert not _multiplies_wide(_OfSequences())


class _ByOperator(torch.nn.Module):
    """A router that is written without a linear map."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, wide: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 8))
        self._product, self._wide = product, wide

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return self._product(hidden.float(), weight.float()) if self._wide else self._product(hidden, weight)


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "operator": lambda hidden, weight: hidden @ weight.T,
    "matmul": lambda hidden, weight: torch.matmul(hidden, other=weight.T),
    "mm": lambda hidden, weight: hidden.mm(weight.T),
    "einsum": lambda hidden, weight: torch.einsum("td,ed->te", hidden, weight),
    "einsum of a list": lambda hidden, weight: torch.einsum("td,ed->te", [hidden, weight]),
    "linear": lambda hidden, weight: F.linear(input=hidden, weight=weight),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_any_form_tell_whether_a_router_multiplies_in_float32(name: str) -> None:
    assert _multiplies_wide(_ByOperator(PRODUCTS[name], wide=True))
    assert not _multiplies_wide(_ByOperator(PRODUCTS[name], wide=False))


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "linear"])
def test_products_of_linear_attention_in_float32_are_not_rounded(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 8, generator=generator), torch.randn(4, 8, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16), _WideProducts():
        wide, half = PRODUCTS[name](hidden, weight), PRODUCTS[name](hidden.bfloat16(), weight)
    assert torch.equal(wide, PRODUCTS[name](hidden, weight))
    assert half.dtype == torch.bfloat16
