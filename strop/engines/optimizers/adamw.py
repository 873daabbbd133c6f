"""AdamW over some of the parameters, and the part of an optimizer that others are built on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strop.engines import gradients
from strop.engines.config import OptimizerConfig


class Part:
    """Some of the parameters, and torch's AdamW, or an optimizer with as plain a state, that moves them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that it updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def materialize(self) -> None:
        """Create the state of parameters that have none, as it is before the first step; parameters stay as they are.

        This is what AdamW's first step would create; the fused update reads the step count on the parameter's device.
        """
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[kind] = torch.zeros_like(parameter.detach())

    def readable(self, value: Tensor) -> Tensor:
        """A tensor of the state as an ordinary one of its parameter's shape and sharding."""
        return value.detach()

    def storage(self, value: Tensor) -> Iterator[Tensor]:
        """The plain tensors that hold it on this rank."""
        yield gradients.local(value)


def adamw_parts(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> list[Part]:
    """AdamW over all of these parameters; nothing where there are none."""
    groups = adamw_groups(parameters, config.weight_decay)
    betas = (config.betas[0], config.betas[1])
    return (
        [Part(torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True))]
        if groups
        else []
    )


def adamw_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, the others without; shards apart for each mesh, which one fused call cannot mix."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if is_matrix else 0.0}
        for (is_matrix, _), members in groups.items()
    ]
