"""The media side of a model folder, and of a model that was loaded from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from strop.engines.multimodal.families import load_media_processor, reader_of, takes_media, vision_of
from strop.engines.multimodal.vl_model import Reader, Vision


def media_inputs(module: Any, folder: str = "") -> Vision | None:
    """The vision side of a loaded model; None for a model of text alone, and for the classifiers of transformers.

    Without a folder it takes text alone.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    if not takes_media(module.config):
        return None
    return vision_of(module, load_media_processor(folder) if folder else None)


def media_reader(config: object, folder: str) -> Reader | None:
    """The reader of media of a model folder, without a model; None for a model of text alone, or where reading takes
    the model.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    return reader_of(config, load_media_processor(folder)) if takes_media(config) else None


def language_model_class(config: object) -> Any:
    """The class of transformers that loads the language model of this configuration."""
    return AutoModelForImageTextToText if takes_media(config) else AutoModelForCausalLM


def copy_settings(sources: Sequence[Path], folder: Path) -> None:
    """Copy the settings of the first image processor that there is in these model folders."""
    for source in sources:
        if (processor := load_media_processor(source)) is not None:
            processor.save(folder)
            return
