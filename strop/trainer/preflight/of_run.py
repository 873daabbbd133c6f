"""A run before its first step: what it will use is looked at, and a run that could not learn ends there."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from strop.run import RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.env_certificate import certify_environments
from strop.trainer.preflight.trial import RunRefused, run_trial
from strop.trainer.setup import TrainingData
from strop.trainer.undecided import UndecidedSources
from strop.trainer.worker_groups import WorkerGroups

EVENT = "preflight"


def preflight_before_training(
    config: Config,
    data: TrainingData,
    roles: WorkerGroups,
    run: RunFolder,
    say: Reporter,
    *,
    undecided: UndecidedSources,
    force: bool,
) -> None:
    """Environments are inspected, and a few dozen samples of the first step played and scored; not where a start that
    came no further has done it.

    Args:
        config, data, roles, run: of the run.
        say: takes lines for the person who watches.
        undecided: notes what the samples show.
        force: let a run start that could not learn.

    Raises:
        RunRefused: nothing would be learned, and nobody insisted.
    """
    if was_tried(run):
        return
    certify_environments(config, data, run, say)
    say("preflight: a few dozen samples of the first step are played and scored")
    preflight = run_trial(config, data, roles, on_reports=partial(undecided.observe, 0))
    for line in preflight.lines():
        say(line)
    obstructed = "forced" if force else "refused"
    run.events.append(
        EVENT,
        0,
        fsync=True,
        verdict=obstructed if preflight.obstacles else "ready",
        checks=[asdict(check) for check in preflight.checks],
        num_prompts=preflight.num_prompts,
        num_samples=preflight.num_samples,
        seconds=preflight.seconds,
    )
    if preflight.obstacles and not force:
        raise RunRefused(preflight.refusal())
    if preflight.obstacles:
        say(f"started by --force, against {', '.join(check.name for check in preflight.obstacles)}")


def was_tried(run: RunFolder) -> bool:
    """A start of this run was let go on."""
    return bool({"ready", "forced"} & {event["verdict"] for event in run.events.read(EVENT)})
