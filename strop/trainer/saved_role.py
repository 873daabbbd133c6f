"""The model of a role, read from a checkpoint of any number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from strop.engines.causal_lm import CausalLM
from strop.engines.checkpoint_reader import STATE_FILE, SavedTensors
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.lora.adapters import add_lora, has_adapter
from strop.engines.model import load_model
from strop.engines.model_folder import reading, runs_own_code
from strop.engines.model_support.parity import check_packed
from strop.engines.multimodal.inputs import language_model_class
from strop.engines.pretrained_config import read_model_config
from strop.engines.role_checkpoint import CONFIG_FOLDER, load_weights
from strop.engines.role_tensors import MODEL
from strop.engines.value_models import load_value_model

ACTOR, CRITIC, PRM = "actor", "critic", "prm"
"""Roles that can be exported: the model that a run trains (a language model; of `strop reward-model` a reward model), a
value model (one number per text), and the process reward model, a language model too."""
HF_FOLDER = "model"
"""Folder of a checkpoint with the actor as a Hugging Face folder, where the run wrote one."""
_VALUE_HEAD = "score."
"""Weights of the head of a value model: of a critic, and of the actor of a run that trains a reward model."""
_CPU = torch.device("cpu")


def read_role(checkpoint: Path, config: ModelConfig, *, role: str = ACTOR) -> CausalLM:
    """A role's model on the CPU with the weights of a checkpoint, whatever number of ranks wrote it.

    Args:
        checkpoint: its folder.
        config: the model that the run started from.
        role: ACTOR, CRITIC or PRM.

    Raises:
        ValueError: the checkpoint has no such role, is damaged, or is of another model.
    """
    folder = checkpoint / role
    if not (folder / STATE_FILE).is_file():
        if role == ACTOR and (checkpoint / HF_FOLDER / "config.json").is_file():
            return load_model(_plain(config, checkpoint / HF_FOLDER), device="cpu")
        names = ", ".join(sorted(path.name for path in checkpoint.iterdir())) or "nothing"
        raise ValueError(
            f"{checkpoint} holds no {role} (found: {names}); give a checkpoint of a run that trains one"
        )
    saved, described = SavedTensors(folder), _config_folder(checkpoint, role, config)
    is_value_model = any(name.startswith(f"{MODEL}{_VALUE_HEAD}") for name in saved.tensors)
    if any(".lora_" in name for name in saved.tensors):
        load = load_value_model if is_value_model else load_model
        double = _saved_dtype(folder) == torch.float64
        model = load(_plain(config, Path(config.path), "float64" if double else "float32"), device="cpu")
        add_lora(model, config.lora)
        if is_value_model:
            settings = read_model_config(described, config, f"the model in {described} cannot be built")
            module: Any = model.module
            padding = getattr(settings.get_text_config(), "pad_token_id", None)
            module.config.get_text_config().pad_token_id = padding
    else:
        model = _unread_model(
            described,
            config,
            _saved_dtype(folder),
            num_saved=saved.num_weights,
            is_value_model=is_value_model,
        )
    load_weights(folder, model)
    if not has_adapter(model):
        check_packed(model.module, _CPU)
    return model


def role_sources(checkpoint: Path, role: str, config: ModelConfig) -> list[Path]:
    """Folders with configuration and tokenizer, best first: of the checkpoint, then of the run's first model."""
    return [checkpoint / role / CONFIG_FOLDER, checkpoint / HF_FOLDER, Path(config.path)]


def _saved_dtype(folder: Path) -> torch.dtype:
    for name, saved in SavedTensors(folder).tensors.items():
        if name.startswith(MODEL) and saved.dtype.is_floating_point:
            return saved.dtype
    raise ValueError(f"checkpoint {folder} is damaged: it holds no weights")


def _plain(
    config: ModelConfig, folder: Path, dtype: Literal["float32", "float64"] = "float32"
) -> ModelConfig:
    """The model of a folder, as it is."""
    return dataclasses.replace(
        config,
        path=str(folder),
        dtype=dtype,
        gradient_checkpointing=False,
        lora=LoraConfig(),
        use_liger=False,
    )


def _config_folder(checkpoint: Path, role: str, config: ModelConfig) -> Path:
    """Folder with the config.json of a role."""
    sources = role_sources(checkpoint, role, config)
    for folder in sources:
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(
        f"{checkpoint} does not say what model it holds: there is no config.json in {', '.join(map(str, sources))}; "
        f"put the one of the model that the run started from into the first"
    )


def _unread_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, *, num_saved: int, is_value_model: bool
) -> CausalLM:
    """The architecture that a folder describes, with any weights; `check_packed` then makes it ready.

    Args:
        num_saved: numbers in the checkpoint, above which no memory is asked for.
        is_value_model: it gives one number per text, as a critic and a reward model do.
    """
    trust = runs_own_code(config)
    complaint = f"the model in {folder} cannot be built"
    settings = read_model_config(folder, config, complaint)
    auto_class: Any = language_model_class(settings)
    if is_value_model:
        settings.num_labels = 1
        auto_class = AutoModelForSequenceClassification
    with reading(folder, complaint), no_init_weights():
        with torch.device("meta"):  # its form costs no memory
            form = auto_class.from_config(settings, dtype=dtype, trust_remote_code=trust)
        described = sum(weight.numel() for weight in form.parameters())
        if described > 2 * num_saved:  # tied weights may count twice
            raise ValueError(
                f"config.json describes {described} weights, but the checkpoint holds {num_saved}"
            )
        module = auto_class.from_config(settings, dtype=dtype, trust_remote_code=trust)
        module.tie_weights()  # part of the initialization that was left out
    return CausalLM(module.eval(), compute_dtype=dtype)
