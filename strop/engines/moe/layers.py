"""The layers of a model that route each token to a few experts (mixture of experts)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True, kw_only=True, eq=False)
class MoELayer:
    """The router and the experts of one layer."""

    name: str
    """Of the experts in the model, such as model.layers.0.mlp.experts."""
    experts: Any
    """Module of transformers: parameters [E, ...], one matrix per expert, and a forward pass (hidden states [N, D],
    indices of experts [N, k], weights [N, k]) -> [N, D]."""
    router: nn.Module | None
    """Module beside it that chooses the experts; None where its name is not one of those known."""

    @property
    def num_experts(self) -> int:
        """E."""
        return len(next(self.experts.parameters(recurse=False)))


def moe_layers(module: nn.Module) -> list[MoELayer]:
    """The layers whose experts take the form of transformers' own implementations, in order; none of a dense model."""
    return list(_moe_layers(module))


def _moe_layers(module: nn.Module) -> Iterator[MoELayer]:
    for parent_name, parent in module.named_modules():
        for name, child in parent.named_children():
            if has_standard_experts(child):
                routers = [parent.get_submodule(key) for key in _ROUTER_NAMES if hasattr(parent, key)]
                yield MoELayer(
                    name=f"{parent_name}.{name}" if parent_name else name,
                    experts=child,
                    router=routers[0] if routers else None,
                )


CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")
"""Last parts of the names of biases by which routers choose; they have no gradient."""


def is_choice_bias(name: str) -> bool:
    """True for the name of one of CHOICE_BIASES."""
    return name.rpartition(".")[2] in CHOICE_BIASES


def hold_choice_biases(module: nn.Module) -> None:
    """Make persistent buffers of the biases by which routers choose that are parameters (ERNIE 4.5, Trinity); those of
    DeepSeek and others are.

    As parameters they would be moved by weight decay, and rounded to half precision where they are gathered over ranks.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if name in CHOICE_BIASES:
                delattr(part, name)
                part.register_buffer(name, parameter.detach())


def has_standard_experts(part: nn.Module) -> bool:
    """True for a module that `transformers.integrations.use_experts_implementation` has decorated."""
    return {"num_experts", "has_gate", "is_transposed"} <= vars(part).keys()


def is_class_of_experts(kind: type[nn.Module]) -> bool:
    """True for the class of such a module, of which one that is being made has not all attributes yet."""
    return hasattr(kind, "_apply_gate")


def num_experts(config: Any) -> int:
    """Experts of a layer by a model's configuration, under any of the names that families have for it; 0: dense."""
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max(int(getattr(text, name, None) or 0) for name in names)
