"""Settings that name models, read and replaced by their full keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from strop.trainer.config import Config

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


def with_template(config: Config) -> Config:
    """The configuration with the text of model.chat_template: other machines may not have the file."""
    if not config.model.chat_template:
        return config
    from strop.engines.model_overrides import template_text  # torch: seconds

    return replaced(config, "model.chat_template", template_text(config.model.chat_template))


def value_of(config: object, key: str) -> str:
    """The text of a full key; empty in sections that it has not."""
    for part in key.split("."):
        config = getattr(config, part, "")
    return str(config)


def replaced(config: D, key: str, value: str) -> D:
    """The same settings with another value of this full key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{head: replaced(getattr(config, head), rest, value) if rest else value}
    )
