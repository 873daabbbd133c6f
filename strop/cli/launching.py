"""Launching of runs, shared by commands: a run folder is begun or continued, and closed in every case."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.run_kinds import check_kind
from strop.cli.settings import (
    add_accept_argument,
    add_config_arguments,
    add_trust_argument,
    admission,
    aliases_of,
    user_path,
)
from strop.run import MODEL_FOLDER
from strop.run.folder import CONFIG_FILE, LOGS
from strop.utils.remote_path import is_url
from strop.utils.shell_words import shell_word
from strop.utils.terminal import Interrupted, UsageError, say

if TYPE_CHECKING:
    from strop.cli.unused_keys import Reads
    from strop.trainer.config import Config
    from strop.trainer.start import Start


def add_run_arguments(parser: argparse.ArgumentParser, *, kind: str) -> None:
    """Arguments of a command that makes a run."""
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=user_path,
        help=f"run folder, absent or empty (default runs/{kind}-<time>)",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        type=_here_or_elsewhere,
        help="continue the run in DIR with its own settings, of which some may be changed; DIR may be the URL of a "
        "copy (run.copy_to), which is downloaded into --out first",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN[@STEP|@best]",
        help="start a new run from the weights of RUN's last checkpoint (or of STEP, or of the best validation), with "
        "the settings of RUN unless --config names others; RUN may be the URL of a copy",
    )
    parser.add_argument(
        "--with-optimizer", action="store_true", help="with --from: take over the optimizer's state too"
    )
    add_accept_argument(parser)
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def begin(args: argparse.Namespace, *, kind: str, reads: Reads | None = None) -> Start:
    """A run that is ready to go on; its folder is locked.

    Args:
        args: of the command line.
        kind: of the run.
        reads: what the command reads of the settings; None: what a training reads.

    Raises:
        ConfigError, RunError, UsageError: the sentence says what cannot be used.
    """
    if isinstance(args.resume, str):
        args.resume, args.out = _fetched_to(args.resume, args.out), None
    if args.resume is not None:
        _refuse_sources(args)
        check_kind(args.resume, kind)
        _refuse_unread(args, reads)
        from strop.trainer.start import resume_run

        admit = None if args.trust_code else admission(args.resume / CONFIG_FILE, args.overrides)
        return resume_run(
            args.resume,
            overrides=args.overrides,
            say=say,
            admit=admit,
            accept_changes=args.accept_changes,
            aliases=aliases_of(args),
        )
    from strop.cli.init_from import settings

    config, beginning = settings(args, kind)
    _refuse_unread(args, reads)
    from strop.observability.trackers.group import check_trackers

    check_trackers(config.trainer.trackers)
    _check_given(config, kind, args.command_line[1], begins=beginning is not None)
    from strop.trainer.start import start_run

    folder = args.out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    start = start_run(folder, config, command=args.command_line, say=say, beginning=beginning)
    say(f"run folder: {folder}")
    from strop.config.preset_difference import deviations

    for line in deviations(start.config, source=args.config, overrides=args.overrides):
        say(line)
    return start


EXAMPLES = {
    "train": "model.path=models/smollm2 'data.train_files=[train.parquet]' reward.path=reward.py",
    "sft": "model.path=models/smollm2 'sft.data.train_files=[chats.jsonl]'",
    "prefer": "model.path=models/sft 'prefer.data.train_files=[pairs.jsonl]'",
}
"""Settings that are enough to begin a run, by kind."""


def _check_given(config: Config, kind: str, command: str, *, begins: bool) -> None:
    """Refuse settings without a model or without rows, before anything is made or loaded.

    Args:
        config: of the run.
        kind: of the run, and the name of its section where it has one.
        command: its name.
        begins: it begins with the weights of another run, so it needs no model.

    Raises:
        UsageError: the sentence says what to give.
    """
    section = getattr(config, kind, config)
    prefix = "" if section is config else f"{kind}."
    missing = {}
    if not config.model.path and not begins:
        missing["model.path"] = "a folder of a Hugging Face model, or its name on the hub"
    if not section.data.train_files:
        missing[f"{prefix}data.train_files"] = "a list of .parquet or .jsonl files"
    if missing:
        missing_settings = " and ".join(f"{key} ({text})" for key, text in missing.items())
        verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise UsageError(
            f"{missing_settings} {verb} not set: write {them} on the command line or into a file (--config FILE), as "
            f"in `strop {command} {EXAMPLES[kind]}`; `strop quickstart` needs nothing and shows a whole run"
        )


def _refuse_unread(args: argparse.Namespace, reads: Reads | None) -> None:
    from strop.cli.unused_keys import refuse_unread

    refuse_unread(args, args.command_line[1], reads)


def _here_or_elsewhere(text: str) -> Path | str:
    return text if is_url(text) else user_path(text)


def _fetched_to(url: str, out: Path | None) -> Path:
    """The copy of a run, in a folder where it goes on."""
    folder = out or Path("runs") / url.rstrip("/").rpartition("/")[2]
    if folder.exists():
        raise UsageError(
            f"{folder} is there: name an absent folder with --out, or continue it with --resume {shell_word(folder)}"
        )
    say(f"fetching {url} into {folder}")
    from strop.trainer.run_mirror import fetch_run  # libraries of hubs: slow to import

    return Path(fetch_run(url, folder))


@contextlib.contextmanager
def carrying_out(start: Start, *, kind: str) -> Iterator[None]:
    """Close the run at the end. One that failed before it began is removed, so that its folder can be used again; not
    one that the disk refused, which goes on with --resume."""
    with start.run as run:
        try:
            yield
        except KeyboardInterrupt as error:
            hint = f"continue with `strop {kind} --resume {shell_word(run.path)}`"
            raise Interrupted(hint, cause=error) from error.__cause__
        except Exception as error:
            if run.remove_unstarted(error):
                but = " but for its logs" if (run.path / LOGS).is_dir() else ""
                say(f"run folder {run.path} removed again{but}: nothing had begun")
            elif run.checkpoints.steps():
                folder = shell_word(run.path)
                say(
                    f"`strop incident {folder}` says what happened, `strop {kind} --resume {folder}` goes on from the "
                    f"last checkpoint"
                )
            raise
        try:
            run.link_model()
        except OSError as error:
            say(f"no link {run.path / MODEL_FOLDER}: {error.strerror}; the models are in its checkpoints")


def _refuse_sources(args: argparse.Namespace) -> None:
    options = [f"--{name}" for name in ("config", "out") if getattr(args, name) is not None]
    others = {"origin": "--from", "with_optimizer": "--with-optimizer"}
    options += [option for name, option in others.items() if getattr(args, name, None)]
    if options:
        raise UsageError(
            f"--resume continues a run with its own settings, so {' '.join(options)} has no place "
            f"here; leave it out, or start a run of its own with --out"
        )
