"""Settings that may be given anew to a run that is continued (the one place that says so).

NEUTRAL settings say where it happens, how long it waits, what it may cost, how work is cut into pieces and what is
saved: with another value it is still the same run, up to the last bits of floating point. Some are limits that a run
ends at: it has never passed one, so a higher limit changes nothing of what was done.

STEERING settings are a person's to change while it runs: how long it trains, its learning rate, how it is
validated. What was done stays as it is, and the log says from which step on they hold.

`config.yaml` of the run is written anew with all of them but those of the machine, which hold for one continuation.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from strop.config import ConfigError, to_dict, to_flat_dict
from strop.config.save import refuse_secrets
from strop.config.unknown_key import KeyAliases
from strop.config.yaml_text import dump
from strop.data import preference_config
from strop.data.sft import config as sft_config
from strop.rewards.judges import config as judges_config
from strop.run import MODEL_FOLDER, RunFolder
from strop.run.folder import CONFIG_FILE
from strop.run.paths import with_absolute_paths
from strop.sandbox import config as sandbox_config
from strop.trainer.config import Config
from strop.trainer.loading import load, read
from strop.trainer.resume import Continuation
from strop.trainer.untrusted_runs.settings import note_again
from strop.utils.atomic_io import replace_text
from strop.utils.shell_words import shell_word

_ENGINES = "actor reference teacher critic prm reward_model"

NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "where it runs": ("resources.",),
    "what is saved and shown": (
        "run.",
        "trainer.trackers",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.preflight",
        "trainer.rehearse_longest_batch",
        "trainer.profile_steps",
        "trainer.profile_memory",
    ),
    "how work is cut into pieces": (
        *(f"{role}.engine." for role in _ENGINES.split()),
        "model.gradient_checkpointing",
        "rollout.max_running",
        "rollout.deterministic",
        "agent.num_workers",
        "reward.num_workers",
        "reward.max_concurrent",
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
    "services that it asks, and what they may cost": judges_config.CHANGEABLE,
    "how the work of training on preferences is cut into pieces": preference_config.CHANGEABLE,
    "the sandbox of programs, without the limits that decide a verdict": sandbox_config.CHANGEABLE,
    "how the work of fine-tuning is cut into pieces": sft_config.CHANGEABLE,
}
"""Keys, and sections (with a dot at the end), by what they are about."""

STEERING: Mapping[str, tuple[str, ...]] = {
    "how long it trains": (
        "trainer.max_steps",
        "trainer.num_epochs",
        "trainer.max_hours",
        "trainer.target_pass_rate",
        "trainer.patience",
    ),
    "how it learns": ("actor.optim.", "critic.optim.", "prm.optim."),
    "how it is validated": ("eval.",),
    "what becomes of samples that could not be scored": ("reward.on_failure.", "reward.failed_score"),
    "how long it trains on preferences": preference_config.LENGTH,
    "how it learns from preferences": preference_config.LEARNING,
    "how long fine-tuning trains": sft_config.LENGTH,
    "how fine-tuning learns": sft_config.LEARNING,
}
"""The same, of those that steer it. What is about `how long` ends it."""

_OPTIMIZER = ".optim.name"

_REASONS: Mapping[str, str] = {
    "model.": "its weights and tokens are those of the model that it began with",
    "data.": "which prompts it has seen, and which come next, is counted in its own data",
    "trainer.seed": "which prompts come next, and every sample, follow from the seed",
    "rollout.": "its samples would be drawn in another way from one step to the next",
    "agent.": "its samples would be played in another way from one step to the next",
    "reward.": "rewards of one run must be comparable",
    "prm.": "rewards of one run must be comparable",
    "reward_model.": "rewards of one run must be comparable",
    "algorithm.": "its loss would be another one from one step to the next",
    "sft.": "what it has seen, and what comes next, is counted in its own data",
    "prefer.": "what it has seen, and what comes next, is counted in its own data",
}
"""Reasons for which other settings cannot be given anew, by the beginning of their keys."""


OF_THE_MACHINE = "resources."
"""Keys that hold for one continuation alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangedContinuation(Continuation):
    """Continuation of a run with settings given anew."""

    own: Config
    """Settings that hold from here on; the others (OF_THE_MACHINE) hold for this continuation."""
    folder: Path
    """Of the run."""
    text: str
    """Content of its config.yaml so far."""

    def validate(self, step: int) -> None:
        """Refuse to continue where settings given anew end the run before what it has done.

        Args:
            step: of the checkpoint that it would continue from.

        Raises:
            ConfigError: the sentence says which.
        """
        for key, value in self.after.items():
            is_below = (key.endswith(".max_steps") and value is not None and value < step) or (
                key.endswith(".num_epochs") and value < self.before[key]
            )
            if is_below:
                raise ConfigError(
                    f"{key}={value} ends before step {step}, which {self.folder} has done: give a larger number (it "
                    f"was {self.before[key]}), or begin a run from an earlier checkpoint, with --from "
                    f"{shell_word(self.folder)}@STEP --out DIR"
                )

    def lines(self, step: int) -> Iterator[str]:
        """Lines about the changes for the person who resumes at this step."""
        for key, value in self.after.items():
            scope = "for this continuation" if key.startswith(OF_THE_MACHINE) else f"from step {step + 1} on"
            yield f"{key}={json.dumps(value)} {scope}; it was {json.dumps(self.before[key])}"

    def save(self, run: RunFolder) -> None:
        """Write the settings that hold from here on; they are the user's own where those before were.

        Raises:
            ConfigError: one of them is a secret.
        """
        refuse_secrets(self.after)
        text = dump(to_dict(self.own))
        if not self.after or text == self.text:
            return
        replace_text(run.path / CONFIG_FILE, text)
        note_again(text, before=self.text)


