"""What a user sets about the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How often a run is saved and how much of it stays on the disk."""

    save_every: int = 20
    """Steps between two checkpoints; 0 saves only at the end."""
    keep_last: int = 2
    """Newest checkpoints that stay on the disk; at least 1."""
    keep_best: int = 1
    """Checkpoints with the best validation score that stay beside the newest ones; 0 keeps none."""
    save_samples: bool = True
    """Write every trained sample, with tokens, log-probs and reward parts, to `samples/`."""

    hf_model: Literal["always", "last", "never"] = "always"
    """Which checkpoints also hold the policy as a Hugging Face folder; the others get one from `strop export`."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on."""

    def __post_init__(self) -> None:
        if self.hf_model not in ("always", "last", "never"):
            raise ValueError(f"run.hf_model is {self.hf_model!r}; use always, last or never")
        if self.save_every < 0:
            raise ValueError(
                f"run.save_every is {self.save_every}, but it counts steps: use 20 for a checkpoint every "
                f"20 steps, or 0 for one at the end."
            )
        if self.keep_last < 1:
            raise ValueError(
                f"run.keep_last is {self.keep_last}, but a run needs its newest checkpoint to continue: "
                f"use 1 or more."
            )
        if self.keep_best < 0:
            raise ValueError(
                f"run.keep_best is {self.keep_best}, but it counts checkpoints: use 0 to keep none by score."
            )
