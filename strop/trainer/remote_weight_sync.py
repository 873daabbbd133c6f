"""Weight sync to engines with weights of their own: after every optimizer step, and again where an engine was lost.

An engine that shares nothing with the actor may die in the middle of a step. Where its worker holds the whole policy it
starts another one by itself (strop.rollout.replicas.engine_replicas). Elsewhere, with rollout workers apart or a policy
in shards, every rank takes part in handing weights over, so that it happens here: engines that do not serve are started
again, all are brought to the current version, verified, and what was lost with them is played again.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.controller import ResultFuture, WorkerGroup, as_list
from strop.trainer.policy_sync import WeightSync
from strop.workers.actor import ActorWorker


@dataclass(kw_only=True)
class RemoteWeightSync(WeightSync):
    """Weight sync from the actor to engines with weights of their own."""

    actor: WorkerGroup[ActorWorker]
    shares_process: bool
    """Generation takes place in the actor's processes."""
    probes_weights: bool
    """Generation holds weights that cannot be read back, so log-probs show that they have arrived."""

    def start(self) -> None:
        """Connect to the engines, and bring those with weights of their own to the actor's."""
        if not self.shares_process:
            endpoint = as_list(self.actor.call.open_sync(self.rollout.world_size))[0]
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
            for started in (sent, received):
                assert isinstance(started, ResultFuture), "both are registered with blocking=False"
                started.get()
        if self.probes_weights:
            self.rollout.call.check_weights(as_list(self.actor.call.probe())[0], self.version)