def settings_to_continue(
    file: Path,
    overrides: Sequence[str],
    *,
    text: str,
    in_shell: bool = True,
    aliases: KeyAliases | None = None,
) -> Continuation:
    """The settings of a run with overrides on top.

    Args:
        file: config.yaml of the run, for messages.
        overrides: of the command line or of a program.
        text: content of that file.
        in_shell, aliases: as for `strop.config.load_layers`.

    Raises:
        ConfigError: the file or an override cannot be used, or one would make it another run.
    """
    before = read(file, text=text)
    if not overrides:
        return Continuation(config=before)
    was = to_flat_dict(before)
    new_config = load(file, text=text, overrides=overrides, in_shell=in_shell, aliases=aliases)
    config = with_absolute_paths(new_config, base=before)
    after = {key: value for key, value in to_flat_dict(config).items() if was[key] != value}
    for key, value in after.items():
        if not is_changeable(key):
            resume, begin = (
                ("--resume", f"--from {shell_word(file.parent)} {key}=… --out DIR")
                if in_shell
                else ("resume=True", f"model={str(file.parent / MODEL_FOLDER)!r} and another out")
            )
            raise ConfigError(
                f"{key} is {was[key]!r} in this run, and {value!r} would make it another one, which {resume} cannot: "
                f"{_reason(key)}. Leave it out, or begin a run with the weights of this one: {begin}. May be given "
                f"anew: {changeable_keys()}"
            )
    ends = {about: keys for about, keys in STEERING.items() if about.startswith("how long")}
    return ChangedContinuation(
        config=config,
        before={key: was[key] for key in after},
        after=after,
        extends_run=any(is_among(key, ends) for key in after),
        own=dataclasses.replace(config, resources=before.resources),
        folder=file.parent,
        text=text,
    )


def is_changeable(key: str) -> bool:
    """True when a run may be continued with another value of this full key."""
    return is_among(key, {**NEUTRAL, **STEERING}) and not key.endswith(_OPTIMIZER)


def is_among(key: str, listed: Mapping[str, Sequence[str]]) -> bool:
    """True when a list of keys and sections (with a dot at the end) has this full key."""
    return any(
        key == entry or (entry.endswith(".") and key.startswith(entry))
        for keys in listed.values()
        for entry in keys
    )


def changeable_keys() -> str:
    """All of them in one line; a section ends with an ellipsis."""
    return "; ".join(
        f"{about}: {', '.join(f'{key}…' if key.endswith('.') else key for key in keys)}"
        for about, keys in {**STEERING, **NEUTRAL}.items()
    )


def _reason(key: str) -> str:
    if key.endswith(_OPTIMIZER):
        return "its checkpoints hold the state of another optimizer"
    reasons = [reason for start, reason in _REASONS.items() if key.startswith(start)]
    return reasons[0] if reasons else "what was done so far was done with that value"
