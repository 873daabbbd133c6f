"""Settings that a command has no use for.

What somebody types for one command is meant for it: where it would do nothing, it is refused. A file of settings serves
several commands, so what it says to others is left alone, and named once.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from strop.rollout.registry import OWN_PROCESSES, REMOTE
from strop.trainer.sections import FINE_TUNING_SECTIONS
from strop.utils.terminal import UsageError, say


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Sections and keys that one command reads, without those in `but`."""

    keys: Sequence[str]
    """Full keys; a section stands for all that is in it, "" for everything."""
    but: Sequence[str] = ()
    """Sections and keys below them that are not read after all."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Replacements for some keys that are not read."""
    is_one_process: bool = False
    """It takes no more, whatever `resources` says."""

    def covers(self, key: str) -> bool:
        """The command reads this full key."""
        return any(_is_below(key, covered) for covered in self.keys) and not any(
            _is_below(key, covered) for covered in self.but
        )


WHICH_MODEL = ("model.path", "model.revision", "model.local_files_only")
ONE_PROCESS = ("resources.device", "resources.num_threads", "resources.env")
SEVERAL = (
    "resources.runtime", "resources.ranks", "resources.nodes", "resources.address", "resources.cpus_per_rank",
    "resources.call_timeout_s", "resources.start_timeout_s",
)  # fmt: skip
_OF_RANKS = (*SEVERAL, "resources.apart", "resources.offload_idle")
_ANSWERS = ("eval.temperature", "eval.top_p", "eval.top_k")
BUDGET = "actor.engine.max_tokens_per_device"
"""A configuration with long prompts or answers is refused without more of it."""
ENGINES = (
    "rollout.engine", *(f"rollout.{name}" for name in (*OWN_PROCESSES, *REMOTE)),
)  # fmt: skip
"""The choice of the rollout engine, and its settings."""
GENERATION = (
    "model", *ENGINES, "rollout.max_running", "rollout.stop_token_ids", "rollout.timeout_s", *ONE_PROCESS, *_ANSWERS,
    BUDGET, "algorithm.extensions",
)  # fmt: skip
ORDER = (
    "data.cache_max_bytes", "data.source_weights", "data.source_shares", "data.prompts_per_step", "data.sampler",
    "data.reorder_every",
)  # fmt: skip
AFTER_SCORING = ("reward.weight", "reward.overlong_buffer", "reward.overlong_penalty")
OF_TRAINING = Reads(keys=("",), but=FINE_TUNING_SECTIONS)
"""Keys that `strop train` reads; other commands declare their own."""


def reads_with_engine(reads: Reads, engine: str) -> Reads:
    """Add the prompt limit for engines in other processes: they are started for a longest prompt."""
    if engine not in OWN_PROCESSES:
        return reads
    return replace(reads, keys=(*reads.keys, "data.max_prompt_tokens"))


def reads_which_model(reads: Reads) -> Reads:
    """Keys of a command whose command line names no model: it takes the model of the settings."""
    return replace(reads, but=tuple(key for key in reads.but if key not in WHICH_MODEL))


def refuse_unread(args: argparse.Namespace, command: str, reads: Reads | None) -> None:
    """Raise a UsageError for the first override that the command would ignore, and name what it ignores of the file.

    Args:
        args: with `overrides` that are known to be valid, and `config`: the file or preset of --config, or None.
        command: its name.
        reads: what it reads; None: what a training reads.
    """
    reads = reads or OF_TRAINING
    refuse_unread_overrides(args.overrides, command, reads)
    if args.config:
        unread = unread_of_file(args.config, reads)
        if unread:
            say(f"`strop {command}` does not read {', '.join(unread)} of {args.config}")


def refuse_unread_overrides(overrides: Sequence[str], command: str, reads: Reads) -> None:
    """Raise a UsageError for the first override that the command would ignore."""
    from strop.config.overrides import parse_override

    for text in overrides:
        override = parse_override(text)
        for key in _leaves(override.key, override.value):
            if not reads.covers(key):
                raise UsageError(f"{text!r} would do nothing: {_reason(key, command, reads)}")


def unread_of_file(source: str, reads: Reads) -> list[str]:
    """Sections and keys that a file or preset sets to other values than the defaults, and that are not read."""
    from strop.config import load_layers, to_flat_dict
    from strop.trainer.config import Config

    defaults = to_flat_dict(Config())
    values = load_layers(Config, source=source).values
    unread = [key for key, value in values.items() if not reads.covers(key) and value != defaults.get(key)]
    read = {_section(key) for key in defaults if reads.covers(key)}
    return sorted({key if _section(key) in read else _section(key) for key in unread})


def _section(key: str) -> str:
    return key.partition(".")[0]


def _reason(key: str, command: str, reads: Reads) -> str:
    for replaced, other in reads.instead.items():
        if _is_below(key, replaced):
            return f"`strop {command}` does not read {replaced}; set {other}"
    section = _section(key)
    if (replacement := _same_name(key, reads)) is not None:
        return f"`strop {command}` does not read {key}; set {replacement}"
    if reads.is_one_process and any(_is_below(key, rank_key) for rank_key in _OF_RANKS):
        return f"`strop {command}` is one process, so it does not read {key}; leave it out"
    rank_key = [read for read in reads.keys if read and _is_below(read, section)]
    if not rank_key or rank_key == [section]:
        return f"`strop {command}` does not read {key}; leave it out, or put it into a file of settings"
    return f"of {section}, `strop {command}` reads {', '.join(rank_key)} alone; leave it out"


def _same_name(key: str, reads: Reads) -> str | None:
    """The key that the command reads in place of one of a training: sft.optim.lr for actor.optim.lr."""
    from strop.config.schema import tree
    from strop.trainer.config import Config

    def common(other: str) -> int:
        pairs = zip(reversed(key.split(".")), reversed(other.split(".")), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    sections = [kind for kind in FINE_TUNING_SECTIONS if kind in reads.keys]
    keys_of_same_name = [
        full for full, entry in tree(Config).items() if _section(full) in sections and not entry.is_section
    ]
    best = max(keys_of_same_name, key=common, default=None)
    return best if best is not None and common(best) and reads.covers(best) else None


def _leaves(key: str, value: object) -> Iterator[str]:
    """The full keys that a value sets."""
    from strop.config.schema import current_key

    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(current_key(f"{key}.{name}"), below)
    else:
        yield key


def _is_below(key: str, section: str) -> bool:
    return not section or key == section or key.startswith(f"{section}.")
