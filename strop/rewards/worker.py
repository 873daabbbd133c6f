"""The parent's handle to one worker process: its pipes, the calls sent to it, and how it ended.

Used from the supervisor's thread only. Nothing here waits, except `reap`, for at most REAP_S at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from strop.rewards.calls import Call
from strop.rewards.printed import Lines, Printed
from strop.rewards.wire import encode

REAP_S = 1.0
"""How long a process that closed its pipes may take to exit before it is killed, and what it has forked to be gone
after that, in seconds."""
_READ_BYTES = 1 << 18
_MAX_LINE_BYTES = 16 << 20
_TAIL_BYTES = 8192
_MAX_READS = 64
_BOOT = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import strop.rewards.child as c;c.main({},{},{})"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every worker of a pool is started with."""

    functions: Sequence[Mapping[str, Any]]
    """Path, source, name, kwargs, manager, tokenizer, key and weight of each function. The source is the text of the
    file, read once, so that a replaced worker runs what the first one ran."""
    max_memory_gib: float | None
    timeout_s: float
    """Deadline of one sample, in seconds."""
    start_timeout_s: float
    """Of loading the functions, in seconds."""
    sections: Mapping[str, Mapping[str, Any]]
    """Sections that guests want to see in the process, as plain data by full key."""

    def first_line(self) -> bytes:
        limit = self.max_memory_gib
        return encode([{
            "functions": list(self.functions), "sections": self.sections, "timeout_s": self.timeout_s,
            "max_memory_bytes": None if limit is None else int(limit * 2**30),
            "memory_limit": f"; a worker may allocate {limit:g} GiB (reward.max_memory_gib)" if limit else "",
        }])  # fmt: skip


