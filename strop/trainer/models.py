"""The models that a configuration names, in folders of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from strop.base.elsewhere import elsewhere, folder_here, is_model_elsewhere
from strop.base.guests import joined, needed, targets
from strop.trainer.config import Config

Say = Callable[[str], None]

POLICY = ("model.path", "model.tokenizer_path")
"""Those that a command without training reads."""
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
    """Of each key whose model was fetched: source, kind, revision, folder."""


def locate(
    config: Config,
    *,
    say: Say,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    weights: bool = True,
    keys: Collection[str] = MODEL_PATHS,
) -> Located:
    """Fetch the models that lie elsewhere, before anything is loaded.

    Args:
        config: as the user wrote it.
        say: hears how far it is.
        known: what an earlier part of the run resolved, whose revisions are taken.
        weights: fetch weights; without, settings and tokenizers alone.
        keys: of the models that are looked at.

    Raises:
        ValueError: a model cannot be had; the sentence says which, why, and what to do.
        UntrustedCode: received settings name it.
    """
    found: dict[str, Mapping[str, Any]] = {}
    tree: Config = config
    for key, text in named_models(config):
        if key not in keys:
            continue
        folder = folder_here(text)
        if not folder:
            state = str((known or {}).get(key, {}).get("revision", ""))
            needs_weights = weights and key != "model.tokenizer_path"
            found[key] = _fetched(config, key, text, say=say, state=state, weights=needs_weights)
            folder = found[key]["folder"]
        elif key == "model.path" and config.model.revision:
            raise ValueError(
                f"a revision ({config.model.revision}) is given beside {key}={text}, which is a folder and has none: "
                f"leave it out"
            )
        tree = _replaced(tree, key, folder)
    if config.model.chat_template:  # other machines may not have the file
        changes = needed("changes of a model", "model.chat_template is set")
        text = changes.template_text(config.model.chat_template)
        tree = _replaced(tree, "model.chat_template", text)
    return Located(config=tree, models=found)


def _fetched(
    config: Config, key: str, text: str, *, say: Say, state: str, weights: bool
) -> Mapping[str, Any]:
    """What is recorded of a model that was fetched: source, kind, revision, folder."""
    models, model = elsewhere("models", f"{key} {text!r} is not a folder"), config.model
    how = models.Fetch(say=say, code=model.trust_remote_code, weights=weights, offline=model.local_files_only)
    revision = model.revision if key == "model.path" else ""
    fetched = models.fetch_model(text, how, key=key, revision=revision, state=state)
    return {
        "source": str(fetched.place), "kind": fetched.place.kind, "revision": fetched.revision,
        "folder": fetched.folder,
    }  # fmt: skip


def named_models(config: Config) -> Iterator[tuple[str, str]]:
    """(full key, name) of every setting that names a model."""
    for key in MODEL_PATHS:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part, "")  # sections of guests that are not there name none
        if value:
            yield key, value


def models_elsewhere(config: Config) -> Iterator[tuple[str, str]]:
    """Those of `named_models` that would be fetched."""
    for key, text in named_models(config):
        try:
            if is_model_elsewhere(text, key):
                yield key, text
        except ValueError:  # said when the model is looked for
            continue


def records_of_fetched() -> Any:
    """The module that records what a run has fetched, models and data sets (place "elsewhere", commits); None where
    nothing here fetches: who reads such a model or set is told that it cannot be had."""
    return joined("elsewhere", "commits") if "commits" in targets("elsewhere") else None


def _replaced(config: Any, key: str, value: str) -> Any:
    """The same settings with another value of this full key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{head: _replaced(getattr(config, head), rest, value) if rest else value}
    )
