"""The models that a configuration names, in folders of this machine, and what a run remembers of those it fetched.

`models.json` in the run folder says for each key where its model came from: the revision that was resolved, and size
and SHA-256 of every file. A run that goes on uses exactly these. Data sets of the hub stand there too, with their
commit, under keys such as `data hub:openai/gsm8k`, one for each set and revision.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.base.durable import replace_text
from strop.base.elsewhere import elsewhere, folder_here, is_model_elsewhere
from strop.base.foreign_files import read_json
from strop.base.guests import joined, needed, targets
from strop.run import RunError
from strop.trainer.config import Config

MODELS_FILE = "models.json"

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
            value = getattr(value, part)
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


def with_data(
    located: Located,
    command: Sequence[str],
    *,
    say: Say,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Located:
    """The same with every data set of a hub at a commit.

    Args:
        located: of a run that starts or goes on.
        command: the word of the command that made the run, which tells what data it reads.
        say: hears of a hub that does not answer.
        known: what an earlier part of the run resolved.

    Raises:
        ValueError: the commit of one cannot be known; the sentence says why.
        UntrustedCode: received settings name it.
    """
    if "commits" not in targets("elsewhere"):
        return located  # who reads such a set is told that it cannot be had
    found: Located = joined("elsewhere", "commits").with_data(located, command, say=say, known=known)
    return found


def data_as_recorded(config: Config, run: Path) -> Config:
    """The settings of a command on a run, with each data set that the run has read at the commit it was read at.

    Args:
        config: of the command.
        run: folder of the run; what it did not read stays as it is.

    Raises:
        RunError: its records cannot be read.
    """
    if "commits" not in targets("elsewhere"):
        return config
    found: Config = joined("elsewhere", "commits").as_recorded(config, run)
    return found


def write_models(run: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Record what was fetched, with the hash of every file; nothing where none was; data sets have no folder.

    Raises:
        OSError: the file cannot be written.
    """
    if models:
        records = {
            key: {**model, "files": _hashes(key, model["folder"])} if "folder" in model else model
            for key, model in models.items()
        }
        replace_text(run / MODELS_FILE, json.dumps(records, indent=2) + "\n")


def read_models(run: Path) -> dict[str, dict[str, Any]]:
    """What `write_models` recorded; empty where all models are folders.

    Raises:
        RunError: the file cannot be used.
    """
    path = run / MODELS_FILE
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
        return {str(key): dict(model) for key, model in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} cannot be read, so it is not known which revision of its model the run uses ({error}): restore it"
        ) from error


def check_models_same(known: Mapping[str, Mapping[str, Any]], located: Located) -> None:
    """Compare every file of the fetched models with what the run recorded.

    Raises:
        RunError: one differs; the sentence names it.
    """
    for key, model in located.models.items():
        recorded = known.get(key, {}).get("files", {})
        files = _hashes(key, model["folder"])
        changed = sorted(name for name in {*recorded, *files} if recorded.get(name) != files.get(name))
        if changed:
            raise RunError(
                f"{key}: {changed[0]} of {model['source']} in {model['folder']} is not the file that this run began "
                f"with: remove that folder, so that it is fetched again, or put the file back"
            )


def _hashes(key: str, folder: str) -> Mapping[str, Mapping[str, int | str]]:
    """Size and SHA-256 of every file of a fetched model, by its name."""
    found: Mapping[str, Mapping[str, int | str]] = elsewhere("models", f"{key} was fetched").hashes(
        Path(folder)
    )
    return found


def _replaced(config: Any, key: str, value: str) -> Any:
    """The same settings with another value of this full key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(
        config, **{head: _replaced(getattr(config, head), rest, value) if rest else value}
    )
