"""Models of folders, checked and made ready for packed computation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from strop.engines import model_overrides, model_support
from strop.engines.causal_lm import HALF, CausalLM, use_packed_attention
from strop.engines.config import ModelConfig
from strop.engines.cpu.layers import use_cpu_layers
from strop.engines.fused_norms import use_fused_norms
from strop.engines.gate_kernels import use_gate_kernel
from strop.engines.half_weights import WideProducts, round_weights, weights_of_products
from strop.engines.liger.kernels import use_liger_kernels
from strop.engines.lora import adapters
from strop.engines.lora.peft_settings import check_targets
from strop.engines.model_folder import runs_own_code
from strop.engines.moe.layers import hold_choice_biases
from strop.engines.moe.precision import use_compute_precision
from strop.engines.multimodal.inputs import language_model_class, media_inputs
from strop.engines.multimodal.vl_model import Vision
from strop.engines.parallel.ranks import Parallel
from strop.engines.precision import compute_dtype, half_to_read, weights_dtype
from strop.engines.pretrained_config import load_model_config
from strop.engines.pretrained_module import read_module
from strop.engines.rotary_kernels import use_rotary_kernel
from strop.engines.tokenizer import unused_tokens
from strop.engines.weights import WeightsMetadata, weights_metadata
from strop.utils.device import device_name


def load_model(
    config: ModelConfig,
    *,
    device: str = "auto",
    parallel: Parallel | None = None,
    policy: ModelConfig | None = None,
    holds_half: bool = False,
) -> CausalLM:
    """Load a model folder for packed computation, and compare it with its own attention.

    Args:
        config: path, precision, checkpointing.
        device: `auto` or a device name.
        parallel: the ranks that will hold it, in place of `device`. A model for several ranks stays in host
            memory until it is sharded (TrainEngine, engines.sharding.fsdp.shard): no device holds all of it.
        policy: the model that sampled what this one reads, whose tokenizer says which tokens there are; None: itself.
        holds_half: the model is never trained: weights of products are rounded to the precision of computation
            (half_weights.py). The frozen base of an adapter is, where that loses nothing.

    Raises:
        ValueError: no such folder, no causal language model in it, an architecture whose result differs on
            packed tokens (recurrent layers, soft-capped logits), or no vision tower where one is to be frozen.
    """
    auto_class = check_language_model(config)
    computes_on = device_of(config, device, parallel)
    module = read_module(config, auto_class, half=half_to_read(config, computes_on, holds_half))
    model = prepare_model(module, config, computes_on, parallel, holds_half=holds_half)
    model.unused_tokens = unused_tokens(policy or config, model.vocab_size)
    return model


def check_language_model(config: ModelConfig) -> Any:
    """The class of transformers that loads the language model of a folder; no weight is read.

    Raises:
        ValueError: no such folder, no configuration of a model in it, or a family that is not carried.
    """
    shape = load_model_config(config)
    auto_class = language_model_class(shape)
    model_support.check_family(shape, auto_class, config.path)
    if config.lora.enabled:
        check_targets(_without_weights(config, shape), config.lora)
    return auto_class


def _without_weights(config: ModelConfig, shape: object) -> Any:
    """The language model of a folder on the meta device."""
    auto_class = language_model_class(shape)  # outside: whatever is imported for it has tensors of its own
    with torch.device("meta"):
        return auto_class.from_config(
            shape, dtype=weights_dtype(config), trust_remote_code=runs_own_code(config)
        )


def module_of_folder(config: ModelConfig) -> nn.Module:
    """The language model of a folder as `load_model` would make it on one device, without its weights.

    Raises:
        ValueError: no such folder, or no configuration of a language model in it.
    """
    module = _without_weights(config, load_model_config(config))
    hold_choice_biases(module)
    module.tie_weights()
    language_model: nn.Module = module
    return language_model


def weights_of_folder(config: ModelConfig) -> WeightsMetadata:
    """The weights of `module_of_folder`."""
    return weights_metadata(module_of_folder(config))


def device_of(config: ModelConfig, device: str, parallel: Parallel | None) -> torch.device:
    """The device that computes; refused before anything is read where it has not this precision."""
    computes_on = torch.device(device_name(device)) if parallel is None else parallel.device
    compute_dtype(config, computes_on)
    return computes_on


def prepare_model(
    module: Any,
    config: ModelConfig,
    computes_on: torch.device,
    parallel: Parallel | None,
    *,
    holds_half: bool = False,
) -> CausalLM:
    """A module that was read, on its device, checked, with packed attention; arguments as of `load_model`."""
    dtype = compute_dtype(config, computes_on)
    use_compute_precision(module, computes_on)
    hold_choice_biases(module)
    if holds_half and dtype in HALF:
        round_weights(weights_of_products(module, computes_on), dtype)
    if dtype == torch.float64:
        model_overrides.use_exact(module)
    is_sharded_later = parallel is not None and parallel.mesh is not None
    loads_on = torch.device("cpu") if is_sharded_later else computes_on
    module.to(loads_on)
    module.eval()
    by_formula = config.attn_implementation == "eager"
    with WideProducts():
        model_support.check_packed(module, loads_on, by_formula=by_formula)
    media = media_inputs(module, config.path)
    use_packed_attention(module, media, by_formula=by_formula)
    if config.gradient_checkpointing:
        checkpoint_layers(module)
    model = CausalLM(module, compute_dtype=dtype, media=media)
    if config.use_liger:
        use_liger_kernels(module, computes_on)
    elif computes_on.type == "cuda":
        use_fused_norms(module)
        use_gate_kernel(module)
        use_rotary_kernel(module)
    elif computes_on.type == "cpu":
        use_cpu_layers(module)
        use_rotary_kernel(module)
    if config.lora.enabled:
        adapters.add_lora(model, config.lora)
    if config.freeze_vision_tower:
        _freeze_tower(module, media, config.path)  # its adapters too
    return model


def checkpoint_layers(module: Any) -> None:
    """Let the backward pass compute the layers of a model again."""
    # No layer draws random numbers, whose state torch would ask the device for: no step can be captured then.
    module.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for part in module.modules():
        if (checkpoint := vars(part).get("_gradient_checkpointing_func")) is not None:
            part._gradient_checkpointing_func = functools.partial(_checkpointed, checkpoint)
    module.train()  # transformers recomputes only in training mode; every dropout is 0


def _checkpointed(checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any) -> Any:
    """A pass of a layer, of which nothing is prepared for a backward pass that does not come."""
    return checkpoint(layer, *args) if torch.is_grad_enabled() else layer(*args)


def _freeze_tower(module: nn.Module, media: Vision | None, path: str) -> None:
    """Take the part that reads media out of training."""
    if media is None or media.tower is None:
        raise ValueError(
            f"model.freeze_vision_tower is true, but model.path {path!r} is a {type(module).__name__}, which has no "
            f"vision tower; set it to false"
        )
    media.tower.requires_grad_(False)
