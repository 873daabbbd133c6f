"""Models that take media beside tokens, by the package that knows them (strop.engines.multimodal.vl_model).

To the core media are tokens of a sequence, one after another, with a value that it does not look into
(`strop.protocol.trajectory.Media`). It says where such tokens stand, and turns the values into arguments of a model's
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.engines.attention import Span
from strop.protocol.trajectory import Media


class MediaInputs(Protocol):
    """The media side of a loaded model."""

    tower: Any
    """The part of the model that reads images; None where the language model itself does."""
    text_id: int
    """A token that stands for no media."""
    hidden: Callable[..., Any] | None
    """Called as the model's base is, with media among its arguments; None where the base takes them itself."""

    @property
    def token_ids(self) -> Mapping[str, int]:
        """Kind of media -> id of the token that stands for a part of it."""

    def check(self, token_ids: Sequence[int], media: Sequence[Media], where: str) -> None:
        """Raise a ValueError for tokens of media without media, or the other way round."""

    def positions(self, token_ids: Tensor, media: Sequence[Media]) -> Tensor:
        """Positions [n] of tokens [n], in host memory; [3, n] of a model that counts along three axes."""

    def blocks(self, token_ids: Tensor) -> tuple[Span, ...]:
        """Runs of these tokens that see each other whatever their order."""

    def arguments(self, media: Sequence[Media], *, device: torch.device) -> Mapping[str, Tensor]:
        """These media as arguments of the forward pass; a ValueError where a file cannot be read."""

    def touched(self, hidden: Tensor) -> Tensor:
        """`hidden`, with a gradient of 0 for every trained weight that images alone go through."""

    def attention(self, name: str, *, by_formula: bool) -> dict[str, str]:
        """The attention of each part of the model, where the language part has one of this name."""

    def probe(self, device: torch.device) -> Callable[[Any], float] | None:
        """How far a loaded model is from itself on prompts with images; None where it takes none."""

    def save_settings(self, folder: Path) -> None:
        """Copy the settings of how images are read into another model folder."""


def media_models(config: Any) -> Any:
    """The module that knows how a model reads media; None for a model of text alone."""
    from strop.engines.multimodal import inputs  # imports MediaInputs from here

    return inputs if inputs.takes_media(config) else None


def media_inputs(module: Any, folder: str = "") -> MediaInputs | None:
    """The media side of a loaded model; None for a model of text alone, or where the folder does not say how media are
    read."""
    family = media_models(module.config)
    return None if family is None else family.media_inputs(module, folder)


def media_reader(config: Any, folder: str) -> Any:
    """How the models of a folder read media; None for a model of text alone."""
    family = media_models(config)
    return None if family is None else family.media_reader(config, folder)


def language_model_class(config: Any) -> Any:
    """The class of transformers that loads the language model of this configuration."""
    family = media_models(config)
    return AutoModelForCausalLM if family is None else family.AUTO_CLASS
