"""What a user sets about the clock by which samples end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.config import Config


def asked(config: Config) -> str:
    """The setting that asks for a clock of its own; empty where none does."""
    clock = config.trainer
    given = {
        "trainer.clock": clock.clock == "virtual",
        "trainer.clock_lengths": clock.clock_lengths,
        "trainer.clock_latencies": clock.clock_latencies,
    }
    return next((key for key, value in given.items() if value), "")
