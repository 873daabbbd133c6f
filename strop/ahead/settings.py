"""What a user sets about the clock by which samples end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strop.base.sections import section_of

if TYPE_CHECKING:
    from strop.trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class ClockSettings:
    """Settings of the section trainer."""

    clock: Literal["wall", "virtual"] = "wall"
    """What decides which samples end first, where generation is ahead of training (rollout.max_staleness). wall: the
    time they take. virtual: the steps of the engine, in which scoring and tools take no time; the run then follows from
    its seed, to the bit. For runs in one process with the native engine. With rollout.max_staleness=0 every step waits
    for all of its own samples, so that both give the same ones."""
    clock_lengths: str = ""
    """With clock=virtual, how many tokens an answer takes the time of where that is more than it has:
    lognormal(MEDIAN, SIGMA), or a file with one number per line. Its tokens stay what they are. Empty: its own."""
    clock_latencies: str = ""
    """With clock=virtual, how many engine steps lie between the end of an answer and its score, in the same form.
    Empty: none."""


def asked(config: Config) -> str:
    """The setting that asks for a clock of its own; empty where none does."""
    clock = section_of(config.trainer, ClockSettings)
    given = {
        "trainer.clock": clock.clock == "virtual",
        "trainer.clock_lengths": clock.clock_lengths,
        "trainer.clock_latencies": clock.clock_latencies,
    }
    return next((key for key, value in given.items() if value), "")
