"""Optimizers on FSDP2's shards over gloo: the numbers of plain torch on whole parameters, the same on all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from references.rank_processes import Ranks, run_ranks
from references.token_passes import of_log_probs
from strop.engines import gradients
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.optimizer import Optimizer
from strop.engines.optimizers.muon import orthogonalized
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine

ADAMW = {"lr": 0.05, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3, "max_grad_norm": 2.0}
MUON = {**ADAMW, "name": "muon", "momentum": 0.9}
SCALES = (0.01, 1.0, 0.05, 2.0)
"""Sizes of the gradients of successive steps: below and above the clipping norm."""


class Net(nn.Module):
    """Shapes that do not divide by the number of ranks, some smaller than it; tall, wide and square matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.wide = nn.Linear(5, 3)
        self.tall = nn.Linear(3, 7)
        self.square = nn.Linear(7, 7, bias=False)
        self.row = nn.Linear(7, 1)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.square(self.tall(torch.tanh(self.wide(self.embed(ids)))))))
        out: Tensor = self.head(hidden) * self.row(hidden)
        return out


def net(dtype: torch.dtype = torch.float64) -> Net:
    made = Net()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made.to(dtype)


EMBEDDINGS = {"embed.weight", "head.weight"}


def gradient(parameter: Tensor, name: str, step: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def sharded_net(ranks: Ranks, shard_size: int, dtype: torch.dtype = torch.float64) -> Net:
    mesh = ranks.join(shard_size=shard_size).mesh
    made = net(dtype)
    for part in (made.wide, made.tall):
        fully_shard(part, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def optimizer_of(made: nn.Module, settings: dict[str, Any]) -> Optimizer:
    config = OptimizerConfig(**settings)
    return Optimizer(made.named_parameters(), config, total_steps=None, embeddings=EMBEDDINGS)


def set_gradients(made: nn.Module, step: int, scale: float) -> None:
    for name, parameter in made.named_parameters():
        whole = gradient(parameter, name, step, scale)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = whole


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradients.full(tensor.detach()).clone() for name, tensor in tensors.items()}


def stepped(ranks: Ranks, settings: dict[str, Any], shard_size: int = 0) -> dict[str, Any]:
    """Four steps; the reports, parameters and state afterwards."""
    made = sharded_net(ranks, shard_size)
    optimizer = optimizer_of(made, settings)
    reports = []
    for step, scale in enumerate(SCALES):
        set_gradients(made, step, scale)
        reports.append(optimizer.step())
    tensors, numbers = optimizer.state()
    return {
        "reports": reports,
        "parameters": whole(dict(made.named_parameters())),
        "state": whole(tensors),
        "numbers": numbers,
        "num_own": sum(gradients.local(t).numel() for t in tensors.values() if t.dim()),
    }


def reference(settings: dict[str, Any]) -> dict[str, Any]:
    """The same with torch's optimizers on whole parameters in one process."""
    made = net()
    named = dict(made.named_parameters())
    outer = {"embed.weight", "head.weight"}
    hidden = {n for n, p in named.items() if p.dim() == 2 and n not in outer} if "name" in settings else set()
    decayed = [p for n, p in named.items() if p.dim() == 2 and n not in hidden]
    plain = [p for p in named.values() if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}],
            lr=0.05,
            betas=(0.8, 0.95),
            eps=1e-3,
            foreach=False,
        )
    ]
    if hidden:
        matrices = [named[n] for n in named if n in hidden]
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=0.05, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
            )
        )
    norms = []
    for step, scale in enumerate(SCALES):
        set_gradients(made, step, scale)
        norms.append(float(nn.utils.clip_grad_norm_(made.parameters(), 2.0)))
        for optimizer in optimizers:
            optimizer.step()
    moments = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            name = next(n for n, p in named.items() if p is parameter)
            moments |= {f"{kind}/{name}": value for kind, value in state.items()}
    return {"norms": norms, "parameters": {n: p.detach() for n, p in named.items()}, "state": moments}


