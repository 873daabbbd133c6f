"""How a run is continued: from which checkpoint, and with which settings anew (the one place that says so).

A run that is continued with its own settings makes the samples and weights that it would have made without the break.
Settings of these sections and keys say where it happens, how long it waits, what it may cost, how work is cut into
pieces and what is saved: with another value it is still the same run, up to the last bits of floating point. Some are
limits that a run ends at: it has never passed one, so a higher limit changes nothing of what was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.base.guests import all_joined
from strop.config import ConfigError, to_flat_dict
from strop.run import Checkpoint, RunError, RunFolder
from strop.trainer.config import Config
from strop.trainer.loading import load, read

_ENGINES = "actor reference teacher critic reward_model"

CHANGEABLE: Mapping[str, tuple[str, ...]] = {
    "where it runs": ("resources.",),
    "what is saved and shown": ("run.", "trainer.trackers", "trainer.preflight"),
    "how work is cut into pieces": (
        *(f"{role}.engine." for role in _ENGINES.split()),
        "model.gradient_checkpointing",
        "rollout.max_running",
        "reward.num_workers",
        "data.cache_dir",
        "data.cache_max_bytes",
    ),
    "how long it waits": (
        "rollout.timeout_s",
        "agent.timeout_s",
        "agent.tool_timeout_s",
        "reward.timeout_s",
        "reward.start_timeout_s",
    ),
    "what ends it": (
        "reward.max_failed_share",
        "reward.retries",
        "reward.max_memory_gib",
        "reward_model.max_tokens",
        "reward_model.truncation",
        "algorithm.filter_groups.max_rounds",
        "algorithm.filter_groups.at_limit",
    ),
    **all_joined("changeable settings"),
}
"""Keys, and sections (with a dot at the end), by what they are about."""


def settings_to_continue(file: Path, overrides: Sequence[str], *, text: str) -> tuple[Config, dict[str, Any]]:
    """The settings of a run with overrides on top, and what they change: full key to value.

    Args:
        file: config.yaml of the run, for messages.
        overrides: of the command line.
        text: content of that file.

    Raises:
        ConfigError: the file or an override cannot be used, or one would make it another run.
    """
    before = read(file, text=text)
    if not overrides:
        return before, {}
    own = to_flat_dict(before)
    config = load(file, text=text, overrides=overrides)
    changed = {key: value for key, value in to_flat_dict(config).items() if own[key] != value}
    refused = {key: value for key, value in changed.items() if not is_changeable(key)}
    if refused:
        key, value = next(iter(refused.items()))
        raise ConfigError(
            f"{key} is {own[key]!r} in this run, and {value!r} would make it another one, which --resume cannot: "
            f"leave it out, or start a run of its own with --out. May be given anew: {changeable_keys()}"
        )
    return config, changed


def is_changeable(key: str) -> bool:
    """Whether a run may be continued with another value of this full key."""
    return any(
        key == known or (known.endswith(".") and key.startswith(known))
        for keys in CHANGEABLE.values()
        for known in keys
    )


def changeable_keys() -> str:
    """All of them in one line; a section ends with an ellipsis."""
    return "; ".join(
        f"{about}: {', '.join(f'{key}…' if key.endswith('.') else key for key in keys)}"
        for about, keys in CHANGEABLE.items()
    )


def roll_back(run: RunFolder, *, settings: Mapping[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """The last valid checkpoint of a run that is not finished, to which the run is rolled back, and what the person who
    resumes should know. None: from the beginning, because no checkpoint was written yet.

    Args:
        run: to continue.
        settings: in which it goes on with other values, for the record.

    Raises:
        RunError: checkpoints exist, but none is valid.
    """
    checkpoint, lines = run.checkpoints.latest_valid()
    if checkpoint is None and run.events.read("checkpoint"):
        raise RunError(
            f"{run.path} has no valid checkpoint left ({'; '.join(lines)}); restore its checkpoints folder, or start "
            f"again in another folder with --out"
        )
    step = 0 if checkpoint is None else checkpoint.step
    before = run.ledger.counts()
    run.rollback(step, settings=settings)
    after = run.ledger.counts()
    repeated = before["issued"] - after["issued"]
    lines.append(
        f"resumed at step {step}: {after['trained']} samples trained, {repeated} after that step are made again, "
        f"0 lost"
    )
    return checkpoint, lines
