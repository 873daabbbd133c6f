"""A training to its end: the loop, begun again from its last checkpoint where processes of the run died."""

from __future__ import annotations

from strop.controller import CallTimeout, PlacesNotFree, WorkerFailed
from strop.run import Checkpoint, RunFolder
from strop.trainer.callbacks import Callbacks, Reporter, StopRequest
from strop.trainer.config import Config
from strop.trainer.early_stopping import TrainResult
from strop.trainer.environment import environment_of
from strop.trainer.fault_tolerance.elastic import MoreMachines
from strop.trainer.fault_tolerance.healing import Recovery
from strop.trainer.fault_tolerance.signals import SignalRequest
from strop.trainer.loop import Trainer


def train(
    config: Config,
    run: RunFolder,
    *,
    checkpoint: Checkpoint | None = None,
    say: Reporter,
    force: bool = False,
    stop: StopRequest | None = None,
    callbacks: Callbacks | None = None,
) -> TrainResult:
    """Run a training to its end, with this process as its controller.

    Args:
        config: the resolved configuration.
        run: a fresh run folder, or one rolled back to `checkpoint`.
        checkpoint: where to continue.
        say: prints lines for the person who watches.
        force: start also where the preflight says that nothing would be learned.
        stop: request of the caller or of a signal to end the run.
        callbacks: called after steps and checkpoints.

    Raises:
        ValueError: the preflight says that nothing would be learned, without `force`.
        Terminated: the process was asked to end by SIGTERM or SIGHUP; what it had is saved.
        WorkerFailed, CallTimeout: workers raised an error, or died and did so again (run.max_restarts).
    """
    stop = stop or SignalRequest()
    recovery = Recovery(config, run, step=0 if checkpoint is None else checkpoint.step, say=say)
    with environment_of(config.resources), stop.listening():
        while True:
            trainer = Trainer(
                config, run, checkpoint=checkpoint, say=say, force=force, stop=stop, callbacks=callbacks
            )
            try:
                return trainer.fit()
            except MoreMachines as reason:
                checkpoint = recovery.take_more(reason)
            except PlacesNotFree as error:
                checkpoint = recovery.place_again(error)
            except (WorkerFailed, CallTimeout) as error:
                if stop.number or not (trainer.is_started or recovery.is_recovering):
                    raise
                checkpoint = recovery.roll_back(error)
