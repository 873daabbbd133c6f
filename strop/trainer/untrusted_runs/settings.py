"""The settings of a run folder that somebody else may have made."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from strop.config import to_flat_dict
from strop.config.unknown_key import KeyAliases
from strop.run import RunError, RunFolder
from strop.trainer import loading
from strop.trainer.config import Config
from strop.trainer.model_locations import models_elsewhere
from strop.trainer.untrusted_runs.named import code_references, is_elsewhere
from strop.trainer.untrusted_runs.own import made_in, record
from strop.utils import trust
from strop.utils.shell_words import shell_word
from strop.utils.terminal import say
from strop.utils.trust import CodeReference

logger = logging.getLogger(__name__)

_GIVEN = "command line"


def load(
    path: Path,
    text: str,
    overrides: Sequence[str],
    needs: Collection[str],
    *,
    aliases: KeyAliases | None = None,
) -> Config:
    """The configuration in a text, with the door closed when it may be somebody else's.

    Args:
        path: of the file that it was read from.
        text: its content.
        overrides: of the command line.
        needs: beginnings of the keys whose code, commands and addresses the command has a use for.
        aliases: as for `strop.config.load_layers`.

    Raises:
        ConfigError: with every problem found.
        UntrustedCode: the settings are received, and name something that the command needs.
    """
    folders = made_in(text)
    keys = [word.lstrip("+~").split("=", 1)[0] for word in overrides]
    if str(Path.cwd()) in folders:
        return loading.load(path, text=text, overrides=overrides, aliases=aliases)
    trust.close(str(path), own=keys)
    config, origin_of = loading.load_and_tell(path, text=text, overrides=overrides, aliases=aliases)
    references = [reference for reference in code_references(config) if origin_of(reference.key) != _GIVEN]
    if folders:  # of a run of the user's own, started elsewhere: a relative path may be another file here
        references = [
            reference for reference in references if is_elsewhere(reference) and Path(reference.path).exists()
        ]
        if not references:
            trust.reopen()
            return loading.load(path, text=text, overrides=overrides, aliases=aliases)
    needed = [reference for reference in references if reference.key.startswith(tuple(needs))]
    if needed and folders:
        raise trust.UntrustedCode(
            f"{path} is of a run that you started in {' and '.join(sorted(folders))}, and names relative paths, which "
            f"are other files here: {'; '.join(_listed(needed))}. Start this command there; --trust-code takes the "
            f"files of this directory"
        )
    if needed:
        raise trust.UntrustedCode(trust.refusal(str(path), _listed(needed)))
    if references:
        reason = "names relative paths, and was started elsewhere" if folders else "was received"
        say(f"{path} {reason}, so this is not run: {'; '.join(_listed(references))}")
    if origin_of("model.trust_remote_code") == _GIVEN:
        return config
    model = dataclasses.replace(config.model, trust_remote_code=False)
    return dataclasses.replace(config, model=model)


def _listed(references: Sequence[CodeReference]) -> list[str]:
    return [f"{reference.key}: {reference.value}" for reference in references]


def note(text: str) -> None:
    """Remember what was written into a config.yaml for this user."""
    if not record(text):
        logger.warning(
            "there is no private folder where strop could note that this run is yours (XDG_STATE_HOME), so "
            "commands that run its code will ask for --trust-code"
        )


def note_again(text: str, *, before: str) -> None:
    """Remember other settings of a run, where those that it had before are the user's own."""
    if made_in(before):
        record(text)


def check_inputs(folder: Path, config: Config, text: str) -> None:
    """Check that the run's inputs are here before anything is rolled back: relative paths may be meant from elsewhere.

    Args:
        folder, config: of the run.
        text: its config.yaml.

    Raises:
        RunError: something is not.
    """
    homes = [Path(home) for home in sorted(made_in(text))]
    elsewhere = dict(models_elsewhere(config))
    paths = [("model.path", config.model.path), ("reward.path", config.reward.path)]
    paths = [(key, path) for key, path in paths if key not in elsewhere]
    for key, files in to_flat_dict(config).items():
        if key.endswith((".train_files", ".val_files")):
            paths += [(key, file) for file in files]
    for key, path in paths:
        if not path or Path(path).expanduser().exists():
            continue
        home = next((candidate for candidate in homes if (candidate / path).exists()), None)
        if home is not None:
            raise RunError(
                f"{folder} reads {key}={path}, which is in {home}, where it was started, and not here: continue it "
                f"from there, with --resume {shell_word(folder.resolve())}"
            )
        if key == "model.path":
            raise RunError(f"{folder} reads {key}={path}, which does not exist; put it back, then continue")


def check_there(file: Path) -> None:
    """Say of a run folder without settings why: it never began, or it lost them.

    Args:
        file: its config.yaml.

    Raises:
        RunError: there is none.
    """
    folder = file.parent
    if file.is_file():
        return
    with RunFolder.open(folder, read_only=True) as run:
        began = run.checkpoints.steps() or any(event["kind"] != "created" for event in run.events.read())
    if not began:
        raise RunError(f"{folder} has no {file.name}, so it never began; remove the folder and start again")
    raise RunError(
        f"{folder} has lost its {file.name}: the run did begin, so restore that file from a backup (the settings "
        f"also stand in run.json, under config)"
    )
