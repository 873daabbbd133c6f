"""Facts about a model from its configuration.

A server, and plain transformers, believe config.json: a model that is saved with a configuration of another one is
another one there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from strop.engines.multimodal.inputs import language_model_class
from strop.utils.safe_read import parse_json, read_text

logger = logging.getLogger(__name__)


def settle_config(module: Any, source: str) -> None:
    """Let the configuration of a loaded language model say whether its head is its embedding, and how many rows it has.

    transformers does not tie what a file has in two versions, whatever the configuration says, and leaves the latter.

    Args:
        module: a causal language model of transformers, just loaded.
        source: its folder, for what is said.
    """
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embedding is None:  # a value model
        return
    is_tied = head.weight is embedding.weight
    if says_tied(module.config) and not is_tied:
        logger.warning(
            "%s says that head and embedding are one (tie_word_embeddings), and its files hold two that differ: the "
            "model is trained and saved with two, and with tie_word_embeddings=false",
            source,
        )
    for config in (module.config, module.config.get_text_config()):
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = is_tied
        if hasattr(config, "vocab_size"):
            config.vocab_size = embedding.weight.shape[0]


def says_tied(config: Any) -> bool:
    """True if a configuration, or the one of its language model, says that head and embedding are one."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))


def max_positions(config: Any) -> int | None:
    """Longest sequence that a model's positions are made for; None when its configuration names none.

    Rotary embeddings of types longrope and dynamic change all frequencies beyond their original length, for every
    sequence of a pack, so that a token's log-prob would depend on its neighbours: they end there. Kinds of layers may
    have embeddings of their own.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if limit is not None and settings.get("rope_type") in ("longrope", "dynamic"):
            limit = min(limit, int(settings.get("original_max_position_embeddings") or limit))
    return limit


def logit_form(module: Any) -> tuple[float, float | None]:
    """Scale and cap of a model's logits (`Head`), by the names that its configuration has for them.

    Whether that is all that happens to them is asked when the model is loaded.
    """
    text = module.config.get_text_config()
    if module.get_output_embeddings() is None:  # a value head
        return 1.0, None
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
        getattr(text, "logits_scaling", None) or 1.0
    )
    return scale, getattr(text, "final_logit_softcapping", None)


_DESCRIBED: dict[str, int] = {}
"""Numbers that a config.json describes, by its text: all checkpoints of a run have the same, and a model of many layers
takes a second to make."""


def check_saved(folder: Path) -> None:
    """Compare config.json of a saved language model with the files beside it: as many numbers as it describes.

    That sees another number of layers, of rows and of experts, and a head that is tied in one of the two alone. A model
    whose class is in its folder is left out: its code would run.

    Raises:
        ValueError: they are of two models.
    """
    text = read_text(folder / "config.json")
    if parse_json(text).get("auto_map"):
        return
    if text not in _DESCRIBED:
        try:
            _DESCRIBED[text] = _described_numbers(folder)
        except (NotImplementedError, RuntimeError) as error:  # its constructor needs numbers
            logger.warning("what was saved in %s is not compared with its config.json: %s", folder, error)
            return
    described = _DESCRIBED[text]
    num_saved = sum(_numbers(file) for file in sorted(folder.glob("*.safetensors")))
    if described != num_saved:
        raise ValueError(
            f"{folder / 'config.json'} describes a model of {described:,} numbers, and the files beside it hold "
            f"{num_saved:,}: another program would run another model. The class of this model saves something else "
            f"than it is made of"
        )


def _described_numbers(folder: Path) -> int:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    auto_class = language_model_class(config)
    with torch.device("meta"):
        module = auto_class.from_config(config)
    module.tie_weights()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = [buffer for name, buffer in module.state_dict().items() if name not in parameters]
    return sum(tensor.numel() for tensor in [*module.parameters(), *buffers])


def _numbers(file: Path) -> int:
    with safe_open(file, framework="pt") as opened:
        return sum(torch.Size(opened.get_slice(name).get_shape()).numel() for name in opened.keys())  # noqa: SIM118
