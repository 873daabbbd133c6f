"""Routers of the Megatron engine: losses, loads and replayed experts are those of the torch engine in one process."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_megatron_engine import Mesh
from torch import Tensor

from references.engine_steps import PAIRS, Setting, engine_of
from references.language_models import config, exact_norms, save_model
from references.own_ranks import own_ranks
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import MoEConfig
from strop.engines.kinds import TrainableEngine
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import alone
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.workers.routers import ExpertLoads, loss_parts, router_loss

__all__ = ["own_ranks"]  # the fixture

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
MOE = MoEConfig(balance_loss_coef=0.7, z_loss_coef=0.3)
NO_LOSSES = MoEConfig()
CLOSE = {"atol": 1e-6, "rtol": 1e-6}
"""Routers of megatron-core and transformers take their softmax in float32, those of the losses are in float64."""
LAYERS, CHOSEN = 3, 2
"""Layers with experts, and experts of a token in each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which the second one has no experts, so that numbers of layers and of routers differ."""
    folder = tmp_path_factory.mktemp("experts")
    shape = config("qwen3_moe")
    shape.num_hidden_layers, shape.mlp_only_layers = 4, [1]
    save_model(shape, folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one optimizer step on a batch says, and the weights after it."""

    log_probs: Tensor
    """[N] of the rank's rows, before."""
    counts: Tensor
    """[L, E] of all rows, before."""
    loss: float
    """Of the policy, on this rank's rows."""
    of_routers: float
    parts: dict[str, float]
    loads: dict[str, float]
    grad_norm: float
    weights: dict[str, Tensor]


def batch(*, routed: bool) -> DataProto:
    """All rows; with experts that are given at random, but for some tokens, whose routers choose."""
    rows = make_rows([torch.tensor(p) for p, _ in PAIRS], [torch.tensor(r) for _, r in PAIRS])
    if not routed:
        return rows
    experts = [torch.cat([experts_of(p), experts_of(r)[:-1]]) for p, r in PAIRS]  # prompts alike
    return rows.union(DataProto.from_dict({"routed_experts": columns.jagged(experts)}))


def experts_of(ids: tuple[int, ...]) -> Tensor:
    """[T, L k] of some tokens."""
    generator = torch.Generator().manual_seed(sum(ids))
    experts = torch.rand(len(ids), LAYERS, 4, generator=generator).argsort(-1)[..., :CHOSEN]
    is_free = torch.rand(len(ids), LAYERS, 1, generator=generator) < 0.2
    return experts.masked_fill(is_free, -1).flatten(1).short()


def learned(engine: TrainableEngine, moe: MoEConfig, *, routed: bool) -> Learned:
    """One step on this rank's share of the rows."""
    parallel, rows = engine.parallel, batch(routed=routed)
    mine = rows.take(torch.arange(parallel.dp_rank, len(rows), parallel.dp_size))
    engine.replays_routing = True

    def log_probs(tokens: Tokens) -> dict[str, Tensor]:
        return {"log_probs": tokens.log_probs(temperature=0.7)[0]}

    def loss(tokens: Tokens) -> Tensor:
        loads.add(tokens)
        return 0.001 * tokens.log_probs(temperature=0.7)[0].square().sum()

    loads = ExpertLoads()
    before = engine.map_tokens(mine, log_probs)["log_probs"]
    counts = engine.expert_counts(mine)
    of_routers = router_loss(engine, moe, mine)
    value = float(engine.accumulate(mine, loss, router_loss=of_routers))
    router_value, parts = loss_parts(of_routers, moe, engine)
    metrics = loads.metrics("actor", parallel, 1.0)
    report = engine.step()
    weights = engine.streamed_weights() or engine.model.named_parameters()
    return Learned(
        log_probs=before,
        counts=counts,
        loss=value,
        of_routers=router_value,
        parts={str(name): part for name, part in parts.items()},
        loads={name: mean.value for name, mean in metrics.items()},
        grad_norm=report.grad_norm,
        weights={name: weight.detach().clone() for name, weight in weights},
    )


def learned_on_ranks(ranks: Ranks, folder: str, mesh: Mesh, moe: MoEConfig, routed: bool) -> Learned:
    """In a rank."""
    from references.megatron_cpu import use_cpu

    use_cpu()
    from references.megatron_ranks import megatron_engine

    return learned(megatron_engine(ranks, folder, mesh), moe, routed=routed)


