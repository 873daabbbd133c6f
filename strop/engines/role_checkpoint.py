"""Checkpoint of a trained role, from which it continues on any number of ranks.

    global_step_40/actor/           shards and state.json (checkpoint.py):
                                      model/<Hugging Face name>   weights and persistent buffers, tied ones once;
                                                                  with adapters, only what is trained
                                      optim/<kind>/<parameter>    optimizer state
    global_step_40/actor/config/    config.json, generation_config.json, tokenizer: what an export needs besides

Names of weights are those of weights.py, the map that weight sync uses as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.checkpoint import forms_of, load_sharded, save_sharded, save_sharded_async
from strop.engines.lora.adapters import has_adapter
from strop.engines.training import TrainEngine
from strop.engines.weights import named_weights, weights_metadata

CONFIG_FOLDER = "config"
"""Folder of a role with what its weights alone do not say."""
MODEL, OPTIMIZER = "model/", "optim/"
"""Beginnings of names of saved tensors."""


def save_role(folder: Path, engine: TrainEngine, *, in_background: bool = False) -> Future[None] | None:
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
    moments, numbers = engine.optimizer.state()
    tensors = role_tensors(engine.model) | {OPTIMIZER + name: tensor for name, tensor in moments.items()}
    forms = None
    if (pipeline := engine.model.pipeline) is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if pipeline.is_mine(_weight(name))}
        forms = pipeline.of_all_stages(forms_of(tensors))
    if engine.parallel.rank == 0:
        _save_config(engine.model, folder / CONFIG_FOLDER)
    if in_background:
        return save_sharded_async(folder, tensors, numbers, parallel=engine.parallel, forms=forms)
    save_sharded(folder, tensors, numbers, parallel=engine.parallel, forms=forms)
    return None


def load_role(folder: Path, engine: TrainEngine) -> None:
    """Continue where `save_role` was called, on any number of ranks; every rank calls this.

    Args:
        folder: of the role in a checkpoint.
        engine: a model of the same architecture, with the same kind of optimizer; its values are replaced.

    Raises:
        ValueError: the checkpoint is of another model or optimizer, or damaged.
    """
    moments, _ = engine.optimizer.state()
    tensors = role_tensors(engine.model) | {OPTIMIZER + name: tensor for name, tensor in moments.items()}
    numbers = load_sharded(folder, _present(tensors), leave=_of_other_stages(engine.model, moments))
    try:
        engine.optimizer.load_state(moments, numbers)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint {folder} is damaged: its numbers are not those of the optimizer ({type(error).__name__}: "
            f"{error}); use an earlier checkpoint"
        ) from error


def load_optimizer(folder: Path, engine: TrainEngine) -> None:
    """The optimizer's state of a role, for a new run: its moments, but its schedule from the beginning.

    Args:
        folder: of the role in a checkpoint of the other run.
        engine: as for `load_role`; its weights stay.

    Raises:
        ValueError: as `load_role`.
    """
    moments, numbers = engine.optimizer.state()
    leave = [MODEL, *_of_other_stages(engine.model, moments)]
    load_sharded(folder, {OPTIMIZER + name: tensor for name, tensor in moments.items()}, leave=leave)
    engine.optimizer.load_state(moments, numbers)


def load_weights(folder: Path, model: CausalLM) -> None:
    """The weights of a role alone, without its optimizer, into a model on any number of ranks.

    Raises:
        ValueError: as `load_role`.
    """
    leave = [OPTIMIZER, *_of_other_stages(model, ())]
    load_sharded(folder, _present(role_tensors(model)), leave=leave)


def role_tensors(model: CausalLM) -> dict[str, Tensor]:
    """The live tensors that a checkpoint of this model holds: all weights, or what is trained beside a frozen base."""
    if has_adapter(model):
        return {MODEL + name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = named_weights(model.module)
    return {MODEL + weight.name: tensors[weight.name] for weight in weights_metadata(model.module)}


def _present(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of this stage."""
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def _of_other_stages(model: CausalLM, moments: Iterable[str]) -> list[str]:
    """Names in a checkpoint of what other stages have; `moments` are names of this one's."""
    if model.pipeline is None:
        return []
    others = [name for name, tensor in role_tensors(model).items() if tensor.is_meta]
    kinds = sorted({name.partition("/")[0] for name in moments})
    return others + [f"{OPTIMIZER}{kind}/{_weight(name)}" for kind in kinds for name in others]


def _weight(name: str) -> str:
    """Name of the weight that a saved tensor belongs to."""
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    return name.removeprefix(OPTIMIZER).partition("/")[2]


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
