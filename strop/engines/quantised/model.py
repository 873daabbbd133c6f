"""A model of transformers with the weights of a folder whose weights are quantised."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from strop.engines.quantised.scheme import Scheme
from strop.engines.quantised.weights import dequantised_weights


def load_dequantised(
    folder: str,
    scheme: Scheme,
    auto_class: Any,
    shape: Any,
    *,
    dtype: torch.dtype,
    numbers: torch.dtype,
    trust: bool,
) -> tuple[Any, dict[str, Any]]:
    """The model of a folder as `auto_class.from_pretrained` gives it for an unquantised folder, with loading info.

    Args:
        folder: of the model.
        scheme: form of its quantised weights.
        auto_class: of transformers, which knows the class of the model.
        shape: configuration, which does not say that weights are quantised.
        dtype: of the parameters.
        numbers: dtype in which MXFP4 numbers are made.
        trust: code of the folder may run.
    """
    with torch.device("meta"):  # for its class, which may lie in the folder
        form = auto_class.from_config(copy.deepcopy(shape), dtype=dtype, trust_remote_code=trust)
    with dequantised_weights(folder, scheme, numbers) as weights:
        module, loading = type(form).from_pretrained(
            None,  # transformers takes either a folder or weights
            state_dict=weights,
            config=shape,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    module.config.name_or_path = folder
    if module.can_generate() and (Path(folder) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module, loading
