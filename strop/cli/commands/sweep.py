"""`strop sweep`: the same run with several values of some settings, and one table of what came out."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.settings import add_config_arguments, add_trust_argument, load_settings, user_path
from strop.cli.sweep.grid import Planned, plan
from strop.cli.unused_keys import OF_TRAINING, refuse_unread_overrides, unread_of_file
from strop.utils.shell_words import shell_word
from strop.utils.terminal import Interrupted, UsageError, plain, print_json, print_plain, say

if TYPE_CHECKING:
    from strop.cli.sweep.outcomes import Outcome
    from strop.cli.sweep.running import Job
    from strop.trainer.config import Config

SUMMARY = "train every combination of some values of settings, with one table of the results"
EPILOG = """\
examples:
  strop sweep --config config.yaml actor.optim.lr=1e-6,3e-6,1e-5 --out sweeps/lr
  strop sweep --config config.yaml algorithm=grpo,rloo 'trainer.seed=range(0,3)' --out sweeps/seeds --parallel 2
  strop sweep --config config.yaml trainer.seed=1,2 resources.runtime=ray resources.address=auto --out sweeps/ray

Every combination of the values is a run of `strop train` in a folder below --out. The same command again goes on: runs
that are finished stay, others continue from their last checkpoint, new values are added. A run that fails does not stop
the others; the exit code is then 1.
"""
RECORD = "sweep.json"
_WIDTH = 120
"""Columns of the table in a file or a pipe."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    add_config_arguments(parser)
    add_trust_argument(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=user_path, required=True, help="folder for all runs and the table"
    )
    parser.add_argument(
        "--parallel",
        metavar="N",
        type=int,
        default=1,
        help="runs at the same time (default 1: one after the other)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="start runs even where the preflight finds that they could not learn",
    )
    parser.add_argument("--json", action="store_true", help="make the last line one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    if args.parallel < 1:
        raise UsageError(f"--parallel is {args.parallel}; use at least 1")
    runs = plan(args.overrides)
    jobs = _jobs(args, runs)
    _claim(args.out)
    from strop.cli.sweep.outcomes import outcome_of
    from strop.cli.sweep.running import run_all
    from strop.trainer.fault_tolerance.signals import SignalRequest

    failures: dict[str, str] = {}
    chosen = {sweep_run.name: sweep_run.chosen for sweep_run in runs}
    count, begun = len(runs), len(runs) - len(jobs)
    say(f"{count} runs below {args.out}{f', {begun} of them finished before' if begun else ''}")

    def started(job: Job) -> None:
        nonlocal begun
        begun += 1
        say(f"run {begun} of {count}: {job.name} ({job.log})")

    def ended(job: Job) -> None:
        if job.code:
            failures[job.name] = _last_line(job.log)
        outcome = outcome_of(args.out / job.name, chosen[job.name], failure=failures.get(job.name, ""))
        rate = "" if outcome.val_reward is None else f", mean reward of validation {outcome.val_reward:.4g}"
        rate = rate if outcome.pass_rate is None else f", pass rate {100 * outcome.pass_rate:.1f} %"
        say(
            plain(
                f"{job.name}: {outcome.status}{rate}{f': {outcome.reason}' if outcome.reason else ''}",
                is_one_line=True,
            )
        )

    try:
        with SignalRequest().listening():
            at_once = min(args.parallel, max(len(jobs), 1))
            run_all(jobs, at_once=at_once, places=_places(at_once), started=started, ended=ended)
    except KeyboardInterrupt as error:
        _report(args, runs, failures)
        raise Interrupted("the same command goes on where it was", cause=error) from error.__cause__
    outcomes = _report(args, runs, failures)
    return 0 if all(sweep_run.status == "finished" for sweep_run in outcomes) else 1


def _jobs(args: argparse.Namespace, runs: Sequence[Planned]) -> list[Job]:
    """Jobs of the runs left to do; every configuration is checked before anything starts.

    Raises:
        UsageError: one of the runs cannot be, or a folder holds another run.
    """
    from strop.cli.sweep.running import Job
    from strop.run import is_run

    jobs = []
    for run in runs:
        folder: Path = args.out / run.name
        config = _settings(args, run)
        words = ["train", "--config", args.config, "--out", str(folder), *run.overrides]
        if args.config is None:
            del words[1:3]
        if is_run(folder):
            if _is_finished(folder, config):
                continue
            words = ["train", "--resume", str(folder)]
        words += ["--trust-code"] * args.trust_code + ["--force"] * args.force
        jobs.append(Job(name=run.name, command=words, log=args.out / "logs" / f"{run.name}.log"))
    if args.config and (unread := unread_of_file(args.config, OF_TRAINING)):
        say(f"`strop sweep` does not read {', '.join(unread)} of {args.config}")
    return jobs


def _settings(args: argparse.Namespace, run: Planned) -> Config:
    try:
        refuse_unread_overrides(run.overrides, "train", OF_TRAINING)
        namespace = argparse.Namespace(
            config=args.config, overrides=run.overrides, trust_code=args.trust_code
        )
        return load_settings(namespace)
    except ValueError as error:
        raise UsageError(f"no run was started, since {', '.join(run.chosen)} cannot be: {error}") from error


def _is_finished(folder: Path, config: Config) -> bool:
    """Of a folder that holds this very run.

    Raises:
        UsageError: it is another one.
    """
    from strop.config import read_config
    from strop.run import RunFolder
    from strop.run.folder import CONFIG_FILE
    from strop.trainer.config import Config

    file = folder / CONFIG_FILE
    if not file.is_file() or read_config(Config, file) != config:
        raise UsageError(
            f"{folder} holds a run with other settings than those of this sweep (see `strop config diff`): choose "
            f"another --out, or remove that folder"
        )
    with RunFolder.open(folder, read_only=True) as run:
        return bool(run.events.read("finished"))


def _claim(out: Path) -> None:
    """The folder is empty, or that of a sweep."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not (out / RECORD).is_file():
            raise UsageError(f"--out {out} is not empty and no sweep: choose another folder")
        (out / RECORD).touch()
    except OSError as error:
        raise UsageError(f"cannot write --out {out}: {error.strerror}; choose another folder") from error


def _places(count: int) -> list[Mapping[str, str]]:
    """Variables for each of the runs at the same time: their share of the cores, and of several devices one."""
    from strop.utils.device import VISIBILITY_VARIABLES, device_name, num_devices, visibility_variable
    from strop.utils.machine_limits import usable_cores

    device = device_name() if count > 1 else "cpu"
    variable = visibility_variable(device)
    threads = str(max(usable_cores() // count, 1))
    places: list[Mapping[str, str]] = []
    for number in range(count):
        variables = {} if count == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
        if variable is not None and not any(name in os.environ for name in VISIBILITY_VARIABLES):
            variables[variable] = str(number % num_devices(device))
        places.append(variables)
    return places


def _last_line(log: Path) -> str:
    """Last line of a run's log, which is its error."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    messages = [line.strip() for line in lines if line.strip()]
    return messages[-1].removeprefix("strop train: ") if messages else "it said nothing"


def _report(args: argparse.Namespace, runs: Sequence[Planned], failures: Mapping[str, str]) -> list[Outcome]:
    """Table, picture and record of how it stands."""
    from rich.console import Console

    from strop.cli.sweep.outcomes import PICTURE, best_of, draw, outcome_of, table
    from strop.utils.atomic_io import replace_text

    outcomes = [
        outcome_of(args.out / sweep_run.name, sweep_run.chosen, failure=failures.get(sweep_run.name, ""))
        for sweep_run in runs
    ]
    picture = draw(args.out / PICTURE, outcomes)
    best = best_of(outcomes)
    record = {
        "folder": str(args.out),
        "config": args.config,
        "runs": [asdict(sweep_run) for sweep_run in outcomes],
        "best": None if best is None else best.name,
        "picture": None if picture is None else str(picture),
    }
    replace_text(args.out / RECORD, json.dumps(record, indent=1) + "\n")
    if args.json:
        print_json(record)
    else:
        console = Console()
        console.print(table(outcomes), width=None if console.is_terminal else _WIDTH, crop=False)
        for sweep_run in outcomes:
            if sweep_run.reason:
                print_plain(
                    plain(f"{sweep_run.name} {sweep_run.status}: {sweep_run.reason}", is_one_line=True)
                )
        print_plain(f"table: {args.out / RECORD}{'' if picture is None else f'   picture: {picture}'}")
        if best is not None:
            print_plain(f"best:  {best.name}: strop eval {shell_word(best.folder)}")
    return outcomes