class WorkerProcess:
    """One process, from its start to its death."""

    def __init__(self, launch: Launch, printed: Printed) -> None:
        """Start it; OSError when the system refuses.

        Args:
            launch: what it is started with.
            printed: gets what it writes to standard output and standard error.
        """
        self._launch = launch
        self._printed = Lines(partial(printed.take, is_shown=True))
        self._complained = Lines(partial(printed.take, is_shown=False))
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.style = ""
        self.sent: deque[Call] = deque()
        """Calls handed over and not answered, oldest first."""
        self.current: int | None = None
        """Number of the call it has started."""
        self.grading: int | None = None
        """Number of the comparison within the current call that is under way."""
        self.since = time.monotonic()
        """When it started the current call; else when it last made progress."""
        self._away_since: float | None = None
        """Since when the current call is where other limits hold (waiting.py)."""
        self._away_until = 0.0
        """When it will have come back from there at the latest."""
        self.kill_at: float | None = None
        """Set once it was asked to show where it hangs."""
        self.calls_done = 0
        self._to_send = bytearray(launch.first_line())
        self._received = bytearray()
        self._tail = b""
        self._paths = {str(function["path"]) for function in launch.functions} - {""}
        with contextlib.ExitStack() as on_failure:
            commands, results, life, output, said = (self._pipe(on_failure) for _ in range(5))
            child_fds = (commands[0], results[1], life[0])
            self.commands_fd, self.results_fd, self._life_fd, self.output_fd, self.printed_fd = (
                commands[1], results[0], life[1], output[0], said[0],
            )  # fmt: skip
            search_path = encode(list(sys.path)).decode().strip()
            # One thread per worker: several of them run beside the training process.
            environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT.format(*child_fds), search_path],
                stdin=subprocess.DEVNULL, stdout=said[1], stderr=output[1], pass_fds=child_fds,
                start_new_session=True, env=environment,
            )  # fmt: skip
            on_failure.pop_all()
        for fd in (*child_fds, output[1], said[1]):
            os.close(fd)
        for fd in (self.commands_fd, self.results_fd, self.output_fd, self.printed_fd):
            os.set_blocking(fd, False)

    @staticmethod
    def _pipe(on_failure: contextlib.ExitStack) -> tuple[int, int]:
        ends = os.pipe()
        for fd in ends:
            on_failure.callback(os.close, fd)
        return ends

    @property
    def has_output_waiting(self) -> bool:
        """True when bytes wait for the pipe."""
        return bool(self._to_send)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, call: Call) -> None:
        """Hand over one call; it leaves with the next `push`."""
        if not self.sent:
            self.since = time.monotonic()
        self.sent.append(call)
        self._to_send += call.line

    def push(self) -> bool:
        """Write what the pipe takes now; True when something is left."""
        try:
            while self._to_send:
                del self._to_send[: os.write(self.commands_fd, self._to_send)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it died; the end of its results pipe says so too
            self._to_send.clear()
        return bool(self._to_send)

    def note(self, message: list[object]) -> bool:
        """Take in what it says about the call that it works on; False for a message about anything else."""
        now = time.monotonic()
        match message:
            case ["start", int(number)] if self.sent and self.sent[0].number == number:
                self.current, self.since, self.grading = number, now, None
                self._away_since, self._away_until = None, 0.0
            case ["away", int(number), float() | int() as at_most_s]:
                if self.current == number:  # else it prepares to score, which has a deadline of its own
                    self._away_since = self._away_since or now
                    self._away_until = max(self._away_until, now + at_most_s)
            case ["back", int(number)]:
                if self.current == number and self._away_since is not None:
                    self.since += now - self._away_since
                    self._away_since, self._away_until = None, 0.0
            case ["grading", int(number), (int() | None) as comparison] if self.current == number:
                self.grading = comparison
            case _:
                return False
        return True

    def finish(self) -> Call:
        """It has an outcome for its oldest call, which is returned."""
        self.current, self.kill_at, self.grading, self.since = None, None, None, time.monotonic()
        self.calls_done += 1
        return self.sent.popleft()

    @property
    def deadline(self) -> float | None:
        """When something must have happened; None when it has nothing to do."""
        if self.kill_at is not None:
            return self.kill_at
        if self.current is not None:
            away_s = 0.0 if self._away_since is None else self._away_until - self._away_since
            return self.since + self._launch.timeout_s + away_s
        if self.state == "loading" or self.sent:  # importing the reward file, or what a scorer needs
            return self.since + self._launch.start_timeout_s
        return None

    def pull(self) -> tuple[list[bytes], bool]:
        """Complete lines that have arrived, and whether the pipe has ended."""
        ended = False
        try:
            while data := os.read(self.results_fd, _READ_BYTES):
                self._received += data
                if len(data) < _READ_BYTES:
                    break
            else:
                ended = True
        except BlockingIOError:
            pass
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        return [bytes(line) for line in lines], ended or len(rest) > _MAX_LINE_BYTES

    def read_printed(self) -> bool:
        """Take what it wrote to standard output; False when the pipe has ended."""
        try:
            data = os.read(self.printed_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        self._printed.feed(data)
        return bool(data)

    def read_output(self) -> bool:
        """Take what it wrote to standard error, keep the end of it; False when the pipe has ended."""
        try:
            return self._read_output_once()
        except BlockingIOError:
            return True

    def _read_output_once(self) -> bool:
        data = os.read(self.output_fd, _READ_BYTES)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._complained.feed(data)
        return bool(data)

    def ask_where(self, kill_at: float) -> None:
        """Ask for a stack dump on its error output; it will be killed at that time."""
        self.kill_at = kill_at
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def where(self) -> str:
        """` at reward.py:17 in compute_score`, from the last stack dump; empty when there is none."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_READS):  # it may print for ever
                if not self._read_output_once():
                    break
        _, found, dump = self._tail.decode(errors="replace").rpartition("(most recent call first):")
        frames = _FRAME.findall(dump) if found else []
        own = next((frame for frame in frames if frame[0] in self._paths), None)
        chosen = own or (frames[0] if frames else None)
        return f" at {Path(chosen[0]).name}:{chosen[1]} in {chosen[2]}" if chosen else ""

    def reap(self, *, wait_s: float) -> int:
        """Its exit status, after at most wait_s; then it and the copies that it forked are gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        # Copies hold its end of the life line, and a killed one may take a while to give its memory back.
        ended = select.poll()
        ended.register(self._life_fd, 0)  # POLLERR once nobody can read
        ended.poll(REAP_S * 1000)
        return status

    def is_running(self) -> bool:
        return self._process.poll() is None

    def end_input(self) -> None:
        """Close its command pipe: it finishes what it has and exits."""
        if self.commands_fd >= 0:
            os.close(self.commands_fd)
            self.commands_fd = -1

    def release(self) -> None:
        """Close every pipe of a process that is gone, once its last words are read."""
        self.state = "dead"
        self.end_input()
        for read in (self.read_printed, self.read_output):
            for _ in range(_MAX_READS):
                if not read():
                    break
        self._printed.end()
        self._complained.end()
        for fd in (self.results_fd, self.output_fd, self.printed_fd, self._life_fd):
            os.close(fd)


def death_sentence(status: int) -> str:
    """`died with SIGSEGV` or `exited with status 3`."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    hint = " (often the system's out-of-memory killer)" if -status == signal.SIGKILL else ""
    return f"died with {name}{hint}"
