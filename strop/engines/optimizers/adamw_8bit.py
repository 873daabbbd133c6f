"""AdamW with 8-bit moments: the adapter of torchao's optimizer.

torchao rather than bitsandbytes, because its moments can be DTensors and so follow FSDP2's shards. It computes the
update in float32 through torch.compile, and keeps the moments of small tensors (fewer than 4096 numbers on a rank)
in full precision. Never run here: the package was not at hand when this was written, from the source of its
version 0.13 and later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines.config import OptimizerConfig
from strop.engines.gradients import local
from strop.engines.optimizers.adamw import Part, adamw_groups


def adamw_8bit_parts(
    named: Mapping[str, nn.Parameter], config: OptimizerConfig, embeddings: Collection[str]
) -> list[Part]:
    """AdamW with 8-bit moments for all parameters; arguments as `muon_parts`, which alone looks at embeddings.

    Raises:
        ValueError: torchao is not installed.
    """
    groups = adamw_groups(named.values(), config.weight_decay)
    betas = (config.betas[0], config.betas[1])
    return (
        [_EightBitPart(make_adamw_8bit(groups, lr=config.lr, betas=betas, eps=config.eps))] if groups else []
    )


class _EightBitPart(Part):
    def materialize(self) -> None:
        materialize(self.optimizer, self.parameters)

    def readable(self, value: Tensor) -> Tensor:
        return readable(value)

    def storage(self, value: Tensor) -> Iterator[Tensor]:
        return storage(value)


def make_adamw_8bit(
    groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """torchao's AdamW8bit over parameter groups.

    Raises:
        ValueError: torchao is not installed.

    Source: Dettmers et al. 2021, arXiv:2110.02861 (block-wise dynamic quantisation of the moments).
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            "optim.name of a role is adamw_8bit, which needs the package torchao; install it with: "
            "pip install 'strop[optim8bit]'"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(list(groups), lr=lr, betas=betas, eps=eps)
    return optimizer


def materialize(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Create the zero state of parameters that have none, by a step of size 0 on a zero gradient."""
    fresh = [parameter for parameter in parameters if not optimizer.state[parameter]]
    if not fresh:
        return
    gradients = [parameter.grad for parameter in parameters]
    settings = [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter.detach())
    for group in optimizer.param_groups:
        group["lr"].fill_(0.0)
        group["weight_decay"] = 0.0
    optimizer.step()
    for group, (lr, weight_decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"].fill_(lr)
        group["weight_decay"] = weight_decay
    for parameter in fresh:
        optimizer.state[parameter]["step"].zero_()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def readable(value: Tensor) -> Tensor:
    """A moment as an ordinary tensor of its parameter's shape and sharding; itself where it is one already.

    Quantising it again gives the same codes as long as shards are cut alike: the largest number of each block is
    kept exactly, and so is the block's scale.
    """
    shard = local(value)
    if type(shard) is Tensor:
        return value.detach()
    plain = shard.dequantize()
    if not isinstance(value, DTensor):
        return plain
    return DTensor.from_local(
        plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def storage(value: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a moment on this rank."""
    shard = local(value)
    if type(shard) is Tensor:
        yield shard
    else:
        names, _ = shard.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield getattr(shard, name)
