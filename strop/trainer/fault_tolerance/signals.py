"""Signals that ask a run to end: SIGTERM (a scheduler, `kill`), SIGHUP (a terminal that closes), SIGINT (Ctrl-C),
SIGUSR1 (a scheduler's warning, such as `sbatch --signal=B:USR1@300`), and a machine that is about to be taken away.

The first signal lets the step that runs come to its end, for a limited time, and a checkpoint is written there, so that
nothing is lost; outside of a step, or when the time is over, the run ends at once and goes on from its last checkpoint.
The second one ends the process as if nobody handled it.

Concurrency: handlers run in the main thread, between two instructions of whatever it does. A timer's thread sends the
signal once more when the time is over, so that a wait in the main thread ends too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from strop.run import RunConfig, RunFolder
from strop.trainer.callbacks import Reporter, StopRequest
from strop.trainer.fault_tolerance.machine import MachineEnd

WARNING = signal.SIGUSR1
"""Signal of a scheduler that will end the job, and wants to start it again."""
NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, WARNING)


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        """The signal."""


class SignalRequest(StopRequest):
    """Stop request by a signal, or before the machine is taken away; signals count within `listening`."""

    def __init__(self) -> None:
        self._grace_s = RunConfig.grace_s
        self._machine: MachineEnd | None = None
        self._cause = ""
        self._started = 0.0
        self._is_in_step = False
        self._is_late = False
        self._timer: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while this lasts; in the main thread, others leave them alone.

        Raises:
            Terminated: after a request, whatever else is raised; an error that came later is its cause.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in NUMBERS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # `nohup` wants a run to outlive its terminal
                signal.signal(number, self._handle)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if not self.number or isinstance(error, Terminated):
                raise
            # An error while the run ended; or what Ray makes of a Terminated that ends one of its waits.
            raise Terminated(self.number) from (error if isinstance(error, Exception) else None)
        finally:
            self._end_timer()
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step with its checkpoint: what a request waits for.

        Raises:
            Terminated: at the end, where a request has come meanwhile; or within, when its time is over.
        """
        self.check()  # what a handler raises is lost where Python runs a destructor
        self._is_in_step, self._started = True, time.monotonic()
        try:
            yield
        finally:
            self._is_in_step = False
        self.check()

    @property
    def is_in_step(self) -> bool:
        """True while a request waits for a step."""
        return self._is_in_step

    @property
    def reason(self) -> str:  # type: ignore[override]  # nobody sets it
        """`Terminated: SIGTERM`; for the records."""
        return f"{Terminated.__name__}: {self._cause or signal.Signals(self.number).name}"

    def start(self, settings: RunConfig) -> None:
        """Take run.grace_s and run.save_before.

        Raises:
            ValueError: as `MachineEnd`.
        """
        self._grace_s = settings.grace_s
        self._machine = MachineEnd(settings) if settings.save_before else None

    def warn(self, run: RunFolder, step: int, say: Reporter) -> None:
        """Warn that run.save_before has no effect, where nothing says when the machine ends."""
        if self._machine is not None:
            self._machine.warn(run, step, say)

    def check_time(self, say: Reporter) -> None:
        """Make a request, as of a scheduler's warning, where no other step fits before the machine is taken away."""
        if self.number or self._machine is None:
            return
        self._cause = self._machine.passed(time.monotonic() - self._started)
        if self._cause:
            self.number = WARNING
            say(f"the run is saved and ends: {self._cause}")

    def finish_step(self) -> None:
        """The step itself is done: a request waits for the checkpoint now, however long that takes."""
        self._end_timer()

    def check(self) -> None:
        """Raise Terminated where a request has come."""
        if self.number:
            raise Terminated(self.number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._is_late:  # sent by the timer
            self._is_late = False
            if self._timer is not None:
                raise Terminated(self.number)
            return
        if self.number:  # the second one
            _write(f"\n{signal.Signals(number).name} again: the run ends at once, this step is not saved\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
        if not self._is_in_step:
            raise Terminated(number)
        self._announce(number)
        self._timer = threading.Timer(self._grace_s, self._insist, (threading.get_ident(), number))
        self._timer.daemon = True
        self._timer.start()

    def _announce(self, number: int) -> None:
        """Print what the process waits for."""
        _write(
            f"\n{signal.Signals(number).name}: this step comes to its end and is saved first, which may take "
            f"{self._grace_s:g} s; the same again ends the run at once\n"
        )

    def _insist(self, main: int, number: int) -> None:
        self._is_late = True
        signal.pthread_kill(main, number)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _write(text: str) -> None:
    """Print at once, not through a stream, which the main thread may be in the middle of."""
    with contextlib.suppress(OSError):  # a terminal that closed
        os.write(2, text.encode())