def assert_like_torch(results: list[dict[str, Any]], settings: dict[str, Any], tolerance: float) -> None:
    expected = reference(settings)
    first = results[0]
    assert [r.grad_norm for r in first["reports"]] == pytest.approx(expected["norms"], rel=1e-12)
    assert [r.skipped for r in first["reports"]] == [""] * len(SCALES)
    assert first["numbers"] == {"num_steps": len(SCALES)}
    for kind in ("parameters", "state"):
        assert set(first[kind]) == set(expected[kind])
        for name, tensor in expected[kind].items():
            got = first[kind][name].to(tensor.dtype)
            torch.testing.assert_close(got, tensor, atol=tolerance, rtol=tolerance, msg=f"{kind} {name}")
    for other in results[1:]:
        assert other["reports"] == first["reports"]  # the same float to the last bit


@pytest.mark.slow
def test_adamw_on_two_ranks_equals_torchs_on_whole_parameters() -> None:
    results = run_ranks(stepped, 2, ADAMW)
    assert_like_torch(results, ADAMW, 1e-10)
    # Each rank holds a part of the state only, and together they hold all of it once.
    total = sum(t.numel() for t in results[0]["state"].values() if t.dim())
    assert sum(result["num_own"] for result in results) == total
    assert max(result["num_own"] for result in results) < 0.75 * total


def test_muon_on_two_ranks_equals_torchs_on_whole_parameters() -> None:
    # bfloat16 inside the orthogonalisation: a last bit of 1/256 of an update of 0.05 * 0.2 * entries below 1.
    results = run_ranks(stepped, 2, MUON)
    assert_like_torch(results, MUON, 2e-4)
    one = reference(ADAMW)["parameters"]["square.weight"]
    assert not torch.allclose(
        results[0]["parameters"]["square.weight"], one, atol=1e-2
    )  # Muon's step is another


@pytest.mark.dist
@pytest.mark.parametrize(("settings", "tolerance"), [(ADAMW, 1e-10), (MUON, 2e-4)])
@pytest.mark.parametrize("shard_size", [0, 2])
def test_four_ranks_and_copies_of_shards_give_the_same(
    settings: dict[str, Any], tolerance: float, shard_size: int
) -> None:
    assert_like_torch(run_ranks(stepped, 4, settings, shard_size), settings, tolerance)


def test_muon_in_one_process_equals_torchs() -> None:
    made = net()
    optimizer = optimizer_of(made, MUON)
    for step, scale in enumerate(SCALES):
        set_gradients(made, step, scale)
        optimizer.step()
    expected = reference(MUON)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected["parameters"][name], atol=2e-4, rtol=0, msg=name
        )


@pytest.mark.parametrize("shape", [(40, 16), (16, 40), (24, 24)])
def test_orthogonalized_keeps_the_directions_and_evens_their_lengths(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    # U^T X V is diagonal with entries near 1 where X = U S' V^T.
    aligned = left.T @ orthogonalized(matrix).float() @ right.T
    kept = sizes > 0.05 * sizes.max()
    diagonal = aligned.diagonal()[kept]
    assert float(diagonal.min()) > 0.6
    assert float(diagonal.max()) < 1.3
    assert float((aligned - aligned.diagonal().diag()).abs().max()) < 0.05


def test_muon_must_know_the_embeddings() -> None:
    made = net()
    with pytest.raises(ValueError, match="Muon must know which matrices are embeddings or the head"):
        Optimizer(made.named_parameters(), OptimizerConfig(name="muon"), total_steps=None)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_muon_trains_a_language_model(tiny: Callable[..., CausalLM], kind: str) -> None:
    model = tiny(kind, dtype="float32")
    config = OptimizerConfig(name="muon", lr=5e-3)
    engine = TrainEngine(model, EngineConfig(), config, total_steps=None)
    rows = make_rows([torch.arange(4)] * 2, [torch.arange(5), torch.arange(3) + 20])
    losses = []
    for _ in range(8):
        value = engine.accumulate(rows, of_log_probs(lambda lp, _, __: -lp.sum() / 8, temperature=1.0))
        losses.append(float(value))
        assert engine.step().skipped == ""
    assert losses[-1] < 0.5 * losses[0]
    kinds = {key.partition("/")[2]: key.partition("/")[0] for key in engine.optimizer.state()[0]}
    by_muon = {name for name, kind in kinds.items() if kind == "momentum_buffer"}
    in_layers = {n for n, p in model.named_parameters() if p.dim() == 2 and (".layers." in n or ".h." in n)}
    assert by_muon == in_layers


def backward(ranks: Ranks, num_rows: int) -> tuple[float, dict[str, Tensor]]:
    """One step on the gradients of a real backward pass, each rank with its share of the rows."""
    made = sharded_net(ranks, 0)
    for part in (made.wide, made.tall, made):
        part.set_gradient_divide_factor(1.0)  # type: ignore[union-attr]
        part.set_force_sum_reduction_for_comms(True)  # type: ignore[union-attr]
    optimizer = optimizer_of(made, ADAMW)
    ids = torch.arange(num_rows) * 5 % 13
    made(ids[ranks.rank :: ranks.world_size]).square().sum().backward()
    report = optimizer.step()
    return report.grad_norm, whole(dict(made.named_parameters()))


def test_half_of_the_rows_on_each_rank_give_the_step_of_all_rows() -> None:
    made = net()
    optimizer = optimizer_of(made, ADAMW)
    made(torch.arange(7) * 5 % 13).square().sum().backward()
    expected = optimizer.step().grad_norm
    (norm, parameters), (other_norm, _) = run_ranks(backward, 2, 7)
    assert norm == other_norm
    assert norm == pytest.approx(expected, rel=1e-12)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameters[name], parameter.detach(), atol=1e-10, rtol=0, msg=name)


