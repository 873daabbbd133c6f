"""The policy: log-probs under its current weights, policy updates, and the advantages of a batch.

Concurrency: on several ranks every method but those of rank 0 alone is a collective, called on all ranks in the
same order, each with its own rows, also with none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.extensions import load_extensions
from strop.algorithms.reduce import Mean
from strop.controller import Dispatch, Execute, register
from strop.engines.config import ModelConfig
from strop.engines.lora import adapter_off, has_adapter, merged_tensors
from strop.engines.model import load_model
from strop.engines.packing import Row
from strop.engines.training import TrainEngine, make_rows
from strop.protocol import DataProto
from strop.rollout.sync.sender import WeightSender
from strop.rollout.sync.types import Endpoint, SyncReport
from strop.workers.config import ActorConfig
from strop.workers.correcting import correction_columns
from strop.workers.estimates import batch_advantages, shaping_metrics
from strop.workers.joining import join
from strop.workers.policy_loss import PolicyLoss
from strop.workers.rows import data_rows, response_columns, step_metrics
from strop.workers.saving import TrainedWorker
from strop.workers.summary import BatchSummary, summarize
from strop.workers.updates import Update, with_update


class ActorWorker(TrainedWorker):
    """Holds the policy and its optimizer, or this rank's share of them."""

    def __init__(
        self,
        model: ModelConfig,
        actor: ActorConfig,
        algorithm: AlgorithmConfig,
        *,
        device: str,
        num_updates: int | None,
        checkpoint: Path | None = None,
    ) -> None:
        """Load the policy.

        Args:
            model, actor, algorithm: of the run.
            device: `auto` or a device name.
            num_updates: optimizer steps of the whole run, where a schedule needs to know.
            checkpoint: folder that `save_checkpoint` wrote, to continue from.
        """
        super().__init__()
        load_extensions(algorithm.extensions)
        self._algorithm = algorithm
        parallel = join(self.placement, actor.engine, device=device)
        policy = load_model(model, parallel=parallel)
        engine = TrainEngine(policy, actor.engine, actor.optim, total_steps=num_updates, parallel=parallel)
        self._hold(engine, role="actor", checkpoint=checkpoint)
        self._sender: WeightSender | None = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Columns old_log_probs and entropys [B, R~] of the responses under the current weights."""
        log_probs, entropies = self._log_probs(data)
        return response_columns(data, {"old_log_probs": log_probs, "entropys": entropies})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column ref_log_prob [B, R~] of the responses under the policy without its adapter.

        Raises:
            ValueError: the policy has no adapter; a reference is then a model of its own.
        """
        if not has_adapter(self.engine.model):
            raise ValueError(
                "the policy has no adapter to switch off, so it cannot be its own reference: set model.lora.rank, "
                "or use a ReferenceWorker"
            )
        with adapter_off(self.engine.model):
            log_probs, _ = self._log_probs(data)
        return response_columns(data, {"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_policy(self, data: DataProto, totals: BatchTotals) -> DataProto:
        """One optimizer step; these rows are this rank's share of its batch.

        Args:
            data: columns prompts [B, P~]; responses, response_mask and advantages [B, R~]; the denominator of the
                ratio: rollout_log_probs [B, R~] with algorithm.old_log_probs=rollout, else old_log_probs [B, R~],
                or none, in which case the log-probs of this very pass are the old ones (ratio 1 in value, not in
                gradient); ref_log_prob [B, R~] when there is a KL loss; loss_mask and rollout_is_weights [B, R~]
                where the rollout was corrected; with a teacher, what it said (`TeacherWorker`).
            totals: counts of the whole optimizer batch, over all ranks; the loss divides by them.

        Returns:
            Columns log_probs and entropys [B, R~] of this pass, from before the step, and the rank's Update
            (`updates_of`).
        """
        rows = data_rows(data)
        loss = PolicyLoss(data, totals, self._algorithm)
        temperature = data.meta_info["temperature"]
        if loss.wants_whole_batch:
            before, _ = self.engine.log_probs(rows, temperature=temperature)
            loss.prepare(before, self.engine.parallel)
        needed = loss.needs_gradient(rows)
        moving = _chosen(rows, needed, True)
        if loss.chosen_ids is None:
            value = self.engine.accumulate(moving, loss, temperature=temperature)
        else:
            value = self.engine.accumulate_chosen(moving, loss, loss.chosen_ids, temperature=temperature)
        self._measure(_chosen(rows, needed, False), loss, temperature)
        report = self.engine.step()
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up to that of the optimizer batch
        metrics = loss.metrics(share)
        metrics["actor/loss"] = Mean(value, share)
        metrics |= step_metrics("actor", report)
        seen = response_columns(data, {"log_probs": loss.log_probs, "entropys": loss.entropies})
        return with_update(seen, Update(metrics=metrics, skipped=report.skipped))

    def _measure(self, rows: list[Row], loss: PolicyLoss, temperature: float) -> None:
        """Rows that cannot move the policy (advantage 0, no other term) are measured without a gradient."""
        packed = make_rows(
            [row.prompt for row in rows], [row.response for row in rows], [row.media for row in rows]
        )
        log_probs, entropies = self.engine.log_probs(packed, temperature=temperature)
        if rows:
            index = torch.cat([torch.arange(r.first_token, r.first_token + len(r.response)) for r in rows])
            with torch.no_grad():
                loss(log_probs.to(self.engine.model.device), entropies.to(self.engine.model.device), index)

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def compute_advantages(self, data: DataProto, *, kl_coef: float = 0.0) -> DataProto:
        """Columns advantages, returns and token_level_rewards [B, R~] of all rows of a step (`batch_advantages`)."""
        return batch_advantages(data, self._algorithm, kl_coef=kl_coef)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_sum_pi_squared(self, data: DataProto) -> DataProto:
        """Column sum_pi_squared [B, R~]: the sum of squared probabilities of all tokens, at each response token."""
        sums = self.engine.sum_pi_squared(data_rows(data), temperature=data.meta_info["temperature"])
        return response_columns(data, {"sum_pi_squared": sums})

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def correct_rollout(self, data: DataProto) -> DataProto:
        """What the trainer's log-probs say about all rows of a step (`correction_columns`)."""
        return correction_columns(data, self._algorithm)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def summarize_batch(self, data: DataProto) -> BatchSummary:
        """What the controller keeps of all rows of a step, with all their columns (`summarize`)."""
        summary = summarize(data)
        metrics = {**summary.metrics, **shaping_metrics(data, self._algorithm)}
        return dataclasses.replace(summary, metrics=metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_sync(self, num_receivers: int) -> Endpoint | None:
        """Get ready to send weights to rollout workers in other processes; rank 0 says where they meet it."""
        self._sender = WeightSender(self.engine.model.module, rank=self.rank)
        return self._sender.open(num_receivers=num_receivers, host=self.master_addr)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int) -> SyncReport:
        """Bring every rollout worker to this version, while they call `receive_weights`; an adapter is merged."""
        model = self.engine.model
        self.engine.onload()
        if self._sender is None:
            raise ValueError("the actor sends weights to nobody: call open_sync first")
        return self._sender.send(version, merged_tensors(model) if has_adapter(model) else None)

    def close(self) -> None:
        """Leave the rollout workers, if there are any."""
        if self._sender is not None:
            self._sender.close()

    def _log_probs(self, data: DataProto) -> tuple[Tensor, Tensor]:
        return self.engine.log_probs(data_rows(data), temperature=data.meta_info["temperature"])


def _chosen(rows: Sequence[Row], flags: Sequence[bool], wanted: bool) -> list[Row]:
    """The rows whose flag is as wanted."""
    return [row for row, flag in zip(rows, flags, strict=True) if flag is wanted]
