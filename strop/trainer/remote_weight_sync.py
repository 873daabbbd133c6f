"""Weight sync to engines with weights of their own: after every optimizer step, and again where an engine was lost.

An engine that shares nothing with the actor may die in the middle of a step. Where its worker holds the whole policy it
starts another one by itself (strop.rollout.replicas.engine_replicas). Elsewhere, with rollout workers apart or a policy
in shards, every rank takes part in handing weights over, so that it happens here: engines that do not serve are started
again, all are brought to the current version, verified, and what was lost with them is played again.

A rollout worker apart that is lost in the middle of a sync breaks it for all; the others get the weights in another
one, unless they generate meanwhile: their requests would find no verified weights. Those that replace lost ones are
taken in before a sync.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.controller import ResultFuture, WorkerGroup, as_list
from strop.rollout.weight_sync.types import SyncError, SyncReport
from strop.trainer.fault_tolerance.rollout_workers import RolloutWorkers
from strop.trainer.policy_sync import WeightSync
from strop.utils.metrics import Metric
from strop.workers.actor import ActorWorker

SENT = Metric(
    "perf/weight_sync_gb", "GiB", "that went to each rollout process of its own at the end of the step"
)
SENT_SHARE = Metric(
    "perf/weight_sync_share",
    "share",
    "of these in the bytes of all weights; below 1 over the network, where only what changed travels",
)


@dataclass(kw_only=True)
class RemoteWeightSync(WeightSync):
    """Weight sync from the actor to engines with weights of their own."""

    actor: WorkerGroup[ActorWorker]
    shares_process: bool
    """Generation takes place in the actor's processes."""
    probes_weights: bool
    """Generation holds weights that cannot be read back, so log-probs show that they have arrived."""
    store: str
    """resources.weight_store."""
    _reports: list[SyncReport] = field(default_factory=list)
    """Of the actor's ranks on the last sync to other processes; none before, and in one process."""
    workers: RolloutWorkers | None = None
    """Rollout workers apart, where some may be lost and replaced."""
    generates_meanwhile: bool = False
    """Engines have requests during a sync, so that one that was broken is not repeated."""
    _connected: list[int] = field(default_factory=list, init=False)
    """Processes of `workers` that the actor sends to."""

    def start(self) -> None:
        """Connect to the engines, and bring those with weights of their own to the actor's."""
        if not self.shares_process:
            self._connect()
        if not self.shares_process or self.probes_weights:
            self._send()

    def update(self, version: int) -> None:
        """Bring the engines to the actor's weights, which hold this policy version now, verified.

        Raises:
            SyncError, WorkerFailed: one could not be brought to it; WorkerLost where it was lost in the sync, and the
                others generate meanwhile.
        """
        self.version = version
        if self.workers is not None:
            self.workers.admit()
        if not self.recover():
            self._send()
        if self.workers is not None:
            self.workers.join_router()

    def recover(self) -> bool:
        """Start engines again that do not serve, with the current weights; False where all of them do.

        Raises:
            SyncError, WorkerFailed: as `update`.
        """
        if not self.probes_weights:
            return False
        num_started = sum(as_list(self.rollout.call.restart_failed_engines()))
        # A worker is lost in it whose engine spans nodes, where one of them is gone.
        losses = [] if self.workers is None else self.workers.note_losses()
        if not (num_started or losses):
            return False
        self.start()
        return True

    def _send(self) -> None:
        if self.shares_process:
            self.rollout.call.set_version(self.version)
        else:
            while failure := self._send_once():
                losses = [] if self.workers is None else self.workers.note_losses()
                if not losses:
                    raise SyncError(failure)
                if self.generates_meanwhile:
                    raise losses[-1]
        if self.probes_weights:
            self.rollout.call.check_weights(as_list(self.actor.call.probe())[0], self.version)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last update."""
        if not self._reports:
            return {}
        sent_bytes = sum(report.sent_bytes for report in self._reports)
        return {SENT: sent_bytes / 2**30, SENT_SHARE: sent_bytes / self._reports[0].num_bytes}

    def _send_once(self) -> str:
        """One sync to the workers that live; why it was not completed, or nothing."""
        if self.workers is not None:
            self.workers.group.check()
            while self._connected != self.workers.group.pids:
                self._connect()
        sent: object = self.actor.call.send_weights(self.version)
        received: object = self.rollout.call.receive_weights(self.version)
        reports: list[list[SyncReport]] = []
        for started in (sent, received):
            assert isinstance(started, ResultFuture), "both are registered with blocking=False"
            reports.append(as_list(started.get()))
        self._reports = reports[0]
        return next((report.failure for side in reports for report in side if report.failure), "")

    def _connect(self) -> None:
        ranks = self.rollout.ranks
        if self.workers is not None:
            self._connected = self.workers.group.pids
        dtypes = as_list(self.rollout.call.weight_dtypes())[0]
        endpoint = as_list(self.actor.call.open_sync(len(ranks), dtypes, store=self.store))[0]
        assert endpoint is not None, "rank 0 listens"
        self.rollout.call.join_sync(endpoint, ranks)
