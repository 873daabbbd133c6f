"""Model folders: read, checked and made ready for packed computation."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from strop.engines import model_overrides, model_support
from strop.engines.causal_lm import HALF, CausalLM, use_packed_attention
from strop.engines.config import ModelConfig
from strop.engines.cpu.layers import use_cpu_layers
from strop.engines.finite_weights import check_finite, saved_tensors
from strop.engines.fused_norms import use_fused_norms
from strop.engines.gate_kernels import use_gate_kernel
from strop.engines.half_weights import (
    WideProducts,
    linear_layers_in,
    round_weights,
    weights_of_products,
    widen_others,
)
from strop.engines.liger.kernels import use_liger_kernels
from strop.engines.lora import adapters
from strop.engines.model_facts import settle_config
from strop.engines.model_folder import (
    check_weights,
    floating_types,
    model_json,
    reading,
    runs_own_code,
    stored_types,
)
from strop.engines.moe.layers import hold_choice_biases
from strop.engines.moe.precision import use_compute_precision
from strop.engines.multimodal.families import takes_media, written_template
from strop.engines.multimodal.inputs import language_model_class, media_inputs
from strop.engines.multimodal.vl_model import Vision
from strop.engines.parallel.ranks import Parallel
from strop.engines.precision import compute_dtype, half_to_read, weights_dtype
from strop.engines.quantised.model import load_dequantised
from strop.engines.quantised.scheme import Scheme, forget, scheme_of
from strop.engines.quantised.weights import dequantised_types
from strop.engines.rotary_kernels import use_rotary_kernel
from strop.engines.untrusted_model import check_settings
from strop.engines.unused_tokens import unused_token_ids
from strop.engines.weights import WeightsMetadata, weights_metadata
from strop.utils.chat_template import asks_for_time, render_with, stop_clock, trust_template
from strop.utils.chat_template.answers import keep_special_tokens
from strop.utils.device import device_name
from strop.utils.embedding_rows import set_num_rows
from strop.utils.hub.models import fetch_copy


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer.
    """
    shape, source = load_model_config(config), config.tokenizer_folder
    key = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    fetch_copy(Path(source), weights=False, tokenizer=True, offline=config.local_files_only)
    if not Path(source).is_dir():
        raise ValueError(f"{key} {source!r} is not a folder; give one with a tokenizer")
    if not has_tokenizer(source):
        names = sorted(p.name for p in Path(source).iterdir())
        raise ValueError(
            f"{key} {source!r} has no tokenizer files (found: {', '.join(names[:8])}); save the tokenizer "
            f"into the folder: tokenizer.save_pretrained(FOLDER)"
        )
    complaint = f"{key} {source!r} has no usable tokenizer"
    trust = runs_own_code(config)
    with reading(source, complaint):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
        tokenizer.decode(
            tokenizer("probe", add_special_tokens=False)["input_ids"]
        )  # also settings are used here
    size: int | None = getattr(shape.get_text_config(), "vocab_size", None)
    if config.tokenizer_path and size is not None and len(tokenizer) > size:
        raise ValueError(
            f"{key} {source!r} has {len(tokenizer)} tokens, and the model in {config.path!r} knows {size}: give a "
            f"tokenizer that it was trained with"
        )
    of_processor = Path(source) / "chat_template.json"
    if not tokenizer.chat_template and of_processor.is_file():  # some models for images keep it there alone
        template = model_json(of_processor, complaint).get("chat_template")
        if not isinstance(template, str):
            raise ValueError(f"{complaint}: {of_processor.name} has no text under chat_template")
        tokenizer.chat_template = template
    if config.chat_template:
        tokenizer.chat_template = model_overrides.template_text(config.chat_template)
    if takes_media(shape) and isinstance(tokenizer.chat_template, str):
        render_with(tokenizer, written_template(shape, tokenizer.chat_template))
    if trust:
        trust_template(tokenizer)
    if asks_for_time(tokenizer.chat_template):
        stop_clock(tokenizer, config.template_date)
    keep_special_tokens(tokenizer, config.keep_special_tokens)
    if size is not None:
        set_num_rows(tokenizer, size)
    return tokenizer


def has_tokenizer(folder: str) -> bool:
    """True if a folder has files of a tokenizer. Without them transformers makes one with an empty vocabulary,
    and says nothing."""
    names = [path.name for path in Path(folder).iterdir()]
    return any(
        name.startswith(("token", "vocab")) or name.endswith((".model", ".tiktoken")) for name in names
    )


