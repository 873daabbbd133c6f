"""What commands that make runs share: a run folder is begun or continued, and closed in every case."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.base.elsewhere import elsewhere, is_url
from strop.base.guests import all_joined, needed, optional, targets
from strop.cli.output import Interrupted, UsageError, say
from strop.cli.runs import choose_checkpoint, run_in
from strop.cli.settings import add_config_arguments, add_trust_argument, admission, load_settings
from strop.run import MODEL_FOLDER, RunError, RunFolder, is_run

if TYPE_CHECKING:
    from strop.trainer.config import Config
    from strop.trainer.launch import Start


KINDS_OF_GUESTS = tuple(key for key in targets("section") if "." not in key and key not in targets("role"))
"""Commands of guests that make runs: each has a section at the root, by its name."""


def add_run_arguments(parser: argparse.ArgumentParser, *, kind: str) -> None:
    """Arguments of a command that makes a run."""
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help=f"run folder, absent or empty (default runs/{kind}-<time>)"
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        type=_here_or_elsewhere,
        help="continue the run in DIR with its own settings; some may be given anew; of a URL (run.copy_to), the copy "
        "is fetched into --out first",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN[@STEP|@best]",
        help="begin a run with the weights of this one's last checkpoint (of STEP, of the best validation), and with "
        "its settings where --config names no others; RUN may be the URL of a copy",
    )
    parser.add_argument(
        "--with-optimizer", action="store_true", help="with --from: take over the optimizer's state too"
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def begin(args: argparse.Namespace, *, kind: str, reads: object = None) -> Start:
    """A run that is ready to go on; its folder is locked.

    Args:
        args: of the command line.
        kind: of the run.
        reads: what the command reads of the settings, as the guest of "unread settings" asks for it.

    Raises:
        ConfigError, RunError, UsageError: the sentence says what cannot be used.
    """
    from strop.trainer.launch import CONFIG_FILE, resume_run, start_run

    if isinstance(args.resume, str):
        args.resume, args.out = _fetched_to(args.resume, args.out), None
    if args.resume is not None:
        _refuse_sources(args)
        _check_kind(args.resume, kind)
        _refuse_unread(args, reads)
        admit = None if args.trust_code else admission(args.resume / CONFIG_FILE, args.overrides)
        return resume_run(args.resume, overrides=args.overrides, say=say, admit=admit)
    config, beginning = _settings(args, kind)
    _refuse_unread(args, reads)
    folder = args.out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    start = start_run(folder, config, command=args.command_line, say=say, beginning=beginning)
    say(f"run folder: {folder}")
    for lines in all_joined("lines of a fresh run").values():
        for line in lines(start.config, source=args.config, overrides=args.overrides):
            say(line)
    return start


def _refuse_unread(args: argparse.Namespace, reads: object) -> None:
    refuse = optional("unread settings")
    if refuse is not None:
        refuse(args, args.command_line[1], reads)


def _here_or_elsewhere(text: str) -> Path | str:
    return text if is_url(text) else Path(text)


def _fetched_to(url: str, out: Path | None) -> Path:
    """The copy of a run, in a folder where it goes on."""
    folder = out or Path("runs") / url.rstrip("/").rpartition("/")[2]
    if folder.exists():
        raise UsageError(
            f"{folder} is there: name an absent folder with --out, or continue it with --resume {folder}"
        )
    say(f"fetching {url} into {folder}")
    return Path(elsewhere("runs", f"{url} is a URL").fetch_run(url, folder))


@contextlib.contextmanager
def carrying_out(start: Start, *, kind: str) -> Iterator[None]:
    """Close the run at the end. One that failed before it began is removed, so that its folder can be used again; not
    one that the disk refused, which goes on with --resume."""
    with start.run as run:
        try:
            yield
        except KeyboardInterrupt as error:
            hint = f"continue with `strop {kind} --resume {run.path}`"
            raise Interrupted(hint, cause=error) from error.__cause__
        except Exception as error:
            if not isinstance(error, RunError) and run.remove_unbegun():
                say(f"run folder {run.path} removed again: nothing had begun")
            elif run.checkpoints.steps():
                say(
                    f"`strop incident {run.path}` says what happened, `strop {kind} --resume {run.path}` goes on from "
                    f"the last checkpoint"
                )
            raise
        try:
            run.link_model()
        except OSError as error:
            say(f"no link {run.path / MODEL_FOLDER}: {error.strerror}; the models are in its checkpoints")


def _settings(args: argparse.Namespace, kind: str) -> tuple[Config, Any]:
    """What a run begins with, and the run whose weights it takes."""
    if args.origin is None:
        if args.with_optimizer:
            raise UsageError("--with-optimizer belongs to --from RUN; leave it out, or name the run")
        return load_settings(args), None
    folder, step = _run_and_step(args.origin)
    _check_kind(folder, kind, needs_same=args.config is None)
    given = [word.lstrip("+~").split("=", 1)[0] for word in args.overrides]
    if "model.path" in given:
        raise UsageError("--from and model.path both say what the run begins with: leave one of them out")
    with RunFolder.open(folder, read_only=True) as run:
        checkpoint, lines = choose_checkpoint(run, step)
        info = dict(run.info)
    for line in lines:
        say(line)
    if checkpoint is None:
        raise RunError(f"{folder} has no valid checkpoint to begin with; continue it until it saves one")
    config = load_settings(args, source=folder / "config.yaml")
    make = needed("beginning of a run", "--from names a run")
    beginning = make(
        run=folder,
        info=info,
        checkpoint=checkpoint,
        settings=config if args.config is None else None,
        given=given,
        with_optimizer=args.with_optimizer,
    )
    return config, beginning


def _run_and_step(text: str) -> tuple[Path, int | str | None]:
    """RUN[@STEP|@best]; a folder whose name has an @ in it is one."""
    folder, at, step = text.rpartition("@")
    if is_url(text) and (not at or "/" in step):
        return _fetched_copy(text, None), None
    if not at or Path(text).is_dir():
        return run_in(Path(text).expanduser()), None
    if step != "best" and not step.isdecimal():
        raise UsageError(f"--from {text}: {step!r} is no step; give RUN@NUMBER, RUN@best, or RUN alone")
    wanted = step if step == "best" else int(step)
    return _fetched_copy(folder, wanted) if is_url(folder) else run_in(Path(folder).expanduser()), wanted


def _fetched_copy(url: str, step: int | str | None) -> Path:
    return Path(elsewhere("runs", f"{url} is a URL").kept_run(url, step))


def _refuse_sources(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("config", "out") if getattr(args, name) is not None]
    given += ["--from"] * (args.origin is not None) + ["--with-optimizer"] * args.with_optimizer
    if given:
        raise UsageError(
            f"--resume continues a run with its own settings, so {' '.join(given)} has no place "
            f"here; leave it out, or start a run of its own with --out"
        )


def _check_kind(folder: Path, kind: str, *, needs_same: bool = True) -> None:
    if not is_run(folder) or not needs_same:
        return  # opening it says what is wrong
    with RunFolder.open(folder, read_only=True) as run:
        made_by = "".join(run.info["command"][1:2])
    if _kind_of(made_by) not in ("", kind):
        raise UsageError(f"{folder} is a run of `strop {made_by}`; continue it with that command")


def _kind_of(word: str) -> str:
    """The kind of run that a command makes: its own name, or for another command of a guest that makes runs the name of
    the guest's section; empty for others."""
    if word in ("train", *KINDS_OF_GUESTS):
        return word
    room = targets("command").get(word, "").split(".")[1:2]
    return next((kind for kind in KINDS_OF_GUESTS if targets("section")[kind].split(".")[1:2] == room), "")
