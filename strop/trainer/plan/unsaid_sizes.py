"""Sizes of a model that its config.json does not say, for which transformers takes its defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from strop.engines.config import ModelConfig
from strop.engines.model_folder import model_json

NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
"""Settings that memory and time follow from."""


def unsaid_sizes(model: ModelConfig, shape: PreTrainedConfig) -> dict[str, int]:
    """Sizes that neither config.json nor model.override_config says, with the values that were taken.

    What follows from another size, such as the size of a head, is not among them, but for the number of key heads:
    where it is not said there are as many as heads, several times what most models have.

    Args:
        model: whose folder has the config.json.
        shape: as transformers read it.
    """
    written = model_json(Path(model.path) / "config.json", f"model.path {model.path!r}")
    said = _names(written) | _names(model.override_config)
    text = shape.get_text_config()
    defaults = {field.name: field.default for field in dataclasses.fields(text)}
    aliases = text.attribute_map  # hidden_size: n_embd
    unsaid = {}
    for name in NAMES:
        same = [name, aliases.get(name, name), *(alias for alias, other in aliases.items() if other == name)]
        own = next((each for each in same if each in defaults), None)
        if own is None or said.intersection(same):
            continue
        value = getattr(text, own)
        if isinstance(value, int) and (defaults[own] is not None or name == "num_key_value_heads"):
            unsaid[own] = value
    return unsaid


def _names(settings: Mapping[str, Any]) -> set[str]:
    """Names of settings of a model that reads text, and of the text part of one that reads images as well."""
    parts = [value for name, value in settings.items() if name in _TEXT_PARTS and isinstance(value, Mapping)]
    return set(settings).union(*parts)


_TEXT_PARTS = ("text_config", "llm_config", "language_config")
