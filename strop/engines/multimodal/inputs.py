"""Models with images and videos, as the engines ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText

from strop.engines.multimodal.families import (
    load_media_processor,
    media_token_ids,
    reader_of,
    takes_media,
    vision_of,
    written_template,
)
from strop.engines.multimodal.model_with_media import MediaInputs
from strop.engines.multimodal.vl_model import Reader

__all__ = [
    "AUTO_CLASS", "copy_settings", "media_inputs", "media_reader", "media_token_ids", "takes_media", "written_template",
]  # fmt: skip

AUTO_CLASS: Any = AutoModelForImageTextToText
"""The class of transformers that loads these models."""


def media_inputs(module: Any, folder: str) -> MediaInputs | None:
    """The vision side of a loaded model; None where it has none, as the classifiers of transformers.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    return vision_of(module, load_media_processor(folder) if folder else None)


def media_reader(config: Any, folder: str) -> Reader | None:
    """How the models of a folder read media without a model; None where that takes the model.

    Raises:
        ValueError: the folder has an image processor that cannot be used here.
    """
    return reader_of(config, load_media_processor(folder))


def copy_settings(sources: Sequence[Path], folder: Path) -> None:
    """Copy the settings of the first image processor that there is in these model folders."""
    for source in sources:
        if (processor := load_media_processor(source)) is not None:
            processor.save(folder)
            return
