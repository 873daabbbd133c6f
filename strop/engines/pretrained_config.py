"""Configuration of a model folder, as transformers reads it."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from strop.engines import model_overrides, model_support
from strop.engines.config import ModelConfig
from strop.engines.model_folder import model_json, reading, runs_own_code
from strop.engines.quantised.scheme import Scheme, forget, scheme_of
from strop.engines.untrusted_model import check_settings
from strop.utils.hub.models import fetch_copy


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


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _how_to_fetch(path: str) -> str:
    """The command for a path that looks like a name of the hub; else nothing."""
    if not _HUB_NAME.fullmatch(path):
        return ""
    folder = f"models/{path.partition('/')[2]}"
    return f"; if it is a name of the hub: hf download {path} --local-dir {folder}, then model.path={folder}"


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
