"""Liger's patches stay on one model. The kernels need a device and are not run here: stand-ins take their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from strop.engines.config import ModelConfig
from strop.engines.liger.kernels import apply_to_instance, use_liger_kernels
from strop.engines.model import load_model

Folders = Callable[[str], Path]


class KernelNorm(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


def kernel_rotary(query: Tensor, key: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return query[..., :1], key[..., :1]  # a shape that tells it from the original


class Calls(list[dict[str, Any]]):
    """A function with the form of liger's for one architecture, and what it was called with."""

    def apply(
        self,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        self.append(
            {
                "rope": rope,
                "cross_entropy": cross_entropy,
                "fused": fused_linear_cross_entropy,
                "norm": rms_norm,
            }
        )
        qwen3.apply_rotary_pos_emb = kernel_rotary
        qwen3.Qwen3RMSNorm = KernelNorm
        model.model.norm.forward = MethodType(KernelNorm.forward, model.model.norm)


@pytest.fixture
def module(tiny_folder: Folders) -> Iterator[nn.Module]:
    before = dict(vars(qwen3))
    yield load_model(ModelConfig(path=str(tiny_folder("qwen3"))), device="cpu").module
    vars(qwen3).update(before)


def test_norms_change_in_one_model_and_classes_stay(module: Any, tiny_folder: Folders) -> None:
    norm_class, calls = qwen3.Qwen3RMSNorm, Calls()
    apply_to_instance(module, calls.apply)
    assert calls == [{"rope": True, "cross_entropy": False, "fused": False, "norm": True}]
    assert qwen3.Qwen3RMSNorm is norm_class
    hidden = torch.ones(1, 32)
    assert torch.equal(module.model.norm(hidden), 2 * hidden)
    other: Any = load_model(ModelConfig(path=str(tiny_folder("qwen3"))), device="cpu").module
    assert not torch.equal(other.model.norm(hidden), 2 * hidden)


def test_the_rotary_kernel_leaves_host_memory_to_the_original(module: Any) -> None:
    original, calls = qwen3.apply_rotary_pos_emb, Calls()
    apply_to_instance(module, calls.apply)
    shared = qwen3.apply_rotary_pos_emb
    apply_to_instance(module, calls.apply)
    assert qwen3.apply_rotary_pos_emb is shared  # once, however many models there are
    query, key = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    cos, sin = torch.rand(1, 3, 4), torch.rand(1, 3, 4)
    for got, expected in zip(shared(query, key, cos, sin), original(query, key, cos, sin), strict=True):
        assert torch.equal(got, expected)
    on_device = torch.ones(1, 2, 3, 4, device="meta")
    assert shared(on_device, on_device, cos, sin)[0].shape == (1, 2, 3, 1)


def test_a_cpu_is_refused(tiny_folder: Folders) -> None:
    config = ModelConfig(path=str(tiny_folder("qwen3")), use_liger=True)
    with pytest.raises(
        ValueError, match=r"model.use_liger is true, but the model computes on a CPU, .* has no kernels"
    ):
        load_model(config, device="cpu")


def test_a_missing_package_names_the_extra(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(ValueError, match=r"install it with: pip install 'strop\[liger\]'"):
        use_liger_kernels(module, torch.device("meta"))


def test_an_unknown_architecture_is_refused(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    patches: Any = sys.modules["liger_kernel.transformers.monkey_patch"]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": calls.apply}
    with pytest.raises(ValueError, match="liger-kernel has nothing for qwen3; .* use one of llama"):
        use_liger_kernels(module, torch.device("meta"))
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN["qwen3"] = calls.apply
    use_liger_kernels(module, torch.device("meta"))
    assert len(calls) == 1
