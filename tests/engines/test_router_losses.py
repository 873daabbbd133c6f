"""Losses of routers and loads of experts: those of plain autograd over single rows, whatever the cut and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from references.engine_steps import PAIRS, Setting, engine_of
from references.language_models import config, exact_norms, load_plain, save_model
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import MoEConfig
from strop.engines.gradients import full
from strop.engines.moe.losses import RouterLoss
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.tokens import Tokens
from strop.workers.routers import ExpertLoads, load_numbers, loss_parts, router_loss

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]
MOE = MoEConfig(balance_loss_coef=0.7, z_loss_coef=0.3)
NUM_TOKENS = sum(len(prompt) + len(response) - 1 for prompt, response in PAIRS)


def nothing(tokens: Tokens) -> Tensor:
    return 0 * tokens.log_probs(temperature=1.0)[0].sum()


def found(parallel: Parallel, setting: Setting) -> dict[str, Any]:
    """Gradient of the routers' loss alone, its value, and loads."""
    loads = ExpertLoads()

    def loss(tokens: Tokens) -> Tensor:
        loads.add(tokens)
        return nothing(tokens)

    with exact_norms():
        engine = engine_of(parallel, setting)
        mine = PAIRS[parallel.dp_rank :: parallel.dp_size]
        rows = make_rows([torch.tensor(p) for p, _ in mine], [torch.tensor(r) for _, r in mine])
        of_routers = router_loss(engine, MOE, rows)
        assert engine.accumulate(rows, loss, router_loss=of_routers) == 0
        if engine.model.pipeline is not None:
            engine.model.pipeline.add_shared_gradients()
        value, parts = loss_parts(of_routers, MOE, engine)
        gradients = {
            name: full(parameter.grad).detach().numpy().copy()
            for name, parameter in engine.model.named_parameters()
            if parameter.grad is not None
        }
        return {
            "gradients": gradients,
            "value": value,
            "parts": {str(name): part for name, part in parts.items()},
            "loads": {name: mean.value for name, mean in loads.metrics("actor", parallel, 1.0).items()},
        }


def found_on_ranks(ranks: Ranks, setting: Setting) -> dict[str, Any]:
    return found(ranks.join(**setting.axes), setting)


def plain(folder: Path, *, sigmoid: bool) -> dict[str, Any]:
    """The same from the papers, by hooks on the routers of transformers, over the rows one by one."""
    with exact_norms():
        module = load_plain(folder, dtype=torch.float64)
        module.set_experts_implementation("eager")
        of_layers: dict[int, list[tuple[Tensor, Tensor]]] = {}
        routers = [part for name, part in module.named_modules() if name.endswith("mlp.gate")]
        routers = [part for part in routers if hasattr(part, "top_k")]
        for number, router in enumerate(routers):
            router.register_forward_hook(
                lambda _, __, output, n=number: of_layers.setdefault(n, []).append((output[0], output[2]))
            )
        for prompt, response in PAIRS:
            module(input_ids=torch.tensor([[*prompt, *response[:-1]]]))
        z_loss, balance = torch.zeros(()).double(), torch.zeros(()).double()
        worst = 0.0
        for rows in of_layers.values():
            logits, index = (torch.cat(parts) for parts in zip(*rows, strict=True))
            logits = logits.double()
            assert len(logits) == NUM_TOKENS
            scores = logits.sigmoid() if sigmoid else logits.exp()
            probabilities = scores / scores.sum(-1, keepdim=True)
            z_loss = z_loss + logits.exp().sum(-1).log().square().mean()
            counts = torch.tensor([int((index == e).sum()) for e in range(logits.shape[1])])
            share = counts / index.numel()
            balance = balance + logits.shape[1] * (share * probabilities.mean(0)).sum()
            worst = max(worst, float(counts.max() / counts.double().mean()))
        value = MOE.z_loss_coef * z_loss + MOE.balance_loss_coef * balance
        value.backward()  # type: ignore[no-untyped-call]
        return {
            "gradients": {
                name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None
            },
            "value": float(value.detach()),
            "z_loss": float(z_loss.detach()) / len(of_layers),
            "balance_loss": float(balance.detach()) / len(of_layers),
            "max_load": worst,
        }


