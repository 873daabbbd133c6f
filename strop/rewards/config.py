"""Which reward function scores the samples, and within which limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    path: str = ""
    """Python file with the reward function, relative to the current directory. Empty: the scorer that
    belongs to the row's `data_source`."""
    name: str = "compute_score"
    """Name of the function in that file."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments for the function, the same for every sample."""
    weight: float = 1.0
    """What the function's score is multiplied with in training. 0 leaves the reward to a reward model; pass
    rates are still those of the function."""
    overlong_buffer: int = 0
    """DAPO's soft penalty on long responses: it begins this many tokens below data.max_response_tokens; 0: none."""
    overlong_penalty: float = 1.0
    """The full penalty, at the limit, in reward units."""
    num_workers: int = 2
    """Processes that score at the same time."""
    timeout_s: float = 10.0
    """Wall-clock limit for scoring one sample, in seconds. The process that exceeds it is killed."""
    start_timeout_s: float = 120.0
    """Wall-clock limit for loading the reward file with all its imports, in seconds."""
    max_memory_gib: float | None = 4.0
    """Memory one worker may allocate, in GiB; a function that asks for more gets a MemoryError. null: no
    limit."""
    on_error: Literal["drop", "zero"] = "drop"
    """What becomes of a sample that could not be scored: left out of training, or scored 0."""
    max_failed_share: float = 0.2
    """Share of a step's samples that may fail to be scored; above it the run stops."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(
                f"reward.weight is {self.weight}; use a finite number, 0 to leave the function out"
            )
        if self.overlong_buffer < 0:
            raise ValueError(f"reward.overlong_buffer is {self.overlong_buffer} tokens; use 0 for no penalty")
        if not (math.isfinite(self.overlong_penalty) and self.overlong_penalty >= 0):
            raise ValueError(
                f"reward.overlong_penalty is {self.overlong_penalty}, but it is taken off the reward: use a finite "
                f"number of at least 0"
            )
        if self.num_workers < 1:
            raise ValueError(
                f"reward.num_workers is {self.num_workers}, but scoring needs a process: use at least 1"
            )
        for key, seconds in (("timeout_s", self.timeout_s), ("start_timeout_s", self.start_timeout_s)):
            if not seconds > 0:
                raise ValueError(
                    f"reward.{key} is {seconds}, but a time limit is a number of seconds above 0"
                )
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ValueError(
                f"reward.max_memory_gib is {self.max_memory_gib}, but a limit is above 0; use null for none"
            )
        if not 0.0 <= self.max_failed_share <= 1.0:
            raise ValueError(
                f"reward.max_failed_share is {self.max_failed_share}, but a share lies between 0 and 1: use "
                f"0.2 for 20 %"
            )
        if not self.name.isidentifier():
            raise ValueError(f"reward.name is {self.name!r}, which cannot be the name of a Python function")
        if not self.path and self.name != "compute_score":
            raise ValueError(
                f"reward.name is {self.name!r}, but reward.path is empty: set reward.path to the file that "
                f"defines it, or leave reward.name out"
            )
