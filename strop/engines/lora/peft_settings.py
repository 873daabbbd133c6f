"""PEFT's configuration of an adapter: of a new one from model.lora, of a saved one from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig
from strop.utils.hub.models import fetch_copy

CONFIG_FILE = "adapter_config.json"
_ALL = ("all-linear",)


def import_peft() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "model.lora needs the package peft; install it with: pip install 'strop[lora]'"
        ) from error
    return peft


def check_targets(module: nn.Module, config: LoraConfig) -> None:
    """Refuse names of layers that take no adapter; the weights are not looked at (they may be on the meta device).

    Raises:
        ValueError: the sentence names one, and says what it is.
    """
    if config.path or config.target_modules == _ALL:
        return
    layers = [name for name, _ in module.named_modules()]
    for target in config.target_modules:
        end = f".{target}"
        if any(f".{name}".endswith(end) for name in layers):
            continue
        stacked = _stacked(module)
        if any(f".{name}".endswith(end) for name in stacked):
            continue
        linear = sorted({name.rpartition(".")[2] for name in _linear(module)})
        experts = sorted({".".join(name.split(".")[-2:]) for name in stacked})
        raise ValueError(
            f"model.lora.target_modules has {target!r}, which is the name of no layer of this model; its linear layers "
            f"are {', '.join(linear)}{', its stacked experts ' + ', '.join(experts) if experts else ''}"
        )


def new_settings(peft: Any, config: LoraConfig, model: CausalLM) -> Any:
    """PEFT's configuration of a new adapter."""
    check_targets(model.module, config)
    layers = [f".{name}" for name, _ in model.module.named_modules()]
    targets: str | list[str] = [
        target for target in config.target_modules if any(name.endswith(f".{target}") for name in layers)
    ]
    # `down_proj` may be a layer and a stack: it is the layer, and `experts.down_proj` the stack.
    ends = tuple(f".{target}" for target in config.target_modules if target not in targets)
    experts = [name for name in _stacked(model.module) if f".{name}".endswith(ends)]
    if config.target_modules == _ALL:
        # PEFT counts stacked experts in for some models.
        targets = _linear(model.module) if _stacked(model.module) else "all-linear"
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        target_parameters=experts or None,
        task_type="SEQ_CLS" if model.is_value_model else "CAUSAL_LM",
        base_model_name_or_path=getattr(model.config, "_name_or_path", None) or None,
    )


def settings_of_folder(peft: Any, config: LoraConfig, model: CausalLM) -> Any:
    """PEFT's configuration of an adapter folder."""
    folder = Path(config.path)
    fetch_copy(folder, weights=True)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"model.lora.path {config.path!r} has no {CONFIG_FILE}; give a PEFT adapter folder")
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"model.lora.path {config.path!r} has no usable {CONFIG_FILE}: {str(error).strip().splitlines()[0]}"
        ) from error
    full_modules = set(getattr(settings, "modules_to_save", None) or ())
    if model.is_value_model:
        full_modules -= {"classifier", "score"}  # the value head, which is trained whole here too
    if not isinstance(settings, peft.LoraConfig) or settings.bias != "none" or full_modules:
        raise ValueError(
            f"model.lora.path {config.path!r} is an adapter of type {getattr(settings.peft_type, 'value', '?')} with "
            f"bias {getattr(settings, 'bias', 'none')!r} and whole modules {sorted(full_modules)}; only plain LoRA can "
            f"be continued"
        )
    settings.modules_to_save = None
    if config.rank != settings.r:
        raise ValueError(
            f"model.lora.rank is {config.rank}, but the adapter in {config.path!r} has rank {settings.r}; set "
            f"model.lora.rank={settings.r}"
        )
    return settings


def _linear(module: Any) -> list[str]:
    """Names of the linear layers, the head left out, and routers that are linear layers and give more (Llama 4)."""
    head = module.get_output_embeddings() or getattr(module, "score", None)
    plain = (nn.Linear.forward, Conv1D.forward)
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and type(part).forward in plain and part is not head
    ]


def _stacked(module: nn.Module) -> list[str]:
    """Names of the parameters that hold one matrix for each expert."""
    return [name for name, weight in module.named_parameters() if weight.dim() == 3 and "expert" in name]
