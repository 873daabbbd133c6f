"""Settings of an engine in another process."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from strop.engines.config import ModelConfig
from strop.engines.model import module_of_folder
from strop.engines.pretrained_config import stored_scheme
from strop.engines.quantised.scheme import without_entries
from strop.engines.untrusted_model import WEIGHTS
from strop.engines.weights import WeightsMetadata, matrix_names, weights_metadata
from strop.rollout.engine_group import EngineContext
from strop.utils.device import device_name
from strop.utils.safe_read import read_json


@dataclass(frozen=True, kw_only=True)
class SubprocessSettings:
    """Settings of an engine in another process."""

    model: str
    """Folder with the shape of the model; weights are written into the engine."""
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
        model=shape_folder(context.model, folder / f"{name}-{context.rank}-model"),
        device=device,
        dtype=dtype,
        weights=weights_metadata(module, dtypes=dict.fromkeys(matrix_names(module), getattr(torch, dtype))),
        log=folder / f"{name}-{context.rank}.log",
    )


def shape_folder(model: ModelConfig, folder: Path) -> str:
    """The folder of a model; of one whose weights are quantised, another that does not say so, with links to all files
    but weights: an engine makes quantised layers by what config.json says, and could not take the weights that it is
    sent.

    Args:
        model: of the run.
        folder: to make, where one is needed; what is there is replaced.
    """
    source = Path(model.path).absolute()
    if stored_scheme(model) is None:
        return str(source)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix not in WEIGHTS and path.name not in ("config.json", _QUANTISER_FILE):
            (folder / path.name).symlink_to(path)
    settings = without_entries(read_json(source / "config.json"))
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return str(folder.absolute())


_QUANTISER_FILE = "hf_quant_config.json"
"""Engines read it beside config.json."""
_AUTO_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