def by_torch(folder: Path, moe: MoEConfig, *, routed: bool) -> Learned:
    with exact_norms():
        return learned(engine_of(alone("cpu"), Setting(folder=str(folder))), moe, routed=routed)


def compare(folder: Path, mesh: Mesh, moe: MoEConfig, *, routed: bool) -> None:
    expected = by_torch(folder, moe, routed=routed)
    results = run_ranks(learned_on_ranks, mesh.size, str(folder), mesh, moe, routed, timeout_s=200)
    firsts = results[: mesh.size // mesh.pp : mesh.tp * mesh.cp]
    assert sum(result.loss for result in firsts) == pytest.approx(expected.loss, rel=1e-6)
    lengths = [len(response) for _, response in PAIRS]
    of_rows = expected.log_probs.split(lengths)
    for rank, result in enumerate(results):
        share = rank % (mesh.size // mesh.pp) // (mesh.tp * mesh.cp)
        torch.testing.assert_close(result.log_probs, torch.cat(of_rows[share :: mesh.dp]), **CLOSE)
        assert torch.equal(result.counts, expected.counts)
        assert result.of_routers == pytest.approx(expected.of_routers, rel=1e-6)
        assert result.parts == pytest.approx(expected.parts, rel=1e-6)
        assert result.loads == pytest.approx(expected.loads, abs=1e-12)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert result.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            torch.testing.assert_close(
                result.weights[name], weight, **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
            )


def sizes(mesh: Mesh) -> str:
    """Name of a test."""
    axes = {name: getattr(mesh, name) for name in ("tp", "pp", "chunks", "cp", "dp", "ep")}
    return "_".join(f"{name}{size}" for name, size in axes.items() if size > 1) or f"one{mesh.max_tokens}"


MESHES = [
    pytest.param(Mesh(), marks=pytest.mark.slow),
    Mesh(max_tokens=28, checkpointing=True),
    *(
        pytest.param(mesh, marks=pytest.mark.dist)
        for mesh in (
            Mesh(pp=2, max_tokens=28),
            Mesh(pp=2, chunks=2, max_tokens=28, checkpointing=True),
            Mesh(dp=2, ep=2),
            Mesh(tp=2, ep=2, max_tokens=28),
            Mesh(cp=2, ep=2),
            Mesh(tp=2, ep=2, pp=2, chunks=2, checkpointing=True),
        )
    ),
]


@pytest.mark.parametrize("mesh", MESHES, ids=sizes)
def test_losses_and_loads_are_those_of_the_torch_engine(folder: Path, mesh: Mesh) -> None:
    compare(folder, mesh, MOE, routed=False)


@pytest.mark.parametrize("mesh", MESHES, ids=sizes)
def test_tokens_go_to_the_experts_that_rows_name(folder: Path, mesh: Mesh) -> None:
    compare(folder, mesh, MOE, routed=True)


@pytest.mark.dist
def test_weights_of_chosen_experts_may_add_up_to_one(tmp_path: Path) -> None:
    """A softmax over the chosen ones alone, in place of all."""
    shape = config("qwen3_moe")
    shape.num_hidden_layers, shape.norm_topk_prob = LAYERS, True
    save_model(shape, tmp_path)
    compare(tmp_path, Mesh(pp=1, max_tokens=28), MOE, routed=True)


def test_losses_and_given_experts_change_the_step(folder: Path) -> None:
    """Of the torch engine, to which all others are compared: none of them is lost in the tolerance."""
    plain = by_torch(folder, NO_LOSSES, routed=False)
    with_losses = by_torch(folder, MOE, routed=False)
    given = by_torch(folder, MOE, routed=True)
    assert plain.grad_norm != pytest.approx(with_losses.grad_norm, rel=0.01)
    assert with_losses.loss != pytest.approx(given.loss, rel=0.01)
    assert not torch.equal(with_losses.counts, given.counts)
    gate = "model.layers.3.mlp.gate.weight"
    assert (plain.weights[gate] - with_losses.weights[gate]).abs().max() > 1e-3


@pytest.mark.dist
def test_loads_are_measured_without_losses(folder: Path) -> None:
    compare(folder, Mesh(pp=2), NO_LOSSES, routed=False)
