"""Results that worker processes still hold: for the controller, and for the worker they are passed on to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from strop.controller.call import BatchAndMetrics
from strop.controller.errors import CallTimeout, WorkerFailed, WorkerLost
from strop.controller.ray.future import BatchSummary
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import PendingCall
from strop.controller.ray.messages import CallResponse
from strop.controller.ray.process import fetch
from strop.controller.ray.transport import BatchRefs, detached_from_store, payload_bytes
from strop.protocol import DataProto


@dataclass(kw_only=True)
class Traffic:
    """Bytes that went through the controller: the content of arguments and results, without references to rows."""

    sent_bytes: int = 0
    """Content of the arguments that the controller sent."""
    received_bytes: int = 0
    """Content of the results that it fetched."""


class StoredRows:
    """Rows that a worker keeps, in another worker that they were passed on to."""

    def __init__(self, refs: BatchRefs, label: str, wait_s: float) -> None:
        self._refs, self._label, self._wait_s = refs, label, wait_s

    def contents(self) -> BatchSummary:
        """Summary of the batch."""
        return self._refs.contents

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch these columns."""
        return self._refs.read(batch_keys, non_tensor_batch_keys, self._get)

    def _get(self, references: list[Any]) -> list[Any]:
        return fetch(references, self._wait_s, f"the result of {self._label}")


class RayPending:
    """Result of one worker that is being computed; the manager of its process keeps the deadline."""

    def __init__(self, manager: WorkerManager, pending: PendingCall, traffic: Traffic) -> None:
        self._manager = manager
        self._pending = pending
        self._traffic = traffic

    def __repr__(self) -> str:
        return f"RayPending({self._pending.label}, rank {self._pending.member.rank})"

    @property
    def method(self) -> str:
        """Method of the call."""
        return self._pending.method

    def result(self) -> Any:
        """Wait for the value and fetch it."""
        answer = self._answer()
        if answer.stored is not None:
            batch = self.columns(answer.stored.contents.tensors, answer.stored.contents.others)
            return batch if answer.metrics is None else BatchAndMetrics(batch=batch, metrics=self.metrics())
        self._traffic.received_bytes += payload_bytes(answer.value)
        return answer.value

    def metrics(self) -> tuple[Any, ...]:
        """Wait for the metrics beside the rows, which stay where they are."""
        metrics = self._answer().metrics
        assert metrics is not None, "a call that is asked for metrics returns a BatchAndMetrics"
        self._traffic.received_bytes += payload_bytes(metrics)
        return metrics

    def contents(self) -> BatchSummary:
        """Wait for the computation; the rows stay where they are."""
        return self._stored().contents

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch these columns of the batch, and its facts."""
        data = detached_from_store(self._stored().read(batch_keys, non_tensor_batch_keys, self._get))
        self._traffic.received_bytes += payload_bytes(data)
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is the rows, wherever they are kept."""
        stored = self._stored()
        refs = replace(stored, contents=replace(stored.contents, facts={}))
        return StoredRows, (refs, self._pending.label, self._pending.timeout_s)

    def _stored(self) -> BatchRefs:
        stored = self._answer().stored
        if stored is None:
            raise TypeError(f"{self._pending.label} returned no batch, so it has no rows")
        return stored.located(self._pending.objects) if self._pending.objects else stored

    def _answer(self) -> CallResponse:
        answer = self._manager.wait(self._pending)
        assert isinstance(answer, CallResponse), (
            "every call of a worker's method is answered by a CallResponse"
        )
        return answer

    def _get(self, references: list[Any]) -> list[Any]:
        pending, member = self._pending, self._pending.member
        try:
            return list(ray.get(references, timeout=pending.timeout_s))
        except GetTimeoutError:
            raise CallTimeout(
                f"the rows of {pending.label}, rank {member.rank} ({member.where}), did not arrive "
                f"within {pending.timeout_s:g} s",
                method=pending.label,
                missing=[member.rank],
            ) from None
        except RayError as error:
            # They are gone with their machine. Its processes may have had no call, so that nobody knows yet.
            try:
                self._manager.check_lives(member)
            except (WorkerFailed, CallTimeout) as cause:
                raise cause from error
            raise


class RowsOfLiving:
    """Rows of a worker; none where it is lost before it has made them."""

    def __init__(self, pending: RayPending) -> None:
        self._pending = pending

    def contents(self) -> BatchSummary:
        """Wait for the computation; the rows stay where they are."""
        try:
            return self._pending.contents()
        except WorkerLost:
            return BatchSummary(num_rows=0, tensors=(), others=(), facts={})

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch these columns of the batch, and its facts."""
        return self._pending.columns(batch_keys, non_tensor_batch_keys)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker it is the rows, as those of RayPending."""
        return self._pending.__reduce__()
