"""The models that a configuration names, in folders of this machine: those of other names are fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.models import replaced, value_of, with_template
from strop.utils.hub.addresses import parse_address
from strop.utils.hub.models import Fetch, fetch_model
from strop.utils.remote_path import folder_here

POLICY = ("model.path", "model.tokenizer_path")
"""Keys of models that a command without training reads."""
MODEL_PATHS = (
    "model.path", "model.lora.path", "reference.path", "teacher.path", "critic.path", "critic.lora.path",
    "prm.path", "reward_model.path", "model.tokenizer_path",
)  # fmt: skip
"""Settings that name a model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Located:
    """A configuration whose models are folders."""

    config: Config
    """To be run with; the one that the user wrote is what is saved."""
    models: Mapping[str, Mapping[str, Any]]
    """Record of each fetched model, by its key: source, kind, revision, folder."""


def locate(
    config: Config,
    *,
    say: Reporter,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    weights: bool = True,
    keys: Collection[str] = MODEL_PATHS,
) -> Located:
    """Fetch the models that lie elsewhere, before anything is loaded.

    Args:
        config: as the user wrote it.
        say: hears how far it is.
        known: records of an earlier part of the run, whose revisions are taken.
        weights: fetch weights; without, settings and tokenizers alone.
        keys: of the models that are looked at.

    Raises:
        ValueError: a model cannot be had; the sentence says which, why, and what to do.
        UntrustedCode: received settings name it.
    """
    records: dict[str, Mapping[str, Any]] = {}
    tree: Config = config
    for key, text in named_models(config):
        if key not in keys:
            continue
        folder = folder_here(text)
        if not folder:
            state = str((known or {}).get(key, {}).get("revision", ""))
            needs_weights = weights and key != "model.tokenizer_path"
            records[key] = _fetched(config, key, text, say=say, state=state, weights=needs_weights)
            folder = records[key]["folder"]
        elif key == "model.path" and config.model.revision:
            raise ValueError(
                f"a revision ({config.model.revision}) is given beside {key}={text}, which is a folder and has none: "
                f"leave it out"
            )
        tree = replaced(tree, key, folder)
    return Located(config=with_template(tree), models=records)


def _fetched(
    config: Config, key: str, text: str, *, say: Reporter, state: str, weights: bool
) -> Mapping[str, Any]:
    """Record of a model that was fetched: source, kind, revision, folder."""
    model = config.model
    options = Fetch(say=say, code=model.trust_remote_code, weights=weights, offline=model.local_files_only)
    revision = model.revision if key == "model.path" else ""
    fetched = fetch_model(text, options, key=key, revision=revision, state=state)
    return {
        "source": str(fetched.address), "kind": fetched.address.kind, "revision": fetched.revision,
        "folder": fetched.folder,
    }  # fmt: skip


def named_models(config: Config) -> Iterator[tuple[str, str]]:
    """(full key, name) of every setting that names a model."""
    for key in MODEL_PATHS:
        if text := value_of(config, key):
            yield key, text


def models_elsewhere(config: Config) -> Iterator[tuple[str, str]]:
    """Models of `named_models` that would be fetched."""
    for key, text in named_models(config):
        try:
            if is_model_elsewhere(text, key):
                yield key, text
        except ValueError:  # said when the model is looked for
            continue


def is_model_elsewhere(text: str, key: str) -> bool:
    """True when the name of a model means one that is fetched.

    Raises:
        ValueError: it means nothing; the sentence says what it may mean.
    """
    if folder_here(text):
        return False
    parse_address(text, key)
    return True
