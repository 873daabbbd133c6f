"""Models with a value head: one number per token, for critics and reward models."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForSequenceClassification

from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.model import device_of, prepare_model
from strop.engines.model_folder import model_json
from strop.engines.model_support import check_family
from strop.engines.multimodal.families import takes_media
from strop.engines.parallel.ranks import Parallel
from strop.engines.precision import half_to_read
from strop.engines.pretrained_config import load_model_config
from strop.engines.pretrained_module import read_module


def check_value_model(config: ModelConfig) -> None:
    """Refuse a folder that `load_value_model` cannot make a value or reward model of; no weight is read.

    Raises:
        ValueError: as `check_language_model`; or a model that reads images, several labels, or a family without a
            classification form.
    """
    shape = load_model_config(config)
    if takes_media(shape) or hasattr(shape, "vision_config"):
        raise ValueError(
            f"model folder {config.path!r} is a vision-language model ({shape.model_type}), and critics and reward "
            f"models read text alone: give a model of text with the same tokenizer"
        )
    check_family(shape, AutoModelForSequenceClassification, config.path)
    _check_labels(config)


def load_value_model(
    config: ModelConfig,
    *,
    device: str = "auto",
    parallel: Parallel | None = None,
    holds_half: bool = False,
) -> CausalLM:
    """Load a model with a value head, a linear map from D to 1: its output is a number per token.

    A sequence-classification folder with one label brings its head; a causal language model gets one of zeros,
    so that every value is 0 at first. Saved, it is an ordinary sequence-classification folder.

    Args:
        config, device, parallel, holds_half: as in `load_model`.

    Raises:
        ValueError: as `load_model`; or several labels, or an architecture without a classification form.
    """
    check_value_model(config)
    config = dataclasses.replace(config, freeze_vision_tower=False)  # a matter of the policy
    computes_on = device_of(config, device, parallel)
    has_head = is_classifier(config.path)
    # transformers warns of a missing head, and fills it with random numbers first.
    with only_errors(), torch.random.fork_rng(devices=[]):
        module = read_module(
            config,
            AutoModelForSequenceClassification,
            kind="classifier" if has_head else "model that can have a value head",
            may_miss=None if has_head else "score.",
            half=half_to_read(config, computes_on, holds_half),
            num_labels=1,
        )
    return prepare_model(module, config, computes_on, parallel, holds_half=holds_half)


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """No warnings of transformers."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def padding_token(config: ModelConfig) -> int | None:
    """Token id that the classifier of a folder takes for padding: its score stands at the last token that is another
    one. None where it names none, or the folder holds no classifier."""
    if not is_classifier(config.path):
        return None
    # A configuration with code of its own need not have the name.
    padding: int | None = getattr(load_model_config(config).get_text_config(), "pad_token_id", None)
    return padding


def without_padding(ids: Sequence[int], padding: int | None) -> Sequence[int]:
    """A text up to the token at which a classifier with this padding token scores it."""
    end = len(ids)
    while end > 1 and ids[end - 1] == padding:
        end -= 1
    return ids[:end]


def architecture(folder: str) -> str:
    """Class name in config.json; empty when it names none, or there is no such file."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return ""
    names = model_json(path, f"model folder {folder!r} cannot be used").get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def is_classifier(folder: str) -> bool:
    """The model of a folder is a sequence-classification model."""
    return architecture(folder).endswith("ForSequenceClassification")


def _check_labels(config: ModelConfig) -> None:
    """A classifier's head must give one number."""
    labels = load_model_config(config).num_labels if is_classifier(config.path) else 1
    if labels != 1:
        raise ValueError(
            f"model folder {config.path!r} is a classifier with {labels} labels; a value or reward model has one"
        )
