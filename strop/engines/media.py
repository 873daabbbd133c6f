"""Models that take media beside tokens, by the guest that knows them (strop.vision.sight).

To the core media are tokens of a sequence, one after another, with a value that it does not look into
(`strop.trajectory.Media`). The guest says where such tokens stand, and turns the values into arguments of a model's
forward pass.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from strop.base.guests import all_joined


def media_models(config: Any) -> Any:
    """The family of a model by its configuration (place "model with media"); None for a model of text alone."""
    families = tuple(all_joined("model with media").values())
    return next((family for family in families if family.takes_media(config)), None)


def media_inputs(module: Any, folder: str = "") -> Any:
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
