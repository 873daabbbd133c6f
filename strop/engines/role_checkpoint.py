"""Checkpoint of a trained role, from which it continues on any number of ranks.

    global_step_40/actor/           shards and state.json (checkpoint.py):
                                      model/<Hugging Face name>   weights and persistent buffers, tied ones once;
                                                                  with adapters, only what is trained
                                      optim/<kind>/<parameter>    optimizer state
    global_step_40/actor/config/    config.json, generation_config.json, tokenizer, the model's own code: what an
                                      export needs besides

Names of weights are those of weights.py, the map that weight sync uses as well.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import custom_object_save

from strop.engines.causal_lm import CausalLM
from strop.engines.checkpoint import load_sharded
from strop.engines.finite_weights import check_finite
from strop.engines.kinds import TrainableEngine
from strop.engines.role_tensors import OPTIMIZER, of_other_stages, present, role_tensors

CONFIG_FOLDER = "config"
"""Folder of a role with what its weights alone do not say."""


def save_role(folder: Path, engine: TrainableEngine, *, in_background: bool = False) -> Future[None] | None:
    """Write this rank's part of a role; every rank calls this.

    Args:
        folder: of the role in a checkpoint; all ranks see the same one.
        engine: its model and optimizer.
        in_background: return once the tensors are copied to host memory.

    Returns:
        What is being written, or None when it is written.

    Raises:
        OSError: the disk refused.
    """
    if engine.parallel.rank == 0:
        _save_config(engine.model, folder / CONFIG_FOLDER)
    return engine.save_state(folder, in_background=in_background)


def load_role(folder: Path, engine: TrainableEngine) -> None:
    """Continue where `save_role` was called, on any number of ranks; every rank calls this.

    Args:
        folder: of the role in a checkpoint.
        engine: a model of the same architecture, with the same kind of optimizer; its values are replaced.

    Raises:
        ValueError: the checkpoint is of another model or optimizer, or damaged.
    """
    engine.load_state(folder)


def load_optimizer(folder: Path, engine: TrainableEngine) -> None:
    """The optimizer's state of a role, for a new run: its moments, but its schedule from the beginning.

    Args:
        folder: of the role in a checkpoint of the other run.
        engine: as for `load_role`; its weights stay.

    Raises:
        ValueError: as `load_role`.
    """
    engine.load_state(folder, leaves_weights=True)


def load_weights(folder: Path, model: CausalLM) -> None:
    """The weights of a role alone, without its optimizer, into a model on any number of ranks.

    Raises:
        ValueError: as `load_role`.
    """
    leave = [OPTIMIZER, *of_other_stages(model, ())]
    tensors = present(role_tensors(model))
    load_sharded(folder, tensors, leave=leave)
    check_finite(tensors.items(), f"checkpoint {folder}")


def _save_config(model: CausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    module: Any = model.module
    config = copy.deepcopy(module.config)
    config.architectures = [
        type(module).__name__.removeprefix("FSDP")
    ]  # what FSDP2 puts before a class's name
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    if module.is_remote_code():  # its class, without which the configuration describes nothing
        custom_object_save(module, folder)
