"""`strop track`: sends a recorded run to a tracker."""

from __future__ import annotations

import argparse

from strop.cli.settings import user_path
from strop.observability.trackers.group import REMOTE, built_in
from strop.run import RunError, RunFolder
from strop.run.naming import run_in
from strop.utils.terminal import UsageError, print_json, print_plain, say

SUMMARY = "send a recorded run to a tracker: wandb, mlflow, swanlab, trackio, clearml, comet"
EPILOG = """\
examples:
  strop track runs/arithmetic --to mlflow
  WANDB_MODE=offline strop track runs/arithmetic --to wandb --project sums --name second-try

Everything is sent anew, as a run of its own there: numbers of every step, settings, tables of samples of validations,
and the curve. A run that trains sends to its trackers as it goes (trainer.trackers=[console,jsonl,wandb]).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", type=user_path, help="run folder")
    parser.add_argument("--to", required=True, choices=REMOTE, help="the tracker")
    parser.add_argument(
        "--project", metavar="NAME", help="project or experiment (default: trainer.project_name)"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the run there (default: that of its folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry out the command."""
    from strop.observability.trackers.async_logger import end_run, log_step
    from strop.observability.trackers.run_metadata import RunMetadata
    from strop.observability.trackers.setup import METRICS_FILE, PROJECT, TrackerSetup, read_metrics

    folder = run_in(args.run)
    with RunFolder.open(folder, read_only=True) as recorded:
        settings = recorded.info.get("config", {}).get("trainer", {})
    file = folder / METRICS_FILE
    metrics = read_metrics(file) if file.is_file() else []
    if not metrics:
        raise RunError(f"{folder} has no numbers in {METRICS_FILE}: there is nothing to send")
    tracker = built_in(args.to)
    tracker.check()
    setup = TrackerSetup(
        folder=folder,
        total_steps=int(metrics[-1]["step"]),
        project=args.project or settings.get("project_name") or PROJECT,
        name=args.name or settings.get("experiment_name") or "",
    )
    metadata = RunMetadata.read(setup, is_upload=True)
    remote = tracker.remote(metadata)
    try:
        remote.begin()
        for record in metrics:
            log_step(
                remote, int(record["step"]), {key: value for key, value in record.items() if key != "step"}
            )
        end_run(remote)
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise UsageError(f"{args.to} failed: {type(error).__name__}: {error}") from error
    if args.json:
        print_json({"run": str(folder), "to": args.to, "steps": len(metrics), "id": metadata.id})
    else:
        say(f"project {metadata.project}, run {metadata.name}")
        print_plain(f"{len(metrics)} steps of {folder} sent to {args.to}")
    return 0
