"""Initialization from another run: `--from RUN` and `--with-optimizer`."""

from __future__ import annotations

import argparse
from pathlib import Path

from strop.cli.run_kinds import check_kind
from strop.cli.settings import check_unchanged, load_settings
from strop.run import RunError, RunFolder
from strop.run.naming import choose_checkpoint, run_in
from strop.trainer.config import Config
from strop.trainer.init_from import InitFromRun
from strop.utils.remote_path import is_url
from strop.utils.terminal import UsageError, say


def settings(args: argparse.Namespace, kind: str) -> tuple[Config, InitFromRun | None]:
    """Configuration of a new run, and the run whose weights it takes.

    Raises:
        ConfigError, RunError, UsageError: the sentence says what cannot be used.
    """
    if args.origin is None:
        if args.with_optimizer:
            raise UsageError("--with-optimizer belongs to --from RUN; leave it out, or name the run")
        return load_settings(args, section="" if kind == "train" else kind), None
    folder, step = _run_and_step(args.origin)
    check_kind(folder, kind, needs_same=args.config is None)
    keys = [word.lstrip("+~").split("=", 1)[0] for word in args.overrides]
    if "model.path" in keys:
        raise UsageError("--from and model.path both say what the run begins with: leave one of them out")
    with RunFolder.open(folder, read_only=True) as run:
        checkpoint, lines = choose_checkpoint(run, step)
        info = dict(run.info)
    for line in lines:
        say(line)
    if checkpoint is None:
        raise RunError(f"{folder} has no valid checkpoint to begin with; continue it until it saves one")
    config = load_settings(args, source=folder / "config.yaml")
    check_unchanged(args, folder, config)
    beginning = InitFromRun(
        run=folder,
        info=info,
        checkpoint=checkpoint,
        settings=config if args.config is None else None,
        given=keys,
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
    chosen_step = step if step == "best" else int(step)
    return _fetched_copy(folder, chosen_step) if is_url(folder) else run_in(
        Path(folder).expanduser()
    ), chosen_step


def _fetched_copy(url: str, step: int | str | None) -> Path:
    from strop.trainer.run_mirror import kept_run  # libraries of hubs: slow to import

    return Path(kept_run(url, step))
