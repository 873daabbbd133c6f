"""What a user sets about the run folder."""

from __future__ import annotations

from typing import Annotated, Literal

from strop.base.field_types import NonNegativeInt, PositiveInt
from strop.base.sections import section


@section("run")
class RunConfig:
    """How often a run is saved and how much of it stays on the disk."""

    save_every: Annotated[NonNegativeInt, "0 saves at the end only"] = 20
    """Steps between two checkpoints; 0 saves only at the end."""
    keep_last: Annotated[PositiveInt, "a run needs its newest checkpoint to continue"] = 2
    """Newest checkpoints that stay on the disk."""
    keep_best: Annotated[NonNegativeInt, "0 keeps none"] = 1
    """Checkpoints with the best validation score that stay beside the newest ones; 0 keeps none. A validation that is
    the best so far is saved at once, unless save_every is 0."""
    save_samples: bool = True
    """Write every trained sample, with tokens, log-probs and reward parts, to `samples/`."""

    hf_model: Literal["always", "last", "never"] = "always"
    """Which checkpoints also hold the policy as a Hugging Face folder; the others get one from `strop export`."""
    copy_to: str = ""
    """URL of a folder of a store (s3://bucket/runs): each checkpoint, with what a continuation needs, is copied into a
    folder there that is named like the run, while training goes on. `--resume URL` and `--from URL` read it."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on."""