def unused_tokens(config: ModelConfig, num_rows: int) -> tuple[int, ...]:
    """Ids below `num_rows` for which a model's tokenizer has no token (unused_tokens.py); none without a tokenizer.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    source = config.tokenizer_folder
    fetch_copy(Path(source), weights=False, tokenizer=True, offline=config.local_files_only)
    if not Path(source).is_dir() or not has_tokenizer(source):
        return ()
    return unused_token_ids(load_tokenizer(config), num_rows, config.path)


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
        adapters.check_targets(_without_weights(config, shape), config.lora)
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
    # The second name is that of older versions of transformers.
    later = hasattr(module, "activation_checkpointing_enable")
    enable = module.activation_checkpointing_enable if later else module.gradient_checkpointing_enable
    # No layer draws random numbers, whose state torch would ask the device for: no step can be captured then.
    enable({"use_reentrant": False, "preserve_rng_state": False})
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


def read_module(
    config: ModelConfig,
    auto_class: Any,
    *,
    kind: str = "causal language model",
    may_miss: str | None = None,
    half: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """The model of a folder, with every weight of its architecture found there.

    Args:
        config: says which folder, and how it is read.
        auto_class: of transformers, which makes the model.
        kind: what is wanted, for the sentence where it is not there.
        may_miss: beginning of the names of weights that may be missing; they are 0.
        half: precision of linear layers, where the folder has all its weights in it; None: they are wide.
        options: settings of the model that are not those of its config.json.

    Raises:
        ValueError: the folder holds no such model, or not all of its weights, or some that are not finite.
    """
    source = config.path
    fetch_copy(Path(source), weights=True, code=runs_own_code(config), offline=config.local_files_only)
    shape = load_model_config(config)
    for name, value in options.items():
        setattr(shape, name, value)
    complaint = f"model folder {source!r} holds no loadable {kind}"
    scheme = stored_scheme(config)
    with reading(source, complaint):
        types = stored_types(source) if scheme is None else dequantised_types(source, scheme)
    check_weights(source, types)
    if half is not None and floating_types(types) != {half}:
        half = None
    with reading(source, complaint), _layers_read_in(half, config):
        module, loading = _loaded(config, scheme, auto_class, shape, half=half)
    new = [name for name in loading["missing_keys"] if may_miss is not None and name.startswith(may_miss)]
    with torch.no_grad():
        for name in new:
            module.get_parameter(name).zero_()
    _check_loaded(loading, new, f"model folder {source!r}", type(module).__name__, kind)
    check_finite(saved_tensors(module), f"model folder {source!r}")
    settle_config(module, source)
    if half is not None:
        widen_others(module, half)
    return module


def _loaded(
    config: ModelConfig, scheme: Scheme | None, auto_class: Any, shape: Any, *, half: torch.dtype | None
) -> tuple[Any, dict[str, Any]]:
    """The model of a folder as transformers gives it, with what it says of weights that are missing or do not fit.

    Args:
        config: says which folder.
        scheme: form of its quantised weights; None: they are not quantised.
        auto_class: of transformers, which makes the model.
        shape: its configuration.
        half: precision of linear layers; None: they are wide.
    """
    dtype, trust = weights_dtype(config), runs_own_code(config)
    if scheme is not None:
        return load_dequantised(
            config.path, scheme, auto_class, shape, dtype=dtype, numbers=half or dtype, trust=trust
        )
    module, loading = auto_class.from_pretrained(
        config.path,
        dtype=dtype,
        trust_remote_code=trust,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused by `_check_loaded`, by name
        config=shape,
    )
    return module, loading


def _check_loaded(
    loading: Mapping[str, Any], new: Collection[str], folder: str, model: str, kind: str
) -> None:
    """Refuse weights of another shape, and missing ones but those that are new.

    Raises:
        ValueError: the sentence names the first of them.
    """
    for name, stored, described in sorted(loading["mismatched_keys"]):
        raise ValueError(
            f"{folder} holds no loadable {kind}: {name} has shape {list(stored)} in its files and "
            f"{list(described)} by its config.json; they are of two models"
        )
    missing = sorted(set(loading["missing_keys"]) - set(new))
    if missing:
        raise ValueError(
            f"{folder} has no weights for {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''} of "
            f"{model}, which would start at random; give a folder with all weights of a {kind}"
        )


def _layers_read_in(half: torch.dtype | None, config: ModelConfig) -> contextlib.AbstractContextManager[None]:
    """Inside, linear layers of the model are read in this precision, if there is one."""
    if half is None:
        return contextlib.nullcontext()
    num_tokens = getattr(load_model_config(config).get_text_config(), "vocab_size", None)
    if not isinstance(num_tokens, int):
        raise ValueError(
            f"its config.json gives vocab_size as {num_tokens!r}, by which the head is told from other layers; "
            f"write the number of tokens there"
        )
    return linear_layers_in(half, vocab_size=num_tokens)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _how_to_fetch(path: str) -> str:
    """The command for a path that looks like a name of the hub; else nothing."""
    if not _HUB_NAME.fullmatch(path):
        return ""
    folder = f"models/{path.partition('/')[2]}"
    return f"; if it is a name of the hub: hf download {path} --local-dir {folder}, then model.path={folder}"


def load_model_config(config: ModelConfig) -> PreTrainedConfig:
    """The configuration of a model folder, as transformers reads it.

    Raises:
        ValueError: no such folder, or no configuration of a model in it.
    """
    if not config.path:
        raise ValueError("model.path is not set; give a Hugging Face model folder: model.path=FOLDER")
    folder = Path(config.path)
    fetch_copy(folder, weights=False, code=config.trust_remote_code, offline=config.local_files_only)
    if not folder.is_dir():
        raise ValueError(
            f"model.path {config.path!r} is not a folder; give a Hugging Face model folder on this machine"
            f"{_how_to_fetch(config.path)}"
        )
    if not (folder / "config.json").is_file():
        of_run = folder / "model"
        if (of_run / "config.json").is_file():
            raise ValueError(f"model.path {config.path!r} is the folder of a run; its model is {of_run}")
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"model.path {config.path!r} has no config.json (found: {names}); is it a model folder?"
        )
    return read_model_config(
        folder, config, f"model.path {config.path!r} has a config.json that does not describe a model"
    )


def read_model_config(folder: Path, config: ModelConfig, complaint: str) -> PreTrainedConfig:
    """The configuration of the model in a folder, as transformers reads it; of weights that are read dequantised,
    without saying that they are quantised.

    Args:
        folder: with config.json.
        config: says whether the folder's own code may run.
        complaint: beginning of the sentence of an error.

    Raises:
        ValueError: there is none that can be used.
    """
    shape = _described_config(folder, config, complaint)
    if scheme_of(shape) is not None:
        forget(shape)
    return shape


def stored_scheme(config: ModelConfig) -> Scheme | None:
    """Form in which the weights of a model folder are quantised; None where they are not, or in none that is read.

    Raises:
        ValueError: as `read_model_config`.
    """
    return scheme_of(
        _described_config(Path(config.path), config, f"model.path {config.path!r} has no usable config.json")
    )


def _described_config(folder: Path, config: ModelConfig, complaint: str) -> PreTrainedConfig:
    """The same with all that config.json and model.override_config say."""
    trust = runs_own_code(config)
    if config.external_lib:
        model_overrides.import_external(config)
    settings = model_json(folder / "config.json", complaint)
    check_settings(settings, complaint)
    model_support.check_type(settings, str(folder))
    if not trust and settings.get("auto_map"):
        # Some also work without; transformers says for which it needs the code, and asks at the keyboard.
        complaint += " (it names code of its own, which is run only with model.trust_remote_code=true)"
    with reading(folder, complaint):
        if trust or config.external_lib:  # what their code registers counts
            shape: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
        else:
            shape = copy.deepcopy(_parsed(str(folder), json.dumps(settings)))
    if not config.override_config:
        model_support.check_rotary(shape, complaint)
        return shape
    merged = model_overrides.overridden(settings, shape.to_dict(), config.override_config)
    check_settings(merged, "model.override_config")
    complaint = "model.override_config does not fit this model"
    with reading(folder, complaint):
        changed: PreTrainedConfig = type(shape).from_dict(merged)
    model_support.check_rotary(changed, complaint)
    return changed


@functools.lru_cache(maxsize=16)
def _parsed(folder: str, _settings: str) -> PreTrainedConfig:
    """The configuration in a folder whose config.json holds these settings: a run asks for it a dozen times."""
    shape: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return shape
