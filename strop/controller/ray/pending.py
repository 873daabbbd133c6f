"""Results that worker processes still hold: for the controller, and for the worker they are passed on to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.controller.errors import CallTimeout
from strop.controller.ray.future import Contents
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import PendingCall
from strop.controller.ray.messages import CallResponse
from strop.controller.ray.process import fetch
from strop.controller.ray.transport import BatchRefs, detached_from_store, payload_bytes
from strop.protocol import DataProto


@dataclass(kw_only=True)
class Traffic:
    """What went through the controller: the content of arguments and results, without references to rows."""

    sent_bytes: int = 0
    """Content of the arguments that the controller sent."""
    received_bytes: int = 0
    """Content of the results that it fetched."""


class RemotePending:
    """What one worker computes, in another worker that it was passed on to."""

    def __init__(self, reference: Any, label: str, wait_s: float) -> None:
        self._reference = reference
        self._label = label
        self._wait_s = wait_s
        self._held: CallResponse | None = None

    def result(self) -> Any:
        """Wait for the value and fetch it."""
        answer = self._answer()
        if answer.stored is None:
            return answer.value
        contents = answer.stored.contents
        return self.columns(contents.tensors, contents.others)

    def contents(self) -> Contents:
        """Wait for the computation; the rows stay where they are."""
        return self._stored().contents

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch these columns of the batch, and its facts."""
        return self._stored().read(batch_keys, non_tensor_batch_keys, self._get)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is the reference to the same answer."""
        return RemotePending, (self._reference, self._label, self._wait_s)

    def _stored(self) -> BatchRefs:
        stored = self._answer().stored
        if stored is None:
            raise TypeError(f"{self._label} returned no batch, so it has no rows")
        return stored

    def _answer(self) -> CallResponse:
        if self._held is None:
            (self._held,) = self._get([self._reference])
        return self._held

    def _get(self, references: list[Any]) -> list[Any]:
        return fetch(references, self._wait_s, f"the result of {self._label}")


class RayPending(RemotePending):
    """The same in the controller; the manager of its process answers for the deadline."""

    def __init__(self, manager: WorkerManager, pending: PendingCall, traffic: Traffic) -> None:
        super().__init__(pending.reference, pending.label, pending.timeout_s)
        self._manager = manager
        self._pending = pending
        self._traffic = traffic

    def __repr__(self) -> str:
        return f"RayPending({self._label}, rank {self._pending.member.rank})"

    def result(self) -> Any:
        """Wait for the value and fetch it."""
        answer = self._answer()
        if answer.stored is None:
            self._traffic.received_bytes += payload_bytes(answer.value)
        return super().result()

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch these columns of the batch, and its facts."""
        data = detached_from_store(super().columns(batch_keys, non_tensor_batch_keys))
        self._traffic.received_bytes += payload_bytes(data)
        return data

    def _answer(self) -> CallResponse:
        answer = self._manager.wait(self._pending)
        assert isinstance(answer, CallResponse), (
            "every call of a worker's method is answered by a CallResponse"
        )
        return answer

    def _get(self, references: list[Any]) -> list[Any]:
        member = self._pending.member
        try:
            return list(ray.get(references, timeout=self._wait_s))
        except GetTimeoutError:
            raise CallTimeout(
                f"the rows of {self._label}, rank {member.rank} ({member.where}), did not arrive "
                f"within {self._wait_s:g} s",
                method=self._label,
                missing=[member.rank],
            ) from None
        except RayError:
            self._manager.look()  # the process that held them may be the one that failed
            raise
