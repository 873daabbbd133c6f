"""Weight sync to engines with weights of their own: after every optimizer step, and again where an engine was lost.

An engine that shares nothing with the actor may die in the middle of a step. Where its worker holds the whole policy it
starts another one by itself (strop.rollout.replicas.engine_replicas). Elsewhere, with rollout workers apart or a policy
in shards, every rank takes part in handing weights over, so that it happens here: engines that do not serve are started
again, all are brought to the current version, verified, and what was lost with them is played again.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.controller import ResultFuture, WorkerGroup, as_list
from strop.rollout.weight_sync.types import SyncReport
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
    _report: SyncReport | None = None
    """Of the actor's rank 0 on the last sync to other processes; None before, and in one process."""

    def start(self) -> None:
        """Connect to the engines, and bring those with weights of their own to the actor's."""
        if not self.shares_process:
            dtypes = as_list(self.rollout.call.weight_dtypes())[0]
            opened = self.actor.call.open_sync(self.rollout.world_size, dtypes, store=self.store)
            endpoint = as_list(opened)[0]
            assert endpoint is not None, "rank 0 listens"
            self.rollout.call.join_sync(endpoint)
        if not self.shares_process or self.probes_weights:
            self._send()

    def update(self, version: int) -> None:
        """Bring the engines to the actor's weights, which hold this policy version now, verified.

        Raises:
            SyncError, WorkerFailed: one could not be brought to it.
        """
        self.version = version
        if not self.recover():
            self._send()

    def recover(self) -> bool:
        """Start engines again that do not serve, with the current weights; False where all of them do.

        Raises:
            SyncError, WorkerFailed: as `update`.
        """
        if not self.probes_weights or not any(as_list(self.rollout.call.restart_failed_engines())):
            return False
        self.start()
        return True

    def _send(self) -> None:
        if self.shares_process:
            self.rollout.call.set_version(self.version)
        else:
            sent: object = self.actor.call.send_weights(self.version)
            received: object = self.rollout.call.receive_weights(self.version)
            assert isinstance(sent, ResultFuture), "registered with blocking=False"
            assert isinstance(received, ResultFuture), "registered with blocking=False"
            self._report = as_list(sent.get())[0]
            received.get()
        if self.probes_weights:
            self.rollout.call.check_weights(as_list(self.actor.call.probe())[0], self.version)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last update."""
        if self._report is None:
            return {}
        sent_bytes, num_bytes = self._report.sent_bytes, self._report.num_bytes
        return {SENT: sent_bytes / 2**30, SENT_SHARE: sent_bytes / num_bytes}
