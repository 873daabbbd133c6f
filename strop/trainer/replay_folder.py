"""The folder of a run that repeats a recorded one, possibly on other resources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from strop.config import ConfigError, read_settings
from strop.config.unknown_key import KeyAliases
from strop.run import RunError, RunFolder
from strop.run.fingerprints import FingerprintChain
from strop.run.folder import CONFIG_FILE
from strop.run.replay_schedule import read_schedule
from strop.trainer.callbacks import Reporter
from strop.trainer.init_from import take_optimizer
from strop.trainer.model_commits import read_models
from strop.trainer.replayed_run import RecordedRun, write_recorded
from strop.trainer.resume_overrides import NEUTRAL, is_among, settings_to_continue
from strop.trainer.start import Start, start_run
from strop.trainer.threads import EVENT as THREADS


def replay_run(
    folder: Path,
    out: Path,
    *,
    overrides: Sequence[str],
    command: Sequence[str],
    say: Reporter,
    admit: Callable[[str], object] | None,
    aliases: KeyAliases | None = None,
) -> tuple[Start, RecordedRun]:
    """A fresh run folder for a run that is made again, and what is repeated.

    Args:
        folder: of the recorded run.
        out: absent or empty.
        overrides: settings that may be given anew (NEUTRAL of `strop.trainer.resume_overrides`).
        command: the command line.
        say: takes lines for the person who watches.
        admit: raises for a content of config.yaml that may not be used.
        aliases: as for `strop.config.load_layers`.

    Raises:
        ConfigError: an override would make it another run.
        RunError: there is nothing to repeat, or the run was steered on its way.
    """
    text = read_settings(folder / CONFIG_FILE)
    if admit is not None:
        admit(text)
    continuation = settings_to_continue(folder / CONFIG_FILE, overrides, text=text, aliases=aliases)
    for key in continuation.after:
        if not is_among(key, NEUTRAL):
            raise ConfigError(
                f"{key} is {continuation.before[key]!r} in {folder}: with another value it is no repetition; "
                f"leave it out"
            )
    with RunFolder.open(folder, read_only=True) as run:
        recorded = recorded_run(run)
        threads = run.events.read(THREADS)
    config = continuation.config
    start = start_run(out, config, command=command, say=say, recorded=read_models(folder))
    try:
        take_optimizer(folder, start.run.path)
        write_recorded(start.run.path, recorded)
        if threads:  # sums of floating point depend on it
            start.run.events.append(THREADS, 0, count=threads[-1]["count"], why="as recorded")
    except BaseException:
        start.run.close()
        raise
    followed = f"follows its schedule over {len(recorded.steps)} steps" if recorded.steps else "from its seed"
    say(f"{folder} is made again to step {recorded.last_step}, {followed}")
    if config.rollout.engine != "native" or (recorded.steps and not config.rollout.deterministic):
        say(
            "log-probs, and with them samples, may differ in floating point: which requests were computed together is "
            "not repeated (rollout.deterministic=true in the recorded run makes it independent of that)"
        )
    return start, recorded


def recorded_run(run: RunFolder) -> RecordedRun:
    """Recorded schedule of a run.

    Raises:
        RunError: it did no step, or was steered on its way.
    """
    for event in run.events.read("resumed"):
        steered = [key for key in event.get("settings", {}) if not is_among(key, NEUTRAL)]
        if steered:
            raise RunError(
                f"{run.path} was continued with other settings at step {event['step']} ({', '.join(steered)}), so its "
                f"steps do not follow from those that it has now; repeat a run that kept its settings"
            )
    prints = FingerprintChain(run.events).read()
    if not prints:
        raise RunError(f"{run.path} did no step, so there is nothing to repeat")
    return RecordedRun(
        run=str(run.path),
        id=run.info["id"],
        last_step=prints[-1].step,
        steps=read_schedule(run.events),
    )
