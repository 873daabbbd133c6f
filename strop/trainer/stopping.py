"""Signals that ask a run to end: SIGTERM (a scheduler, `kill`), SIGHUP (a terminal that closes) and SIGINT (Ctrl-C).

The first one lets the step that runs come to its end, for a limited time, and a checkpoint is written there, so that
nothing is lost; outside of a step, after a Ctrl-C, or when the time is over, the run ends at once and goes on from its
last checkpoint. The second one ends the process as if nobody handled it.

Concurrency: handlers run in the main thread, between two instructions of whatever it does. A timer's thread sends the
signal once more when the time is over, so that a wait in the main thread ends too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
GRACE_S = 20.0
"""How long the end of a step is waited for: schedulers kill what still runs after 30 s."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end by a signal; the text says how to go on."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text or signal.Signals(number).name)
        self.number = number
        """The signal."""


class StopRequest:
    """Whether somebody has asked the run to end; without `listening`, nobody can."""

    def __init__(self) -> None:
        self.number = 0
        """The signal that came; 0 for none."""
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
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        self.check()

    @property
    def reason(self) -> str:
        """`Terminated: SIGTERM`; for the records."""
        return f"{Terminated.__name__}: {signal.Signals(self.number).name}"

    def settle(self) -> None:
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
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
        if not self._is_in_step or number == signal.SIGINT:
            raise Terminated(number)
        self._timer = threading.Timer(GRACE_S, self._insist, (threading.get_ident(), number))
        self._timer.daemon = True
        self._timer.start()

    def _insist(self, main: int, number: int) -> None:
        self._is_late = True
        signal.pthread_kill(main, number)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
