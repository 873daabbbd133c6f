"""Settings of an engine in another process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from strop.engines.model import module_of_folder
from strop.engines.weights import WeightsMetadata, matrix_names, weights_metadata
from strop.rollout.engine_group import EngineContext
from strop.utils.device import device_name


@dataclass(frozen=True, kw_only=True)
class SubprocessSettings:
    """Settings of an engine in another process."""

    device: str
    dtype: str
    weights: WeightsMetadata
    """The weights that it needs; its matrices in the precision that it computes in, to which it would round them."""
    log: Path
    """A file for what it prints."""


def subprocess_settings(context: EngineContext) -> SubprocessSettings:
    """Settings of an engine in processes of its own, from the context of a rollout worker."""
    device = torch.device(device_name(context.device)).type
    trained = context.trained
    name = context.rollout.engine
    folder = Path(context.logs or tempfile.mkdtemp(prefix=f"strop-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    dtype = context.model.dtype if context.model.dtype != "auto" else _AUTO_DTYPE[device]
    module = module_of_folder(context.model) if trained is None else trained.model.module
    return SubprocessSettings(
        device=device,
        dtype=dtype,
        weights=weights_metadata(module, dtypes=dict.fromkeys(matrix_names(module), getattr(torch, dtype))),
        log=folder / f"{name}-{context.rank}.log",
    )


_AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
