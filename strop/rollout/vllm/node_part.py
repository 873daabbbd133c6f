"""The part of an engine on a further node that it spans, seen from the rollout worker on its first node.

Each bucket of weights travels once to each further node, and there through memory to all of its workers.

Concurrency: a thread listens to the follower; `copied` is called by one thread at a time. A part that ends wakes every
wait.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.controller.auth_listener import connect_authenticated
from strop.controller.errors import FollowerLost
from strop.controller.worker import FollowerAddress
from strop.rollout.vllm.follower import PURPOSE, end_when_silent
from strop.rollout.vllm.process import VllmDied

_CONNECT_S = 20.0
_START_S = 120.0
"""Time to start a process, which imports vLLM only then."""


class NodePart:
    """One part, which ends with this object, and is known to its follower by this connection."""

    def __init__(self, address: FollowerAddress, *, on_end: Callable[[str], None]) -> None:
        """Connect to the follower; nothing is started yet.

        Args:
            address: of the follower.
            on_end: takes a sentence when the part ends by itself; called in another thread.

        Raises:
            FollowerLost: nobody answers there any more.
        """
        self._host, self._on_end = address.host, on_end
        self._answers: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._is_closed, self._ended = False, ""
        try:
            self._connection = connect_authenticated(
                address.host, address.port, address.secret, purpose=PURPOSE, timeout_s=_CONNECT_S
            )
        except OSError as error:
            raise FollowerLost(
                f"the process that holds this rank's devices on node {address.host} is gone ({error})"
            ) from error
        end_when_silent(self._connection)
        threading.Thread(target=self._listen, name="strop: part of vLLM", daemon=True).start()

    def start(self, engine_args: Mapping[str, Any], *, env: Mapping[str, str], log: Path) -> None:
        """Have the part started; it then waits for that of the first node.

        Args:
            engine_args: of vLLM, for this node.
            env: variables beside those of the follower.
            log: file there that takes what it prints.

        Raises:
            ValueError: the node lacks vLLM or the model.
            VllmDied, TimeoutError: the follower gives no answer.
        """
        self._tell(engine_args=dict(engine_args), env=dict(env), log=str(log))
        answer = self._answer(_START_S)
        if "error" in answer:
            raise ValueError(answer["error"])

    @contextlib.contextmanager
    def copied(self, path: str, num_bytes: int, *, timeout_s: float) -> Iterator[str]:
        """Path of a copy of a file, for the workers of the other node, while the context lasts.

        Args:
            path: of memory here.
            num_bytes: of it.
            timeout_s: limit of the answer, in seconds.

        Raises:
            VllmDied, TimeoutError: the part has ended, or the follower gives no answer.
        """
        self._tell(bucket=num_bytes)
        try:
            with Path(path).open("rb") as file:
                self._connection.sendfile(file, count=num_bytes)
        except OSError as error:
            raise VllmDied(self._ended or f"node {self._host} takes no weights ({error})") from error
        try:
            yield self._answer(timeout_s)["path"]
        except TimeoutError:
            self._connection.shutdown(socket.SHUT_RDWR)  # a late answer would be taken for the next one
            raise
        finally:
            self._tell(done=True)

    def close(self) -> None:
        """End the part. A second call does nothing."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _tell(self, **message: Any) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise VllmDied(self._ended or f"node {self._host} is gone ({error})") from error

    def _answer(self, timeout_s: float) -> Mapping[str, Any]:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"node {self._host} of vLLM's engine gave no answer for {timeout_s:g} s"
            ) from None
        if answer is None:
            self._answers.put(None)  # for whoever asks next
            raise VllmDied(f"vLLM is gone: {self._ended}")
        return answer

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as reader:
            for line in reader:
                message = json.loads(line)
                if "ended" in message:
                    self._ended = message["ended"]
                    break
                self._answers.put(message)
        self._ended = self._ended or f"the process that holds its devices on node {self._host} is gone"
        self._answers.put(None)
        if not self._is_closed:
            self._on_end(self._ended)


@contextlib.contextmanager
def copied_to_all(
    parts: Sequence[NodePart], bucket: Mapping[str, Any], *, timeout_s: float
) -> Iterator[list[str]]:
    """Paths of a bucket's memory by node, this one first, while the context lasts; raises as `NodePart.copied`."""
    with contextlib.ExitStack() as stack:
        copies = [
            stack.enter_context(part.copied(bucket["path"], bucket["num_bytes"], timeout_s=timeout_s))
            for part in parts
        ]
        yield [bucket["path"], *copies]
