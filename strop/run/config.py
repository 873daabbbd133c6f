"""Settings of the run folder."""

from __future__ import annotations

from typing import Annotated, Literal

from strop.config.sections import section
from strop.utils.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@section("run")
class RunConfig:
    """Checkpoint interval, and retention on the disk."""

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
    """Checkpoints that also hold the policy as a Hugging Face folder; the others get one from `strop export`."""
    copy_to: str = ""
    """URL of a folder of a store (s3://bucket/runs): each checkpoint, with what a continuation needs, is copied into a
    folder there that is named like the run, while training goes on. `--resume URL` and `--from URL` read it."""
    async_save: bool = False
    """Write checkpoints in the background while training goes on."""
    grace_s: PositiveFloat = 20.0
    """Seconds that the step which runs has to come to its end, once a signal has asked the run to end. Schedulers kill
    what still runs after 30 s; with a warning of the scheduler (SIGUSR1) there is often more."""
    save_before: Annotated[NonNegativeFloat, "0 does not look"] = 0.0
    """Save and end this many seconds before the machine is taken away, at the end of the last step that fits before;
    0: do not look. When that is, one of the variables SLURM_JOB_END_TIME,
    MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP, SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP or
    STROP_MACHINE_ENDS_AT says, in seconds since 1970; where none does, the run says so and trains without."""
    max_restarts: Annotated[NonNegativeInt, "0 is never"] = 2
    """Automatic restarts of a run from its last checkpoint, with new processes, after a worker process died or did not
    answer; counted from the last checkpoint on. An error that a worker raises ends the run. One of several rollout
    workers apart that died is replaced without a restart, as often in one step."""
