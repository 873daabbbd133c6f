"""The parent's handle to one worker process: its pipes, the outcomes of its calls, and its exit status.

Used in the event loop of the pool's own thread (worker_pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.stdout_capture import LineStream, OutputLog
from strop.rewards.wire import outcome_of, outcomes_of
from strop.utils.json_lines import decode, encode

REAP_S = 1.0
"""Time that a process which closed its pipes has to exit before it is killed, and its forked copies after that, in
seconds."""
_CHECK_S = 0.5
"""Interval of polling the process, should a pipe not tell that it is gone, in seconds."""
_DUMP_S = 1.0
"""Time a hanging worker gets at most to write where it hangs, in seconds."""
_CHUNK_BYTES, _MAX_LINE_BYTES = 1 << 18, 16 << 20
_BOOT = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import strop.rewards.worker_main as c;c.main({},{},{})"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)\n', re.MULTILINE)


class WorkerProcess:
    """One process: `connect`, `load`, then `send` and as many times `score`, and `end`."""

    def __init__(self, config: RewardConfig, paths: Collection[str], printed: OutputLog) -> None:
        """Start it; OSError when the system refuses.

        Args:
            config: with the limits.
            paths: of the files that the functions are in.
            printed: gets what it writes to standard output and standard error.
        """
        self._config, self._paths = config, paths
        self.since: float | None = None
        """When it began to score the oldest of its calls, time away from it left out; None: it has not."""
        self.grading: int | None = None
        """Number of the comparison within that call that is under way."""
        self.is_loaded = self.runs_coroutines = False
        self.gave_back = False
        """Calls that it had together are scored again, each alone: what ended it is one of them."""
        self.calls_done = 0
        self._results = asyncio.StreamReader(limit=_CHUNK_BYTES)
        self._lines, self._rest = deque[bytes](), b""  # of what was read from it
        self._stdout = LineStream(partial(printed.take, is_shown=True))
        self._stderr = LineStream(partial(printed.take, is_shown=False))
        with contextlib.ExitStack() as on_failure:
            commands, results, life, stderr, stdout = (self._pipe(on_failure) for _ in range(5))
            child_fds = (commands[0], results[1], life[0])
            search_path = encode(list(sys.path)).decode().strip()
            # One thread per worker: several of them run beside the training process.
            environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT.format(*child_fds), search_path],
                stdin=subprocess.DEVNULL, stdout=stdout[1], stderr=stderr[1], pass_fds=child_fds,
                start_new_session=True, env=environment,
            )  # fmt: skip
            on_failure.pop_all()
        for fd in (*child_fds, stderr[1], stdout[1]):
            os.close(fd)
        self._commands_pipe = os.fdopen(commands[1], "wb", buffering=0)
        self._read_pipes = [os.fdopen(ends[0], "rb", buffering=0) for ends in (results, stderr, stdout)]
        self._life_line = os.fdopen(life[1], "wb", buffering=0)
        self._transports: list[Any] = []
        self._watch: asyncio.TimerHandle | None = None

    @staticmethod
    def _pipe(on_failure: contextlib.ExitStack) -> tuple[int, int]:
        ends = os.pipe()
        for fd in ends:
            on_failure.callback(os.close, fd)
        return ends

    async def connect(self) -> None:
        """Connect to its pipes."""
        loop = asyncio.get_running_loop()
        self._commands, _ = await loop.connect_write_pipe(asyncio.Protocol, self._commands_pipe)
        self._transports.append(self._commands)
        protocols = (asyncio.StreamReaderProtocol(self._results), self._stderr, self._stdout)
        for protocol, pipe in zip(protocols, self._read_pipes, strict=True):
            self._transports.append((await loop.connect_read_pipe(partial(_same, protocol), pipe))[0])
        self._poll()

    def _poll(self) -> None:
        """Copies that it forked may hold the other ends of its pipes: so they do not always tell that it is gone."""
        if self._process.poll() is None:
            self._watch = asyncio.get_running_loop().call_later(_CHECK_S, self._poll)
        else:
            self._transports[1].close()

    async def load(self, setup: bytes) -> tuple[bool, bool]:
        """Have it load the functions; whether one of them wants the conversation as such (`call_of`), and whether one
        takes all answers to a prompt at once.

        Raises:
            RewardError: they cannot be used; the sentence says why.
            TimeoutError, EOFError, ValueError: as `score`.
        """
        self.send(setup)
        match await self.message(asyncio.get_running_loop().time() + self._config.start_timeout_s):
            case ["ready", bool(wants_conversation), bool(takes_groups), bool(coroutines)]:
                self.is_loaded, self.runs_coroutines = True, coroutines
                return wants_conversation, takes_groups
            case ["failed", str(sentence)]:
                raise RewardError(sentence)
            case message:
                raise ValueError(f"no first message of a reward worker: {str(message)[:200]}")

    def send(self, lines: bytes) -> None:
        """Hand over calls, a line each."""
        self._commands.write(lines)

    async def score(self, num_answers: int = 1) -> Outcome | list[Outcome]:
        """Outcome of the oldest call that it was sent; for one with all answers to a prompt, that of each, unless it
        failed as a whole.

        Args:
            num_answers: in the call, each of which adds to its time.

        Raises:
            TimeoutError: it takes too long to get ready (`since` is None then), or to score.
            EOFError: the process has ended.
            ValueError: it said something else than a worker of ours does.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.start_timeout_s  # it may import what a scorer needs
        away_since = left_s = 0.0
        is_away = False
        while True:
            message = await self.message(until)
            now = clock()
            match message:
                case ["start"] if self.since is None:
                    self.since, self.grading = now, None
                    until = now + self._config.timeout_s * num_answers
                case ["away", float() | int() as at_most_s]:
                    if self.since is not None:  # else it gets ready, which has a deadline of its own
                        if not is_away:
                            is_away, away_since, left_s = True, now, until - now
                        until = max(until, now + at_most_s + left_s)
                case ["back"]:
                    if self.since is not None and is_away:
                        self.since += now - away_since
                        is_away, until = False, now + left_s
                case ["grading", (int() | None) as comparison]:
                    self.grading = comparison
                case ["done" | "all", *_] if self.since is not None:
                    result = outcome_of(message) if message[0] == "done" else outcomes_of(message)
                    self.since = None
                    self.calls_done += 1
                    return result
                case _:
                    raise ValueError(f"no message of a reward worker: {str(message)[:200]}")

    async def message(self, until: float | None = None) -> list[Any]:
        """Its next message.

        Args:
            until: time of the event loop, at which TimeoutError is raised; None: there is no limit.

        Raises:
            EOFError: the process has ended.
        """
        while not self._lines:
            try:
                async with asyncio.timeout_at(until):
                    data = await self._results.read(_CHUNK_BYTES)
            except TimeoutError:
                async with asyncio.timeout(0):  # what has come by then counts
                    data = await self._results.read(_CHUNK_BYTES)
            if not data or len(self._rest) > _MAX_LINE_BYTES:
                raise EOFError
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(lines)
        return decode(self._lines.popleft())

    def messages_at_hand(self) -> list[list[Any]]:
        """Messages that were read together with one before."""
        lines, self._lines = self._lines, deque()
        return list(map(decode, lines))

    def has_ended(self) -> bool:
        """True if it is gone, or is about to be."""
        return self._results.at_eof() or self._process.poll() is not None

    async def ask_location(self) -> str:
        """Location of its present work, from a new stack dump."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        await _until(lambda: self._own_frame() is not None, _DUMP_S)
        return self.location()

    def location(self) -> str:
        """` at reward.py:17 in compute_score`, from the last stack dump; empty when there is none."""
        frame = self._own_frame() or next(iter(self._frames()), None)
        return "" if frame is None else f" at {Path(frame[0]).name}:{frame[1]} in {frame[2]}"

    def _own_frame(self) -> tuple[str, str, str] | None:
        """The innermost frame in the user's files."""
        return next((frame for frame in self._frames() if frame[0] in self._paths), None)

    def _frames(self) -> list[tuple[str, str, str]]:
        """File, line and function of the last stack dump, the innermost first."""
        _, marker, dump = self._stderr.tail.decode(errors="replace").rpartition("(most recent call first):")
        return _FRAME.findall(dump) if marker else []

    async def end(self, *, wait_s: float) -> int:
        """Its exit status, after at most wait_s; then it and the copies that it forked are gone, and all it wrote is
        read. A second call only gives the status."""
        for commands in self._transports[:1]:
            commands.close()  # when it has nothing to do, it exits
        await _until(lambda: self._process.poll() is not None, wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        if not self._life_line.closed:
            # Copies hold its end of the life line, and a killed one may take a while to give its memory back.
            without_reader = select.poll()
            without_reader.register(self._life_line, 0)  # POLLERR once nobody can read
            await _until(lambda: bool(without_reader.poll(0)), REAP_S)
            outputs = (self._stdout, self._stderr) if self._watch else ()
            await _until(lambda: all(output.ended.is_set() for output in outputs), REAP_S)
        if self._watch is not None:
            self._watch.cancel()
        for transport in self._transports:
            transport.close()
        for pipe in (self._life_line, self._commands_pipe, *self._read_pipes):
            pipe.close()
        return status


def _same(protocol: asyncio.Protocol) -> asyncio.Protocol:
    return protocol


async def _until(is_true: Callable[[], bool], wait_s: float) -> None:
    """Wait for it, and no longer than so many seconds."""
    until = asyncio.get_running_loop().time() + wait_s
    while not is_true() and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.005)


def death_sentence(status: int) -> str:
    """`died with SIGSEGV` or `exited with status 3`."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    hint = " (often the system's out-of-memory killer)" if -status == signal.SIGKILL else ""
    return f"died with {name}{hint}"
