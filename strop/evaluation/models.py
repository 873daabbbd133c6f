"""MODEL_OR_RUN: the model folder and settings of a word of the command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.settings import is_setting
from strop.rollout.registry import REMOTE
from strop.run import CheckpointError, RunError, RunFolder, is_run
from strop.run.manifest import MANIFEST, check_files, read_manifest
from strop.trainer.init_from.naming import choose_checkpoint, run_in
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, say

if TYPE_CHECKING:
    from strop.trainer.config import Config

HELP = (
    "a run folder (its last valid checkpoint), a checkpoint folder, any Hugging Face model folder, or where a model is "
    "fetched from: ORG/NAME[@REVISION] of the Hugging Face hub, modelscope:ORG/NAME, a URL"
)
_CONFIG_FILE = "config.yaml"


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--step N|best`, the checkpoint of a run."""
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="of a run: the checkpoint of step N, or the one with the best validation (default: the last valid one)",
    )


def _step(text: str) -> int | str:
    if text == "best" or text.isdecimal():
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no step; give a number, or best")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on disk."""

    folder: Path
    """The Hugging Face folder."""
    config: Path | None
    """Settings of the run it comes from; None for a model that no run made."""
    lines: tuple[str, ...] = ()
    """Remarks for the user."""


def named_model(args: argparse.Namespace) -> ModelSource | None:
    """The model of `args.model`; None where the command line names none, which `with_model` allows or refuses.

    Raises:
        ValueError, UsageError, RunError: as `find_model`.
    """
    if args.model is None or is_setting(args.model):
        args.overrides = [*([] if args.model is None else [args.model]), *args.overrides]
        if args.step is not None:
            raise UsageError(f"--step {args.step} chooses a checkpoint of a run: name the run")
        return None
    source = find_model(args.model, step=args.step)
    for line in source.lines:
        say(line)
    return source


def model_name(config: Config) -> str:
    """Name of the model that answers: a folder, or a model on a server."""
    return config.rollout.remote.model if config.rollout.remote else config.model.path


def find_model(text: str, *, step: int | str | None = None, weights: bool = True) -> ModelSource:
    """The model that a word of the command line stands for.

    Args:
        text: the word.
        step: of a checkpoint of a run, or best; None takes the last valid one.
        weights: fetch weights too, where it is fetched.

    Raises:
        ValueError: it is no model, it cannot be fetched, or `step` is given for something else than a run.
        UsageError: it is a folder of several runs.
        RunError: the run has no such checkpoint, or the checkpoint is damaged.
    """
    path = Path(text).expanduser()
    if not path.is_dir() and _is_elsewhere(text):
        return _of_hub(text, step, weights=weights)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        if path.exists() and path.suffix in (".yaml", ".yml"):
            raise ValueError(
                f"{text} is a file of settings: say --config {shell_word(text)}; its model.path is then the model"
            )
        if "=" in text:
            problem = "is no folder (the model comes first, then key=value)"
        raise ValueError(f"{text} {problem}; give {HELP}")
    if not any((path / name).is_file() for name in (MANIFEST, "config.json")):
        path = run_in(path)
    if is_run(path):
        return _of_run(path, step)
    if step is not None:
        raise ValueError(f"--step {step} chooses a checkpoint of a run, and {text} is none: leave it out")
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path)
    if not (path / "config.json").is_file():
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(f"{text} holds no model (found: {entries}); give {HELP}")
    checkpoint = path.resolve().parent
    config = _run_config(checkpoint) if (checkpoint / MANIFEST).is_file() else None
    return ModelSource(folder=path, config=config)


def with_model(config: Config, source: ModelSource | None, args: argparse.Namespace) -> Config:
    """The settings with the model that answers, whose tokenizer, template and config.json a run has already written.

    Args:
        config: settings of the command.
        source: from `named_model`.
        args: with `config` and `overrides`, whose word counts.

    Raises:
        UsageError: there must be a model, and is none.
    """
    from strop.engines.config import ModelConfig
    from strop.trainer.model_locations import POLICY, locate

    if source is None and args.config and config.model.path and not config.rollout.remote:
        return locate(config, say=say, keys=POLICY).config  # the file names the model
    if source is None:
        _check_goes_without(config, args.command_line[1])
        return config
    model = dataclasses.replace(config.model, path=str(source.folder), revision="")
    if source.config is not None and not args.config:
        plain = ModelConfig()
        words = [word.lstrip("+~") for word in args.overrides]
        model = dataclasses.replace(
            model,
            **{
                name: getattr(plain, name)
                for name in ("tokenizer_path", "chat_template", "override_config")
                if not any(word.startswith(f"model.{name}") for word in words)
            },
        )
    return locate(dataclasses.replace(config, model=model), say=say, keys=POLICY).config