def poisoned(ranks: Ranks, names: list[str], poison: float) -> tuple[list[Any], bool]:
    """A good step, a step with one bad number on the last rank only, and a good step."""
    made = sharded_net(ranks, 0)
    optimizer = optimizer_of(made, ADAMW)
    reports = []
    unchanged = True
    for step in range(3):
        set_gradients(made, step, 1.0)
        before = whole(dict(made.named_parameters()) | optimizer.state()[0])
        for name, parameter in made.named_parameters():
            if step == 1 and name in names and ranks.rank == ranks.world_size - 1:
                assert parameter.grad is not None
                gradients.local(parameter.grad).view(-1)[-1] = poison
        reports.append(optimizer.step())
        if step == 1:
            after = whole(dict(made.named_parameters()) | optimizer.state()[0])
            unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return reports, unchanged and optimizer.num_steps == 2


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_a_bad_number_on_one_rank_is_named_and_skipped_on_all(poison: float) -> None:
    (first, first_unchanged), (second, second_unchanged) = run_ranks(poisoned, 2, ["tall.weight"], poison)
    assert first_unchanged
    assert second_unchanged
    assert first[1].skipped == second[1].skipped
    assert first[1].skipped.endswith("(non-finite in tall.weight)")
    assert [report.skipped for report in first if report is not first[1]] == ["", ""]
    assert first[0] == second[0]
    assert first[2] == second[2]


def test_bad_numbers_in_several_shards_are_counted_alike() -> None:
    (first, _), (second, _) = run_ranks(poisoned, 2, ["norm.weight", "wide.bias", "head.weight"], math.inf)
    assert (
        first[1].skipped == second[1].skipped == "gradient norm is inf (non-finite in wide.bias and 2 more)"
    )


def without_gradients(ranks: Ranks) -> dict[str, Tensor]:
    """A step without any gradient after one with."""
    made = sharded_net(ranks, 0)
    optimizer = optimizer_of(made, ADAMW)
    set_gradients(made, 0, 1.0)
    optimizer.step()
    assert optimizer.step().grad_norm == 0.0
    return whole(dict(made.named_parameters()))


def test_a_step_without_gradients_moves_shards_as_zeros_would() -> None:
    made = net()
    optimizer = optimizer_of(made, ADAMW)
    set_gradients(made, 0, 1.0)
    optimizer.step()
    before = copy.deepcopy(dict(made.named_parameters()))
    set_gradients(made, 0, 0.0)
    optimizer.step()
    for name, tensor in run_ranks(without_gradients, 2)[0].items():
        expected = made.get_parameter(name).detach()
        torch.testing.assert_close(tensor, expected, atol=1e-12, rtol=0, msg=name)
        assert not torch.equal(tensor, before[name])
