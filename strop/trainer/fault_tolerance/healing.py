"""Recovery from worker processes that died, or ran out of memory together: the run goes on by itself with new ones,
from its last checkpoint.

Processes that train hold weights and optimizer in pieces, so what one of them had dies with it, and the others wait for
it. All of them are ended and made again, in this job. What was generated for prompts of no step yet is in the
checkpoint (`in_play.jsonl`) and is gone on with.
"""

from __future__ import annotations

from strop.controller import CallTimeout, PlacesNotFree, WorkerFailed
from strop.run import Checkpoint, RunFolder
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.fault_tolerance.elastic import MoreMachines
from strop.trainer.resume import Continuation
from strop.trainer.resume import roll_back as roll_back_run
from strop.trainer.token_budgets import record_budget, smaller_budget


class Recovery:
    """Recovery of a run from its last checkpoint, limited by run.max_restarts attempts without progress."""

    def __init__(self, config: Config, run: RunFolder, *, step: int, say: Reporter) -> None:
        """Args:
        config, run: of the run.
        step: that it begins or goes on at.
        say: takes lines for the person who watches.
        """
        self._config, self._run, self._say = config, run, say
        self._most = config.run.max_restarts
        self._step = step
        self._num_in_a_row = 0
        self._num_lowered = 0
        """Times in a row that it began again with fewer tokens, which run.max_restarts does not limit."""

    @property
    def is_recovering(self) -> bool:
        """The run has begun again and not come further yet."""
        return self._num_in_a_row + self._num_lowered > 0

    def roll_back(self, error: WorkerFailed | CallTimeout) -> Checkpoint | None:
        """The run, rolled back to its last valid checkpoint, which is given; None: to its beginning.

        Processes of one model that ran out of memory go on with a smaller token budget.

        Raises:
            WorkerFailed, CallTimeout: this error, where it would only happen again: a worker raised it, or the run has
                begun again run.max_restarts times since its last checkpoint.
            RunError: no checkpoint is valid.
        """
        newest = max(self._run.checkpoints.steps(), default=0)
        if newest > self._step:
            self._step, self._num_in_a_row, self._num_lowered = newest, 0, 0
        if isinstance(error, WorkerFailed):
            lowered = smaller_budget(self._config, error)
            if lowered is not None:
                return self._lower(*lowered, error)
        if not _has_died(error) or self._num_in_a_row >= self._most:
            raise error
        self._num_in_a_row += 1
        cause = str(error).partition("\n")[0]
        count = f"{self._num_in_a_row} of run.max_restarts={self._most}"
        return self._begin_again(cause, f"the workers are made again ({count})")

    def _lower(self, role: str, held: int, tokens: int | None, error: WorkerFailed) -> Checkpoint | None:
        """The run at its last checkpoint, with this token budget of a role."""
        self._num_lowered += 1
        cause = str(error).partition("\n")[0]
        how = (
            f"the workers are made again, with {role}.engine.max_tokens_per_device={held}, which the next run may "
            f"begin with if no row has more tokens"
        )
        checkpoint = self._begin_again(cause, how)
        step = 0 if checkpoint is None else checkpoint.step
        record_budget(self._run, step, role, self._config.engines[role], held, tokens=tokens, reason=cause)
        return checkpoint

    def place_again(self, error: PlacesNotFree) -> Checkpoint | None:
        """The run at the checkpoint that it could not begin at, for the machines that are left.

        Raises:
            PlacesNotFree: this error, where the run has begun again run.max_restarts times since its last checkpoint,
                or needs all of its machines.
        """
        is_limited = self._num_in_a_row >= self._most
        if not (self._config.resources.min_nodes and self.is_recovering) or is_limited:
            raise error
        self._num_in_a_row += 1
        return self._begin_again(str(error).partition(";")[0], "the machines are counted again")

    def take_more(self, reason: MoreMachines) -> Checkpoint | None:
        """The run at the checkpoint that it has just written, for more machines; given as by `roll_back`."""
        # Where their places are not free yet, `place_again` counts them anew.
        self._num_in_a_row = max(self._num_in_a_row, 1)
        return self._begin_again(str(reason), "the workers are made again on all of them")

    def _begin_again(self, cause: str, how: str) -> Checkpoint | None:
        self._say(f"{cause}; {how}")
        checkpoint, lines = roll_back_run(self._run, Continuation(config=self._config))
        step = 0 if checkpoint is None else checkpoint.step
        self._run.events.append(
            "restarted", step, fsync=True, cause=cause, number=self._num_in_a_row + self._num_lowered
        )
        for line in lines:
            self._say(line)
        return checkpoint


def _has_died(error: WorkerFailed | CallTimeout) -> bool:
    """A process is gone or does not answer; it did not raise an error of its own."""
    return isinstance(error, CallTimeout) or error.has_died
