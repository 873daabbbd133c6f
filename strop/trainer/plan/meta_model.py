"""A model as a plan sees it: its form, and its first layer and the last one of each kind, on the meta device.

Layers of a kind (attention, experts, windows) are alike, so that all others follow from these.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig
from strop.engines.lora import adapters
from strop.engines.moe.precision import use_compute_precision
from strop.engines.multimodal.families import takes_media
from strop.engines.multimodal.inputs import language_model_class


@dataclass(frozen=True, kw_only=True)
class PassForm:
    """A model as a pass runs it."""

    compute_dtype: torch.dtype
    weights_dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    """Parameters are gathered in the precision of computation (FSDP2), in place of being cast in each product."""
    is_accelerator: bool = False
    """Kernels of an accelerator: FlashAttention, norms in one kernel, large chunks of the head."""
    checkpointing: bool = False
    has_value_head: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    holds_half: bool = False
    """Weights that are not trained are held in the precision of computation (engines/half_weights.py)."""
    by_formula: bool = False
    """model.attn_implementation=eager."""
    takes_entropy: bool = False
    """The loss has a term of the entropy (algorithm.entropy_coeff)."""


def meta_module(shape: PreTrainedConfig, form: PassForm) -> Any:
    """The model on the meta device."""
    auto: Any = AutoModelForSequenceClassification if form.has_value_head else language_model_class(shape)
    shape = copy.deepcopy(shape)
    if form.has_value_head:
        shape.num_labels = 1
    is_own_code = type(shape) not in auto._model_mapping  # of its folder: its configuration is, and was run
    with torch.device("meta"):
        module = auto.from_config(shape, dtype=form.weights_dtype, trust_remote_code=is_own_code)
    module.tie_weights()
    module.eval()
    return module


def causal_lm(module: Any, form: PassForm) -> CausalLM:
    """The model as an engine has it, with its adapter."""
    use_compute_precision(module, torch.device("cuda" if form.is_accelerator else "cpu"))
    model = CausalLM(module, compute_dtype=form.compute_dtype)
    if form.lora.enabled:
        with torch.device(model.device):  # on the meta device, where those of experts take no memory
            adapters.add_lora(model, replace(form.lora, path=""))
    return model


def layer_kind(layer: nn.Module) -> Hashable:
    """Equal for layers that compute alike: class, shapes of parameters, window."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    windows = tuple(
        getattr(part, "sliding_window", None) for part in layer.modules() if hasattr(part, "sliding_window")
    )
    return type(layer).__name__, shapes, windows


def layer_list(module: Any) -> nn.ModuleList:
    """The decoder layers; what reads images may have as many."""
    count = module.config.get_text_config().num_hidden_layers
    decoder = module.get_decoder() if takes_media(module.config) else module
    for part in decoder.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ValueError(f"{type(module).__name__} has no list of its {count} layers")


def truncate(module: Any, kinds: Sequence[Hashable]) -> list[Hashable]:
    """Keep the first layer, whose input may need no gradient, and the last one of each kind, in order; the kinds of
    those that are left."""
    layers, config = layer_list(module), module.config.get_text_config()
    last = {kind: i for i, kind in enumerate(kinds)}
    chosen = sorted({0, *last.values()})
    kept = [layers[i] for i in chosen]
    del layers[:]
    layers.extend(kept)
    for number, layer in enumerate(kept):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number  # type: ignore[assignment]
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    config.num_hidden_layers = len(kept)
    return [kinds[i] for i in chosen]


_TEMPLATES: dict[tuple[object, ...], tuple[Any, tuple[Hashable, ...], list[Hashable]]] = {}
"""Truncated modules: hundreds of layers take seconds to make."""


def truncated_module(
    shape: PreTrainedConfig, form: PassForm
) -> tuple[Any, tuple[Hashable, ...], list[Hashable]]:
    """The model on the meta device with few layers (`truncate`); kinds of all layers, and of those that are left."""
    experts = getattr(shape, "_experts_implementation", None)
    key = (type(shape), shape.to_json_string(), experts, form.has_value_head, form.weights_dtype)
    if key not in _TEMPLATES:
        module = meta_module(shape, form)
        kinds = tuple(layer_kind(layer) for layer in layer_list(module))
        _TEMPLATES[key] = module, kinds, truncate(module, kinds)
    module, kinds, kept = _TEMPLATES[key]
    return copy.deepcopy(module), kinds, kept
