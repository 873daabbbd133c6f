"""MODEL_OR_RUN and `--step` of commands that let a model answer."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.settings import is_setting
from strop.evaluation.models import HELP, ModelSource, find_model
from strop.rollout.registry import REMOTE
from strop.utils.terminal import UsageError, say

if TYPE_CHECKING:
    from strop.trainer.config import Config


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    """`--step N|best`: which checkpoint of a run."""
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


def with_model(config: Config, source: ModelSource | None, args: argparse.Namespace) -> Config:
    """The settings with the model that answers, whose tokenizer, template and config.json a run has already written.

    Args:
        config: settings of the command.
        source: what `named_model` found.
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
