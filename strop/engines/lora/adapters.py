"""LoRA adapters on a loaded model, through PEFT: trained, switched off, merged for a rollout engine, saved.

The adapters are put into the linear layers in place, so the model keeps its class, its packed forward pass and its
own head; only parameter names change: `q_proj.weight` becomes `q_proj.base_layer.weight` beside
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. weights.py takes these additions off again.

Concurrency: on a sharded model `merged_tensors` and `save_adapter` gather tensors one by one and are called by all
ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig
from strop.engines.finite_weights import check_finite
from strop.engines.gradients import full, local
from strop.engines.lora.peft_settings import CONFIG_FILE, import_peft, new_settings, settings_of_folder
from strop.engines.lora.products import add_in_place
from strop.engines.parallel.fsdp import reshard
from strop.engines.parallel.pipeline import whole_weight
from strop.engines.weights import named_weights, weights_metadata
from strop.utils.atomic_io import share_as_usual
from strop.utils.rng import random_key

ADAPTER = "default"
"""PEFT's name of the one adapter; part of its parameters' names."""
_SAVED_PREFIX = "base_model.model."
_WEIGHTS_FILE = "adapter_model.safetensors"


def has_adapter(model: CausalLM) -> bool:
    """True if the model has an adapter."""
    return hasattr(model.module, "peft_config")


def merged_weights(model: CausalLM) -> Iterator[tuple[str, Tensor]] | None:
    """Every weight with its adapter added; None where the model has none, and its weights are as they are."""
    return merged_tensors(model) if has_adapter(model) else None


def add_lora(model: CausalLM, config: LoraConfig, *, seed: int = 0) -> None:
    """Put adapters into the model and freeze everything else, except a value head.

    W becomes W + alpha / rank * B A with B = 0 at first, so the model computes what it did. A is uniform within
    1 / sqrt(columns), a function of seed and layer name: the same on every rank. Call it before the model is
    sharded.

    Args:
        model: just loaded, with gradients off or on.
        config: with a rank above 0.
        seed: of A.

    Raises:
        ValueError: PEFT is not installed; no layer has such a name, or one that is no linear layer or the head;
            or `path` holds no LoRA adapter of this model.

    Source: Hu et al. 2021, arXiv:2106.09685; the initial A as in PEFT.
    """
    peft = import_peft()
    if model.is_sharded or has_adapter(model):
        state = "is sharded" if model.is_sharded else "has an adapter"
        raise ValueError(f"the model {state} already; add the adapter to a model that was just loaded")
    settings = settings_of_folder(peft, config, model) if config.path else new_settings(peft, config, model)
    settings.inference_mode = False
    settings.lora_dropout = 0.0  # a sampled log-prob must be the trained one
    settings.fan_in_fan_out = any(isinstance(part, Conv1D) for part in model.module.modules())
    with torch.random.fork_rng(devices=[]), _names_of_this_model():  # PEFT draws from the global generator
        try:
            peft.inject_adapter_in_model(settings, model.module, adapter_name=ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora: {str(error).strip()}") from error
    _check_layers(model)
    for _, parameter in _trained(model):  # PEFT gives adapters the precision of their layer
        parameter.data = _widened(parameter.data)
    for _, layer in _layers(model):
        if not _is_stack(layer):
            add_in_place(layer)
    if model.is_value_model:
        model.head_weight.requires_grad_(True)  # a new head of zeros learns nothing through adapters alone
    if config.path:
        _load(model, Path(config.path))
    else:
        _initialize(model, seed)


@contextlib.contextmanager
def adapter_off(model: CausalLM) -> Iterator[None]:
    """Inside, the model computes what it did without the adapter: the reference policy, with no second copy."""
    layers = [layer for _, layer in _layers(model)]
    # PEFT's own switch also freezes and unfreezes parameters, which sharding does not expect.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_values(model: CausalLM) -> list[Tensor]:
    """Copies of this rank's part of the adapter's parameters, in their order."""
    return [parameter.clone() for parameter in _parts(model)]


@contextlib.contextmanager
def adapter_at(model: CausalLM, values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the model computes with these values of its adapter (`adapter_values`): the policy that continues an
    adapter is its own reference so."""
    present = adapter_values(model)
    _take(model, values)
    try:
        yield
    finally:
        _take(model, present)


