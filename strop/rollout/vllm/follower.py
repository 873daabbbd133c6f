"""The worker on a further node of an engine that spans several: it starts vLLM's part there, and hands it weights.

The leader, a rollout worker on the first node, connects for each engine that it makes, and the part lasts as long as
the connection: it ends with the leader, however that ends, and the leader hears at once when it ends by itself.
Lines of JSON go over the connection, behind the proof of the run's secret (auth_listener):

    leader    {engine_args, env, log}: start the part
    follower  {started: pid}, or {error} where this node lacks something
    leader    {bucket: n} and n bytes, for the workers of this node
    follower  {path} of the memory that has them
    leader    {done}: they have read it
    follower  {ended}, and why, at any time

Concurrency: a thread for each connection, and one that waits for the end of the part.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from strop.controller.auth_listener import AuthListener, new_secret
from strop.controller.worker import Follower, FollowerAddress
from strop.rollout.vllm.config import VllmConfig
from strop.rollout.vllm.environment import vllm_python
from strop.rollout.vllm.process import last_error, launch
from strop.utils.network_interfaces import keep_to_interface

PURPOSE = "part of a vLLM engine"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A machine that is gone without a word is noticed within half a minute."""
_UNREAD_MS = 30_000
"""The same, while something is sent to it."""


class VllmFollower(Follower):
    """Holds the devices of one node for an engine of another node's rollout worker."""

    def __init__(self, config: VllmConfig) -> None:
        """Listen for the leader on the address of this node.

        Args:
            config: rollout.vllm; its environment is looked for on this node.
        """
        super().__init__()
        self._config = config
        secret = new_secret()
        host = self.placement.node or "127.0.0.1"
        keep_to_interface(host)
        self._listener = AuthListener(host, secret, purpose=PURPOSE, welcome=self._serve)
        self._address = FollowerAddress(host=host, port=self._listener.port, secret=secret)

    def address(self) -> FollowerAddress:
        """Address for the leader."""
        return self._address

    def close(self) -> None:
        """Stop listening. A part that runs ends with its connection, or with this process."""
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        part = _Part(connection, self._config, host=self._address.host)
        threading.Thread(target=part.serve, name="strop: part of vLLM", daemon=True).start()


class _Part:
    """vLLM's workers on this node, for one engine."""

    def __init__(self, connection: socket.socket, config: VllmConfig, *, host: str) -> None:
        self._connection, self._config, self._host = connection, config, host
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        end_when_silent(connection)

    def serve(self) -> None:
        """Obey until the connection or the part ends; then neither is left."""
        # An OSError is the end of the leader, or of the part.
        with contextlib.suppress(OSError), self._connection, self._connection.makefile("rb") as reader:
            try:
                self._start(json.loads(reader.readline()))
                while line := reader.readline():
                    self._pass_on(json.loads(line)["bucket"], reader)
            except ValueError as error:
                self._tell(error=f"node {self._host}: {error}")
            finally:
                if self._process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self, message: Mapping[str, Any]) -> None:
        arguments = message["engine_args"]
        if not Path(arguments["model"]).is_dir():
            raise ValueError(
                f"there is no {arguments['model']}, whose shape each node of an engine reads: put the model's folder "
                f"under the same path there, or on a disk that all nodes share"
            )
        python, log = vllm_python(self._config.python), Path(message["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        log_start = log.stat().st_size if log.exists() else 0
        self._process = launch(python, "headless.py", log=log, env=message["env"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None, "as asked for"
        with self._process.stdin as stdin:
            stdin.write(json.dumps(arguments).encode() + b"\n")
        self._tell(started=self._process.pid)
        threading.Thread(
            target=self._report_end,
            args=(self._process, log, log_start),
            name="strop: end of vLLM",
            daemon=True,
        ).start()

    def _report_end(self, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started
        reason = last_error(log, log_start)
        with contextlib.suppress(OSError):
            self._tell(
                ended=f"its part on node {self._host} has ended (exit code {code}){reason}; its log there is {log}"
            )
            self._connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, num_bytes: int, reader: BufferedReader) -> None:
        """Take a bucket into memory that has no name in any file system, until the workers have read it."""
        descriptor = os.memfd_create("strop-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            with mmap.mmap(descriptor, num_bytes) as mapped, memoryview(mapped) as view:
                if reader.readinto(view) != num_bytes:
                    raise ConnectionResetError("the leader has gone in the middle of a bucket")
            self._tell(path=f"/proc/{os.getpid()}/fd/{descriptor}")
            reader.readline()  # done
        finally:
            os.close(descriptor)

    def _tell(self, **message: Any) -> None:
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def end_when_silent(connection: socket.socket) -> None:
    """Have the connection end where the machine at its other end is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEPALIVE, (socket.TCP_USER_TIMEOUT, _UNREAD_MS)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
