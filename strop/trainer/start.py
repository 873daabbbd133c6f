"""Starting a run in a folder, and going on with one that is there."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import read_settings, to_dict, to_flat_dict
from strop.config.save import refuse_secrets
from strop.config.unknown_key import KeyAliases
from strop.config.yaml_text import dump
from strop.engines.config import ModelConfig
from strop.observability.trackers.group import check_trackers
from strop.rollout.config import check_trainable
from strop.run import Checkpoint, RunError, RunFolder
from strop.run.folder import CONFIG_FILE
from strop.run.inputs import check_inputs, inputs_of, merged_inputs, write_inputs
from strop.run.paths import with_absolute_paths
from strop.trainer.callbacks import Reporter
from strop.trainer.checks.devices import check_cores, check_devices
from strop.trainer.config import Config
from strop.trainer.environment import refuse_launcher
from strop.trainer.fetched_inputs import fetch_inputs, record_inputs, refetch_inputs
from strop.trainer.loading import with_extensions
from strop.trainer.model_commits import write_models
from strop.trainer.models import replaced
from strop.trainer.named_files import check_named_files
from strop.trainer.resume import roll_back
from strop.trainer.resume_overrides import settings_to_continue
from strop.trainer.untrusted_runs import settings as untrusted_settings
from strop.utils.atomic_io import replace_text
from strop.utils.chat_template import asks_for_time

if TYPE_CHECKING:
    from strop.trainer.init_from import InitFromRun

logger = logging.getLogger(__name__)

START, OPTIMIZER = "start", "optimizer"
"""Folder of a run with what it took over from another one, and the one in it with the optimizer's state."""
_FINISHED = "{run} is finished; nothing to resume (more steps or epochs make it longer)"


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run folder that is ready to be run; close `run` at the end."""

    run: RunFolder
    config: Config
    checkpoint: Checkpoint | None
    """Checkpoint to continue from; None: from the beginning."""
    is_finished: bool
    """True when there is nothing left to do."""


def start_run(
    folder: Path,
    config: Config,
    *,
    command: Sequence[str],
    say: Reporter = logger.info,
    beginning: InitFromRun | None = None,
    recorded: Mapping[str, Mapping[str, Any]] | None = None,
) -> Start:
    """A fresh run folder with its resolved configuration, once the models that it names are on this machine and the
    commits of its data sets of the hub are known.

    Args:
        folder: absent or empty.
        config: settings.
        command: the command line.
        say: takes lines for the person who watches.
        beginning: another run, with whose weights it begins: a strop.trainer.init_from.InitFromRun.
        recorded: models and data sets in the records of a run that this one repeats, which are taken as they were.

    Raises:
        ValueError, FileNotFoundError: as `check_devices` and `check_cores`; a model cannot be fetched, the hub has not
            a data set, or a file that the settings name is not there or cannot be loaded.
        ConfigError: a file of algorithm.extensions cannot be imported, or what it registers does not fit the settings.
        RunError: the folder cannot be written, or is taken.
    """
    config = _prepared(config)
    overridden: Collection[str] = ()
    if beginning is not None:
        config = beginning.configured(config, folder.absolute())
        overridden = beginning.overridden_keys(config)
    check_trackers(config.trainer.trackers)
    check_devices(config, "".join(command[1:2]))
    check_cores(config.resources)
    check_named_files(config, "".join(command[1:2]))
    inputs = fetch_inputs(config, command[1:2], say=say, exclude=overridden, recorded=recorded)
    located, models = inputs.config, inputs.models
    tokenizer = located.model.tokenizer_folder if beginning is None else beginning.model_folder
    if date := template_date(config.model, Path(tokenizer)):
        config = replaced(config, "model.template_date", date)
        located = replaced(located, "model.template_date", date)
    read = inputs_of(to_flat_dict(config))
    run = RunFolder.create(folder, config=to_dict(config), command=command, settings=config.run)
    try:
        text = dump(to_dict(config))
        replace_text(run.path / CONFIG_FILE, text)
        write_inputs(run.path, read)
        write_models(run.path, models)
        for line in () if beginning is None else beginning.copy_files(run, config):
            say(line)
        untrusted_settings.note(text)
    except OSError as error:
        run.close()
        raise RunError(
            f"cannot write {run.path / CONFIG_FILE}: {error.strerror}; choose another --out"
        ) from error
    for line in record_inputs(run, models):
        say(line)
    return Start(run=run, config=located, checkpoint=None, is_finished=False)


def _prepared(config: Config) -> Config:
    """Settings of a run that may begin, with what their extensions set and with absolute paths."""
    refuse_launcher()
    config = with_extensions(config)
    refuse_secrets(to_dict(config))
    check_trainable(config.rollout)
    return with_absolute_paths(config)


def template_date(model: ModelConfig, tokenizer: Path) -> str:
    """Today's date, or the one that is given, for chat templates that ask for it: a run that goes on tomorrow renders
    what it rendered today. Empty for others.

    Args:
        model: its settings.
        tokenizer: folder of its tokenizer.
    """
    if model.template_date:
        return model.template_date
    texts = [model.chat_template]
    files = [Path(model.chat_template)] if model.chat_template and "{" not in model.chat_template else []
    for file in (*files, tokenizer / "tokenizer_config.json", *sorted(tokenizer.rglob("*.jinja"))):
        with contextlib.suppress(
            OSError
        ):  # a text that is no path; what cannot be read is said when it is loaded
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return datetime.date.today().isoformat() if asks_for_time(texts) else ""


def optimizer_of(run: RunFolder, checkpoint: Checkpoint | None) -> Path | None:
    """The folder with the optimizer's state that a run begins with; None where there is none, or it is under way."""
    folder = (run.path / START / OPTIMIZER).absolute()
    return folder if checkpoint is None and folder.is_dir() else None