def _take(model: CausalLM, values: Sequence[Tensor]) -> None:
    for parameter, value in zip(_parts(model), values, strict=True):
        parameter.copy_(value)


def _parts(model: CausalLM) -> list[Tensor]:
    """This rank's part of each trained parameter; what a forward pass has left gathered is freed, and gathered anew."""
    if model.is_sharded:
        reshard(model)
    return [local(parameter.detach()) for _, parameter in _trained(model)]


@torch.no_grad()
def merged_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Every weight with its adapter added, under the base model's Hugging Face names: as a full tensor, but as the
    model's own shard where no adapter changes it, and without values where another stage has it.

    Names and order are those of `weights.weights_metadata`: tied weights come once. One weight is made at a time.
    """
    layers = {_weight_name(name, layer): layer for name, layer in _layers(model)}
    tensors = named_weights(model.module)
    for weight in weights_metadata(model.module):
        tensor, layer = tensors[weight.name].detach(), layers.get(weight.name)
        if layer is not None and not tensor.is_meta:
            tensor = _widened(full(tensor))
            tensor = tensor + _delta(layer).to(tensor.dtype)
        yield weight.name, tensor


def adapter_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Trained tensors, whole, under the names of a PEFT adapter file."""
    for name, parameter in _trained(model):
        whole = whole_weight(model.module, name, parameter, parameter.dtype)
        yield _SAVED_PREFIX + name.replace(f".{ADAPTER}", ""), whole


def save_adapter(model: CausalLM, folder: Path, *, write: bool = True, base: str = "") -> None:
    """Write the adapter as an ordinary PEFT folder: adapter_config.json and adapter_model.safetensors.

    Args:
        model: with an adapter.
        folder: made if it does not exist.
        write: False for a rank that helps to gather only.
        base: name of the model under the adapter for its readers, where what it has is a folder of this machine.
    """
    tensors = {name: t.cpu().contiguous() if write else t for name, t in adapter_tensors(model)}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
        share_as_usual(folder / _WEIGHTS_FILE)
        settings = {**_settings_of(model).to_dict(), "inference_mode": True}
        if base and Path(settings["base_model_name_or_path"] or ".").is_dir():
            settings["base_model_name_or_path"] = base
        # Sets (target_modules) in an order of their own, so that equal adapters are equal files.
        text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
        (folder / CONFIG_FILE).write_text(text + "\n")


def save_merged(model: CausalLM, folder: Path, *, write: bool = True) -> None:
    """Write the base model with the adapter added to its weights, as an ordinary Hugging Face folder.

    For use elsewhere; training cannot continue from it as it was. On a sharded model all ranks call this.

    Args:
        model: with an adapter.
        folder: made if it does not exist.
        write: False for a rank that helps to gather only; the one that writes keeps all weights in host memory.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in merged_tensors(model):
        whole = whole_weight(model.module, name, tensor, tensor.dtype)
        if write:
            state[name] = _widened(whole.to("cpu", copy=True))
    if write:
        module: Any = model.module
        module.save_pretrained(folder, state_dict=state)
        model.save_media_settings(folder)
        model.finish_saved(folder)


@contextlib.contextmanager
def _names_of_this_model() -> Iterator[None]:
    """Inside, PEFT takes the names of layers as they are.

    It reads `gate_proj`, `up_proj` and `down_proj` of a model with stacked experts as the names of transformers 4 for
    the matrices of each expert. But layers without experts and shared experts have linear layers of these names: they
    got no adapter, and the experts got one that nobody had named. Remove this when PEFT tells the two apart.
    """
    conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def _settings_of(model: CausalLM) -> Any:
    """PEFT's configuration of the model's adapter."""
    module: Any = model.module
    return module.peft_config[ADAPTER]


def _layers(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, under the base model's names."""
    layer_class = import_peft().tuners.lora.LoraLayer
    for name, part in model.module.named_modules():
        if isinstance(part, layer_class):
            yield name, part


def _is_stack(layer: object) -> bool:
    """True if the adapter is that of a parameter with one matrix for each expert."""
    return hasattr(layer, "parameter_name")