def data_as_recorded(args: argparse.Namespace, config: Config, source: Path | None) -> Config:
    """The settings with the data sets of hubs at the commits that a run has read, where they come from that run.

    Args:
        args: with `config`, which replaces the settings of the run.
        config: settings of the command.
        source: config.yaml of the run; None without a run.

    Raises:
        RunError: the records of the run cannot be read.
    """
    if source is None or args.config:
        return config
    from strop.trainer import model_commits

    return model_commits.as_recorded(config, source.parent)


def _check_goes_without(config: Config, command: str) -> None:
    """Refuse to answer without a model folder where one is needed."""
    engine, remote = config.rollout.engine, config.rollout.remote
    if remote is None:
        servers = " or ".join(f"rollout.engine={name}" for name in REMOTE)
        raise UsageError(
            f"name MODEL_OR_RUN, as in `strop {command} runs/arithmetic` (the model comes first, then key=value): "
            f"{HELP}; only --config with model.path, or {servers}, goes without"
        )
    if remote.takes_token_ids:
        raise UsageError(
            f"rollout.{engine}.api=completions sends token ids, so name MODEL_OR_RUN, whose tokenizer makes them; "
            f"rollout.{engine}.api=chat goes without"
        )


def _is_elsewhere(text: str) -> bool:
    """A word that is no folder names a model of a hub or a URL; key=value does not."""
    if "=" in text and "://" not in text:
        return False
    from strop.trainer.model_locations import is_model_elsewhere

    try:
        return is_model_elsewhere(text, "MODEL")
    except ValueError:
        if text.startswith(("hub:", "hf:", "modelscope:", "http")):
            raise
        return False


def _of_hub(text: str, step: int | str | None, *, weights: bool) -> ModelSource:
    if step is not None:
        raise ValueError(f"--step {step} chooses a checkpoint of a run, and {text} is none: leave it out")
    from strop.data.hub import models  # libraries of hubs: slow to import

    fetched = models.fetch_model(text, models.Fetch(say=say, weights=weights), key="MODEL")
    return ModelSource(
        folder=Path(fetched.folder),
        config=None,
        lines=(f"model: {fetched.place}, revision {fetched.revision}",),
    )


def _of_run(path: Path, step: int | str | None) -> ModelSource:
    with RunFolder.open(path, read_only=True) as run:
        checkpoint, lines = choose_checkpoint(run, step)
    if checkpoint is None:
        reasons = f": {'; '.join(lines)}" if lines else " yet"
        raise RunError(f"{path} has no valid checkpoint{reasons}; name a model folder, or continue the run")
    remarks = (*lines, f"model: checkpoint {checkpoint.step} of {path}")
    config = _run_config(checkpoint.path)
    if config is None:
        remarks = (
            *remarks,
            f"{path} has lost its {_CONFIG_FILE}, so all settings are the defaults (--config names others)",
        )
    return ModelSource(folder=_model_of(checkpoint.path), config=config, lines=remarks)


def _of_checkpoint(path: Path) -> ModelSource:
    try:
        check_files(path, read_manifest(path), hashes=True)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} {error}; give another one, or the run folder") from error
    return ModelSource(folder=_model_of(path), config=_run_config(path))


def _model_of(checkpoint: Path) -> Path:
    """The Hugging Face folder of a checkpoint.

    Raises:
        ValueError: it has none.
    """
    folder = checkpoint / "model"
    if not folder.is_dir():
        run = checkpoint.resolve().parent.parent
        raise ValueError(
            f"{checkpoint} has no model folder (run.hf_model): write one with "
            f"`strop export {shell_word(run)} --out OUT`, and give OUT"
        )
    return folder


def _run_config(checkpoint: Path) -> Path | None:
    """Settings of the run that a checkpoint lies in; None when it was taken out of its run."""
    run = checkpoint.resolve().parent.parent
    config = run / _CONFIG_FILE
    return config if is_run(run) and os.path.lexists(config) else None