def check(result: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert result["value"] == pytest.approx(expected["value"], rel=1e-7)
    for name in ("z_loss", "balance_loss"):
        part = next(part for metric, part in result["parts"].items() if metric.endswith(name))
        assert part == pytest.approx(expected[name], rel=1e-7)
    assert result["loads"]["actor/moe/max_load"] == pytest.approx(expected["max_load"])
    for name, gradient in expected["gradients"].items():
        np.testing.assert_allclose(result["gradients"][name], gradient, atol=tolerance, err_msg=name)
    assert max(np.abs(gradient).max() for gradient in expected["gradients"].values()) > 0.01


@pytest.mark.parametrize(
    "setting", [{}, {"max_tokens": 28}, {"checkpointing": True, "max_tokens": 40}], ids=str
)
def test_gradient_of_one_process_is_that_of_the_papers_whatever_the_cut(
    tiny_folder: Folder, setting: dict[str, Any]
) -> None:
    folder = tiny_folder("qwen3_moe")
    expected = plain(folder, sigmoid=False)
    # Softmax of transformers' own router is in float32, that of the loss here is not.
    check(found(alone("cpu"), Setting(folder=str(folder), **setting)), expected, tolerance=1e-6)


def test_probabilities_of_a_router_with_sigmoids(tiny_folder: Folder) -> None:
    folder = tiny_folder("glm4_moe")
    check(found(alone("cpu"), Setting(folder=str(folder))), plain(folder, sigmoid=True), tolerance=1e-5)


@pytest.mark.parametrize(
    "axes",
    [
        {"ep_size": 2, "tp_size": 2},
        {"sp_size": 2},
        *(pytest.param(axes, marks=SLOW) for axes in ({}, {"ep_size": 2}, {"tp_size": 2}, {"cp_size": 2})),
    ],
    ids=str,
)
def test_two_ranks_have_the_gradient_of_one_process(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = found(alone("cpu"), Setting(folder=folder))
    cut = Setting(folder=folder, max_tokens=28, checkpointing=True, **axes)  # type: ignore[arg-type]
    check_ranks(run_ranks(found_on_ranks, 2, cut), expected)


def check_ranks(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All ranks have the numbers of one process, and the gradients of the layers that they have."""
    for result in results:
        assert result["value"] == pytest.approx(expected["value"], abs=1e-10)
        assert result["parts"] == pytest.approx(expected["parts"], abs=1e-10)
        assert result["loads"] == pytest.approx(expected["loads"], abs=1e-12)
        for name, gradient in result["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], atol=1e-10, err_msg=name)
    assert {name for result in results for name in result["gradients"]} == set(expected["gradients"])


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer and fourth one have no experts, so that a stage may have no router."""
    folder = tmp_path_factory.mktemp("five")
    shape = config("qwen3_moe")
    shape.num_hidden_layers, shape.mlp_only_layers = 5, [0, 3]
    save_model(shape, folder)
    return folder


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param({"layers": (1, 4), "checkpointing": False}, marks=pytest.mark.slow),
        {"chunks": 2, "max_tokens": 28, "checkpointing": True},
        {"schedule": "zero_bubble", "max_tokens": 28, "checkpointing": True},
        pytest.param({"layers": (3, 2), "max_tokens": 28, "checkpointing": True}, marks=SLOW),
        pytest.param({"chunks": 2, "layers": (1, 1, 1, 2), "max_tokens": 28}, marks=SLOW),
    ],
    ids=str,
)
def test_stages_have_the_gradient_of_one_process(five_layers: Path, stages: dict[str, Any]) -> None:
    expected = found(alone("cpu"), Setting(folder=str(five_layers)))
    check_ranks(run_ranks(found_on_ranks, 2, Setting(folder=str(five_layers), pp_size=2, **stages)), expected)


@pytest.mark.dist
@pytest.mark.parametrize("axes", [{}, {"ep_size": 2}, {"tp_size": 2}, {"cp_size": 2}], ids=str)
def test_stages_of_two_ranks_have_the_gradient_of_one_process(
    five_layers: Path, axes: dict[str, int]
) -> None:
    folder = str(five_layers)
    expected = found(alone("cpu"), Setting(folder=folder))
    cut = Setting(folder=folder, pp_size=2, chunks=2, max_tokens=28, checkpointing=True, **axes)  # type: ignore[arg-type]
    check_ranks(run_ranks(found_on_ranks, 4, cut), expected)


def test_terms_by_hand() -> None:
    """Two tokens, two experts: logits (0, log 3) and (0, 0); the first is part of three rows. f = (1/4, 3/4)."""
    loss = RouterLoss(z_coef=2.0, balance_coef=4.0, num_tokens=4, shares=torch.tensor([[0.25, 0.75]]))
    logits = torch.tensor([[0.0, np.log(3.0)], [0.0, 0.0]], dtype=torch.float64)
    rows = torch.tensor([3, 1])
    z = (3 * np.log(4.0) ** 2 + np.log(2.0) ** 2) / 4
    p_1 = (3 * 0.25 + 0.5) / 4
    balance = 2 * (0.25 * p_1 + 0.75 * (1 - p_1))
    term = loss.term(0, logits, is_sigmoid=False, num_rows=rows, is_new=True)
    assert float(term) == pytest.approx(2 * z + 4 * balance)
    assert loss.values.tolist() == pytest.approx([z, balance])
    # Sigmoids (1/2, 3/4) and (1/2, 1/2), over their sums.
    p_1 = (3 * 0.4 + 0.5) / 4
    balance = 2 * (0.25 * p_1 + 0.75 * (1 - p_1))
    term = loss.term(0, logits, is_sigmoid=True, num_rows=rows, is_new=False)
    assert float(term) == pytest.approx(2 * z + 4 * balance)
    assert loss.values.tolist()[0] == pytest.approx(z), "a layer that is computed again counts once"


def test_loads_by_hand() -> None:
    """Layer 1: 3, 1, 0, 0 of 4; layer 2: balanced."""
    numbers = {
        str(name): value for name, value in load_numbers(torch.tensor([[3, 1, 0, 0], [5, 5, 5, 5]])).items()
    }
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert numbers == pytest.approx(
        {
            "{actor,train}/moe/max_load": 3.0,
            "{actor,train}/moe/load_entropy": entropy,
            "{actor,train}/moe/unused_experts": 0.25,
        }
    )


def test_a_dense_model_has_no_losses_of_routers(tiny_folder: Folder) -> None:
    engine = engine_of(alone("cpu"), Setting(folder=str(tiny_folder("qwen3"))))
    rows = make_rows([torch.tensor(PAIRS[0][0])], [torch.tensor(PAIRS[0][1])])
    assert router_loss(engine, MoEConfig(), rows) is None
    with pytest.raises(ValueError, match="the choices of experts of Qwen3ForCausalLM are not known"):
        router_loss(engine, dataclasses.replace(MOE, z_loss_coef=0.0), rows)