def _weight_name(name: str, layer: Any) -> str:
    """The base model's name of the weight that a layer adapts; PEFT wraps experts once for each of their parameters."""
    if not _is_stack(layer):
        return f"{name}.weight"
    return f"{name.replace('.base_layer', '')}.{layer.parameter_name}"


def _check_layers(model: CausalLM) -> None:
    """Every adapter is the plain product that `_delta` merges, and none is on a head that is used as a matrix."""
    plain = import_peft().tuners.lora.Linear
    for name, layer in _layers(model):
        if _is_stack(layer):
            continue
        if type(layer) is not plain or layer.lora_variant or layer.lora_bias[ADAPTER]:
            raise ValueError(
                f"model.lora would adapt {name}, a {type(layer.get_base_layer()).__name__}, as {type(layer).__name__} "
                f"{sorted(layer.lora_variant) or ''}; only plain adapters of linear layers are supported".replace(
                    "  ", " "
                )
            )
        if layer.get_base_layer().weight is model.head_weight:
            raise ValueError(
                f"model.lora.target_modules names the head {name}, which takes no adapter; leave it out"
            )


def _trained(model: CausalLM) -> Iterator[tuple[str, nn.Parameter]]:
    """Adapters, and a value head, whether they take gradients now or not."""
    for name, parameter in model.module.named_parameters():
        is_head = parameter is model.head_weight and model.is_value_model
        if f".{ADAPTER}." in name or is_head:
            yield name, parameter


@torch.no_grad()
def _initialize(model: CausalLM, seed: int) -> None:
    for name, layer in _layers(model):
        weight = layer.lora_A[ADAPTER].weight  # [rank, columns]
        generator = torch.Generator().manual_seed(random_key(seed, "lora", name))
        bound = weight.shape[1] ** -0.5
        drawn = torch.empty(weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        weight.copy_(drawn)
        layer.lora_B[ADAPTER].weight.zero_()


@torch.no_grad()
def _load(model: CausalLM, folder: Path) -> None:
    """Take the adapter's values from a PEFT folder; every one must be there, and no other."""
    try:
        tensors: Mapping[str, Tensor] = load_file(folder / _WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"model.lora.path {str(folder)!r} has no readable {_WEIGHTS_FILE}: {error}"
        ) from error
    parameters = {_SAVED_PREFIX + name.replace(f".{ADAPTER}", ""): p for name, p in _trained(model)}
    wrong = sorted(parameters.keys() ^ tensors.keys()) or [
        n for n in parameters if parameters[n].shape != tensors[n].shape
    ]
    if wrong:
        raise ValueError(
            f"model.lora.path {str(folder)!r} holds no adapter of this model: {wrong[0]} is in one of them only, or "
            f"has another shape"
        )
    check_finite(tensors.items(), f"model.lora.path {str(folder)!r}")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _widened(tensor: Tensor) -> Tensor:
    """A weight in at least float32, in which it was loaded (half_weights.py)."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _delta(layer: Any) -> Tensor:
    """Change of the weight of a layer by its adapter."""
    a, b = full(layer.lora_A[ADAPTER].weight), full(layer.lora_B[ADAPTER].weight)
    if _is_stack(layer):
        return _delta_of_experts(layer, a, b)
    product = b @ a  # [rows, columns]
    scaled: Tensor = (product.T if layer.fan_in_fan_out else product) * layer.scaling[ADAPTER]
    return scaled


def _delta_of_experts(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """The same for stacked experts [E, rows, columns]: each has `rank` rows of A and columns of B.

    Args:
        layer: of PEFT.
        a: [rank E, inputs].
        b: [outputs, rank E].
    """
    experts = layer.num_experts
    of_inputs = a.reshape(experts, -1, a.shape[-1])  # [E, rank, inputs]
    of_outputs = b.reshape(b.shape[0], -1, experts)  # [outputs, rank, E]
    delta = torch.einsum("ore,eri->eoi", of_outputs, of_inputs) * layer.scaling[ADAPTER]
    result: Tensor = delta if layer._did_swap_in_out_features else delta.transpose(1, 2)
    return result
