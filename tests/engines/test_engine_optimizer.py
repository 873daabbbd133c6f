"""AdamW, clipping, the refusal of poisoned gradients, and state that moves in and out; one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from strop.engines.config import OptimizerConfig
from strop.engines.optimizer import Optimizer


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.weight": (5, 3), "layer.bias": (5,), "norm.weight": (3,), "head.weight": (4, 5)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def set_gradients(named: dict[str, nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (scale * noise).to(parameter.dtype)


def global_norm(named: dict[str, nn.Parameter]) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in named.values() if p.grad is not None))


CONFIG = OptimizerConfig(
    lr=0.05, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3, max_grad_norm=2.0, warmup_steps=2
)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_steps_equal_torchs_adamw_with_clipping_and_schedule(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = parameters(dtype), parameters()
    optimizer = Optimizer(ours.items(), CONFIG, total_steps=None)
    matrices = [p for name, p in theirs.items() if name in ("layer.weight", "head.weight")]
    vectors = [theirs["layer.bias"], theirs["norm.weight"]]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-3,
        foreach=False,
        fused=False,
    )
    for step in range(6):
        scale = (0.01, 1.0)[step % 2]  # below and above the clipping norm
        set_gradients(ours, step, scale)
        set_gradients(theirs, step, scale)
        report = optimizer.step()
        assert report.grad_norm == pytest.approx(global_norm(theirs), rel=tolerance)
        nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        for group in reference.param_groups:
            group["lr"] = 0.05 * min(1.0, (step + 1) / 2)
        reference.step()
        assert all(p.grad is None for p in ours.values())
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.double(), theirs[name], atol=tolerance, rtol=tolerance)


def test_one_step_by_hand() -> None:
    # First step of Adam: m_hat = g, v_hat = g^2, so each entry moves by lr * g / (|g| + eps), after the decay
    # p (1 - lr * decay) of matrices. g = 3 and 4 have norm 5 and are scaled to norm 2.5: g = 1.5 and 2.
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, eps=0.5, max_grad_norm=2.5)
    matrix = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    vector = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    matrix.grad, vector.grad = torch.tensor([[3.0]]).double(), torch.tensor([4.0]).double()
    report = Optimizer([("m", matrix), ("v", vector)], config, total_steps=None).step()
    assert (report.grad_norm, report.lr, report.skipped) == (pytest.approx(5.0), 0.1, "")
    assert matrix.item() == pytest.approx(2.0 * 0.95 - 0.1 * 1.5 / 2.0, abs=1e-6)
    assert vector.item() == pytest.approx(2.0 - 0.1 * 2.0 / 2.5, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_is_skipped_and_named(poison: float) -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), CONFIG, total_steps=None)
    set_gradients(named, 0)
    optimizer.step()
    before = {name: p.detach().clone() for name, p in named.items()}
    moments = {name: t.clone() for name, t in optimizer.state()[0].items()}
    set_gradients(named, 1)
    assert named["norm.weight"].grad is not None
    assert named["head.weight"].grad is not None
    named["norm.weight"].grad[1] = poison
    report = optimizer.step()
    assert report.skipped.endswith("(non-finite in norm.weight)")
    assert not math.isfinite(report.grad_norm)
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None  # the poison does not reach the next step
    for name, tensor in optimizer.state()[0].items():
        assert torch.equal(tensor, moments[name])
    set_gradients(named, 2)
    assert optimizer.step().skipped == ""
    assert optimizer.num_steps == 2


def test_several_poisoned_parameters_are_counted() -> None:
    named = parameters()
    set_gradients(named, 0, scale=math.inf)
    report = Optimizer(named.items(), CONFIG, total_steps=None).step()
    assert "non-finite in layer.weight and 3 more" in report.skipped


def test_a_skipped_update_does_not_move_the_schedule() -> None:
    # Warm-up over four steps: 0.01, 0.02, 0.03, 0.04, whatever comes in between.
    named = parameters()
    optimizer = Optimizer(named.items(), OptimizerConfig(lr=0.04, warmup_steps=4), total_steps=None)
    rates, skipped = [], []
    for step, scale in enumerate([1.0, math.nan, math.nan, 1.0, math.inf, 1.0]):
        set_gradients(named, step, scale)
        report = optimizer.step()
        rates.append(report.lr)
        skipped.append(bool(report.skipped))
    assert rates == pytest.approx([0.01, 0.02, 0.02, 0.02, 0.03, 0.03])
    assert skipped == [False, True, True, False, True, False]


def test_the_norm_of_large_finite_gradients_is_finite() -> None:
    # 1e30^2 is more than float32 holds. Four entries: norm 2e30, each clipped to 1/2.
    config = OptimizerConfig(lr=0.1, weight_decay=0.0, eps=1.0, max_grad_norm=1.0)
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 1e30)
    report = Optimizer([("w", parameter)], config, total_steps=None).step()
    assert report.skipped == ""
    assert report.grad_norm == pytest.approx(2e30, rel=1e-6)
    # First step of Adam: g / (|g| + eps) = 0.5 / 1.5.
    torch.testing.assert_close(parameter.detach(), torch.full((2, 2), 1 - 0.1 / 3))


def test_an_overflow_of_the_norm_alone_is_skipped_too() -> None:
    # Every entry is finite; the sum of squares is not: 1e200^2 > 2e308.
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    parameter.grad = torch.full((2, 2), 1e200, dtype=torch.float64)
    report = Optimizer([("w", parameter)], CONFIG, total_steps=None).step()
    assert report.skipped == "gradient norm is inf (non-finite in the sum of squares)"
    assert torch.equal(parameter, torch.ones(2, 2, dtype=torch.float64))


def test_the_norm_of_a_large_matrix_keeps_its_digits() -> None:
    # A float32 sum over 4e6 numbers in a row loses the fourth digit; 2^22 entries of 3 have norm 3 * 2^11.
    parameter = nn.Parameter(torch.ones(2048, 2048))
    parameter.grad = torch.full((2048, 2048), 3.0)
    report = Optimizer([("w", parameter)], CONFIG, total_steps=None).step()
    assert report.grad_norm == pytest.approx(3 * 2**11, rel=1e-12)


def test_frozen_parameters_are_left_alone() -> None:
    named = parameters()
    named["head.weight"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = Optimizer(named.items(), CONFIG, total_steps=None)
    set_gradients(named, 0)
    optimizer.step()
    changed = [name for name, p in named.items() if not torch.equal(p, before[name])]
    assert changed == ["layer.weight", "layer.bias", "norm.weight"]
    assert not any("head.weight" in key for key in optimizer.state()[0])


def test_a_missing_gradient_is_a_gradient_of_zero() -> None:
    # Torch's own AdamW on gradients of zero is the reference: decay of matrices, and momentum of the step before.
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours.items(), CONFIG, total_steps=None)
    matrices = [theirs["layer.weight"], theirs["head.weight"]]
    vectors = [theirs["layer.bias"], theirs["norm.weight"]]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-3,
        foreach=False,
    )
    for step, present in enumerate([[], list(ours), ["layer.bias"], []]):
        set_gradients(theirs, step)
        for name, parameter in theirs.items():
            assert parameter.grad is not None
            if name in present:
                ours[name].grad = parameter.grad.clone()
            else:
                parameter.grad.zero_()
        report = optimizer.step()
        assert report.skipped == ""
        assert report.grad_norm == pytest.approx(global_norm(theirs))
        nn.utils.clip_grad_norm_(theirs.values(), 2.0)
        for group in reference.param_groups:
            group["lr"] = 0.05 * min(1.0, (step + 1) / 2)
        reference.step()
        for name, parameter in ours.items():
            torch.testing.assert_close(
                parameter, theirs[name], atol=1e-10, rtol=0, msg=f"{name}, step {step}"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    named = parameters(dtype)
    config = OptimizerConfig(lr=0.05, schedule="cosine", warmup_steps=2)
    optimizer = Optimizer(named.items(), config, total_steps=8)
    for step in range(4):
        set_gradients(named, step)
        optimizer.step()
    tensors, numbers = optimizer.state()
    tensors = {name: t.clone() for name, t in tensors.items()}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    other = Optimizer(copies.items(), config, total_steps=8)
    other.load_state(tensors, numbers)
    for step in range(4, 8):
        set_gradients(named, step)
        set_gradients(copies, step)
        assert optimizer.step() == other.step()
    for name, parameter in named.items():
        assert torch.equal(parameter, copies[name]), name
    assert optimizer.state()[1] == other.state()[1] == {"num_steps": 8}


def test_loaded_state_shares_no_memory_with_what_was_given() -> None:
    named, copies = parameters(), parameters()
    optimizer = Optimizer(named.items(), CONFIG, total_steps=None)
    set_gradients(named, 0)
    optimizer.step()
    other = Optimizer(copies.items(), CONFIG, total_steps=None)
    tensors = {name: t.clone() for name, t in optimizer.state()[0].items()}
    kept = {name: t.clone() for name, t in tensors.items()}
    other.load_state(tensors, {"num_steps": 1})
    set_gradients(copies, 1)
    other.step()
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_made_before_the_first_step_changes_nothing(name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.05)  # type: ignore[arg-type]
    named, copies = parameters(), parameters()
    optimizer = Optimizer(named.items(), config, total_steps=None, embeddings=["head.weight"])
    other = Optimizer(copies.items(), config, total_steps=None, embeddings=["head.weight"])
    other.materialize_state()
    assert all(torch.equal(named[name], copies[name]) for name in named)
    assert list(other.memory())
    assert not list(optimizer.memory())
    names_before = list(other.state()[0])
    for step in range(2):
        set_gradients(named, step)
        set_gradients(copies, step)
        assert optimizer.step() == other.step()
    assert all(torch.equal(named[name], copies[name]) for name in named)
    assert list(other.state()[0]) == names_before == list(optimizer.state()[0])
    assert [m.data_ptr() for m in other.memory()] == [t.data_ptr() for t in other.state()[0].values()]
