"""The adapter of 8-bit AdamW. torchao is not installed here: an optimizer of the same form takes its place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from strop.engines.config import OptimizerConfig
from strop.engines.optimizer import Optimizer

CONFIG = OptimizerConfig(
    name="adamw_8bit", lr=0.05, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3, warmup_steps=3
)


class Halves(Tensor):
    """A moment kept in half precision: a tensor subclass that has its numbers inside, as torchao's has codes."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Halves:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes"], []

    def dequantize(self) -> Tensor:
        return self.codes.float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1])
            return args[0]
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].codes))
        raise NotImplementedError(func)


class FakeAdamW8bit(torch.optim.Optimizer):
    """AdamW with a tensor as learning rate and step counts on the CPU, moments of large tensors in half precision."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            group["lr"] = torch.tensor(lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for kind in ("exp_avg", "exp_avg_sq"):
                        zeros = torch.zeros_like(p)
                        state[kind] = Halves(zeros.half()) if p.numel() > 10 else zeros
                state["step"] += 1
                mean, square = (_plain(state[kind]) for kind in ("exp_avg", "exp_avg_sq"))
                mean = mean.lerp(p.grad, 1 - beta1)
                square = square.lerp(p.grad.square(), 1 - beta2)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                count = float(state["step"])
                denominator = square.sqrt() / (1 - beta2**count) ** 0.5 + group["eps"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * mean / (1 - beta1**count) / denominator)


def _plain(value: Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, Halves) else value


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("torchao.optim")
    package.AdamW8bit = FakeAdamW8bit
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", package)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in {"w": (5, 4), "b": (5,)}.items()
    }


def make(named: dict[str, nn.Parameter], config: OptimizerConfig = CONFIG) -> Optimizer:
    return Optimizer(named.items(), config, total_steps=None)


def steps(optimizer: Optimizer, named: dict[str, nn.Parameter], which: Sequence[int]) -> None:
    for step in which:
        generator = torch.Generator().manual_seed(step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        assert optimizer.step().skipped == ""


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        ValueError, match=r"which needs the package torchao; .* pip install 'strop\[optim8bit\]'"
    ):
        make(parameters())


@pytest.mark.usefixtures("torchao")
def test_steps_follow_adamw_with_its_schedule_and_decay() -> None:
    ours, theirs = parameters(), parameters()
    adamw = OptimizerConfig(lr=0.05, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-3, warmup_steps=3)
    steps(make(ours), ours, range(6))
    steps(make(theirs, adamw), theirs, range(6))
    # Half precision of the moments of w: about one part in a thousand of updates of 0.05.
    torch.testing.assert_close(ours["w"], theirs["w"], atol=1e-3, rtol=0)
    torch.testing.assert_close(ours["b"], theirs["b"], atol=1e-6, rtol=0)


@pytest.mark.usefixtures("torchao")
def test_state_is_readable_and_continues_bit_for_bit() -> None:
    named = parameters()
    optimizer = make(named)
    steps(optimizer, named, range(3))
    tensors, numbers = optimizer.state()
    assert {name: t.dtype for name, t in tensors.items() if name.startswith("exp")} == dict.fromkeys(
        ["exp_avg/w", "exp_avg_sq/w", "exp_avg/b", "exp_avg_sq/b"], torch.float32
    )
    assert all(type(t) is Tensor for t in tensors.values())
    assert {t.dtype for t in optimizer.memory()} == {torch.float16, torch.float32}
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    again = make(copies)
    again.load_state({name: t.clone() for name, t in tensors.items()}, numbers)
    steps(optimizer, named, range(3, 6))
    steps(again, copies, range(3, 6))
    assert all(torch.equal(named[name], copies[name]) for name in named)


@pytest.mark.usefixtures("torchao")
def test_state_made_before_the_first_step_changes_nothing() -> None:
    named, copies = parameters(), parameters()
    optimizer, other = make(named), make(copies)
    copies["w"].grad = torch.ones(5, 4)
    other.materialize_state()
    assert copies["w"].grad.sum() == 20
    assert copies["b"].grad is None
    assert all(torch.equal(named[name], copies[name]) for name in named)
    assert all(not t.any() for t in other.state()[0].values())
    steps(optimizer, named, range(3))
    steps(other, copies, range(3))
    assert all(torch.equal(named[name], copies[name]) for name in named)
