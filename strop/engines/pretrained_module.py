"""Model of a folder, as transformers makes it, with all of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from strop.engines.config import ModelConfig
from strop.engines.finite_weights import check_finite, saved_tensors
from strop.engines.half_weights import linear_layers_in, widen_others
from strop.engines.model_facts import settle_config
from strop.engines.model_folder import check_weights, floating_types, reading, runs_own_code, stored_types
from strop.engines.precision import weights_dtype
from strop.engines.pretrained_config import load_model_config, stored_scheme
from strop.engines.quantised.model import load_dequantised
from strop.engines.quantised.scheme import Scheme
from strop.engines.quantised.weights import dequantised_types
from strop.utils.hub.models import fetch_copy


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
