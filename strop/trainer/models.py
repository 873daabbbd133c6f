"""The models that a configuration names are folders of this machine, where no guest fetches those of other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from strop.base.elsewhere import elsewhere, folder_here
from strop.trainer.config import Config

MODEL_PATHS = ("model.path", "model.tokenizer_path", "reference.path")
"""Settings of the core that name a model."""


def local_models(config: Config, *, but: Collection[str] = ()) -> Config:
    """The configuration with the folders of its models, but for those of some keys.

    Raises:
        ValueError: one is no folder of this machine.
    """
    tree: Config = config
    for key in MODEL_PATHS:
        text = value_of(config, key)
        if not text or key in but:
            continue
        folder = folder_here(text)
        if not folder:
            elsewhere("models", f"{key} {text!r} is not a folder")
        tree = replaced(tree, key, folder)
    return with_template(tree)


def with_template(config: Config) -> Config:
    """The configuration with the text of model.chat_template: other machines may not have the file."""
    if not config.model.chat_template:
        return config
    from strop.engines.options.changes import template_text  # torch: seconds

    made: Config = replaced(config, "model.chat_template", template_text(config.model.chat_template))
    return made


def value_of(config: Any, key: str) -> str:
    """The text of a full key; empty in sections of guests that are not there."""
    for part in key.split("."):
        config = getattr(config, part, "")
    return str(config)


def replaced(config: Any, key: str, value: str) -> Any:
    """The same settings with another value of this full key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{head: replaced(getattr(config, head), rest, value) if rest else value}
    )