def resume_run(
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    say: Reporter,
    admit: Callable[[str], object] | None = None,
    accept_changes: bool = False,
    in_shell: bool = True,
    aliases: KeyAliases | None = None,
) -> Start:
    """The run in `folder`, rolled back to its last valid checkpoint, with its own configuration.

    Args:
        folder: of the run.
        overrides: settings that may be given anew (`strop.trainer.resume_overrides`).
        say: takes lines for the person who watches.
        admit: raises for a content of config.yaml that may not be used. The file is read once, since others may write
            in the folder.
        accept_changes: go on although what it reads from elsewhere is not what it began with.
        in_shell, aliases: as for `strop.config.load_layers`.

    Raises:
        ConfigError: an override would make it another run.
        RunError: there is no run, another process writes it, no checkpoint is valid, or what it reads has changed.
    """
    refuse_launcher()
    path = folder / CONFIG_FILE
    RunFolder.open(folder, read_only=True).close()
    untrusted_settings.check_there(path)
    text = read_settings(path)
    if admit is not None:
        admit(text)
    continuation = settings_to_continue(path, overrides, text=text, in_shell=in_shell, aliases=aliases)
    config = continuation.config
    run = RunFolder.open(folder, settings=config.run)
    try:
        is_finished = bool(run.events.read("finished")) and not continuation.extends_run
        checkpoint, lines = None, [_FINISHED.format(run=run.path)]
        if not is_finished:
            untrusted_settings.check_inputs(run.path, config, text)
            check_named_files(config, run.made_by)
            read = to_flat_dict(config)
            changed = check_inputs(run.path, read, accept=accept_changes)
            config = refetch_inputs(config, run, say=say)
            checkpoint, lines = roll_back(run, continuation)
            step = 0 if checkpoint is None else checkpoint.step
            lines += [*continuation.lines(step), *changed]
            if changed:
                run.events.append("inputs_changed", step, fsync=True, changes=changed)
            write_inputs(run.path, merged_inputs(run.path, read))
            continuation.save(run)
    except BaseException:
        run.close()
        raise
    for line in lines:
        say(line)
    return Start(run=run, config=config, checkpoint=checkpoint, is_finished=is_finished)
