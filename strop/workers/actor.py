"""The policy: log-probs under its current weights, policy updates, and the advantages of a batch.

Concurrency: on several ranks every method but those of rank 0 alone is a collective, called on all ranks in the
same order, each with its own rows, also with none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, row_numbers
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import (
    LossSpec,
    loss_spec,
    policy_loss,
    prepare_columns,
    record_loss,
    rows_with_gradient,
)
from strop.algorithms.registry import load_extensions
from strop.algorithms.specs import adv_estimator_declaration
from strop.controller import BatchAndMetrics, Dispatch, Execute, register
from strop.engines.config import ModelConfig
from strop.engines.lora import adapters
from strop.engines.lora.adapters import has_adapter
from strop.engines.model import load_model
from strop.engines.moe.losses import RouterLoss
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.rollout.weight_sync.probe import probe_of
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import Endpoint, Probe, SyncError, SyncReport
from strop.utils.device import sent
from strop.utils.host_copy import HostCopy
from strop.utils.metrics import Mean, Metric, merge_metrics
from strop.utils.tensor_metrics import TensorMetrics
from strop.workers.config import ActorConfig
from strop.workers.correction_columns import correction_columns
from strop.workers.estimates import compute_advantages
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.routers import ExpertLoads, loss_parts, router_loss
from strop.workers.rows import Update, flat_mask, log_prob_column, response_columns
from strop.workers.summary import BatchSummary, summarize

LOSS = Metric("actor/loss", "reward", "the whole loss, as it is reduced")
KL_COEF = Metric("actor/kl_coef", "1", "factor of the KL in the loss, when there is one")


class ActorWorker(TrainedWorker):
    """Holds the policy and its optimizer, or this rank's share of them."""

    def __init__(
        self, model: ModelConfig, actor: ActorConfig, algorithm: AlgorithmConfig, learning: TrainingInit
    ) -> None:
        """Load the policy.

        Args:
            model, actor, algorithm: of the run.
            learning: on which device, and from where.
        """
        super().__init__()
        load_extensions(algorithm.extensions)
        self._algorithm = algorithm
        self._loss = loss_spec(algorithm)
        self._moe = actor.moe
        self._learn(load_model, model, actor.engine, actor.optim, learning, role="actor", keeps_first=True)
        self.engine.replays_routing = True
        self._sender: WeightSender | None = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Columns old_log_probs and entropys [B, R~] of the responses under the current weights; where the estimator
        takes it, also sum_pi_squared [B, R~]: the sum of squared probabilities of all tokens, at each of them."""
        temperature: float = data.meta_info["temperature"]
        takes_squares = "sum_pi_squared" in adv_estimator_declaration(self._algorithm.adv_estimator).needs

        def log_probs(tokens: Tokens) -> dict[str, Tensor]:
            old, entropies = tokens.log_probs(temperature=temperature)
            values = {"old_log_probs": old, "entropys": entropies}
            if takes_squares:
                values["sum_pi_squared"] = tokens.sum_pi_squared(temperature=temperature)
            return values

        return self.token_columns(data, log_probs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column ref_log_prob [B, R~] of the responses under the policy as it began: without its adapter, or with the
        one that it continues.

        Raises:
            ValueError: the policy has no adapter; a reference is then a model of its own.
        """
        if not has_adapter(self.engine.model):
            raise ValueError(
                "the policy has no adapter to switch off, so it cannot be its own reference: set model.lora.rank, "
                "or use a ReferenceWorker"
            )
        self.engine.replays_routing = False  # the experts are those of another model
        try:
            self.engine.load_to_device()  # where the values of an adapter can be changed
            first, policy = self._first_adapter, self.engine.model
            with adapters.adapter_off(policy) if first is None else adapters.adapter_at(policy, first):
                return self.token_columns(data, log_prob_column("ref_log_prob", data))
        finally:
            self.engine.replays_routing = True

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_AND_METRIC)
    def update_policy(self, data: DataProto, totals: BatchTotals) -> BatchAndMetrics[Update]:
        """One optimizer step; these rows are this rank's share of its batch.

        Args:
            data: columns prompts [B, P~]; responses, response_mask and advantages [B, R~]; the denominator of the
                ratio: rollout_log_probs [B, R~] with algorithm.old_log_probs=rollout, else old_log_probs [B, R~],
                or none, in which case the log-probs of this very pass are the old ones (ratio 1 in value, not in
                gradient); ref_log_prob [B, R~] when there is a KL loss; loss_mask and rollout_is_weights [B, R~]
                where the rollout was corrected; with a teacher, what it said (`TeacherWorker`).
            totals: counts of the whole optimizer batch, over all ranks; the loss divides by them.

        Returns:
            Columns log_probs and entropys [B, R~] of this pass, from before the step, and the Update of the rank.
        """
        spec, tensors = self._loss, data.tensors()
        mask, row_lengths = flat_mask(tensors)
        present_columns = spec.present(frozenset(tensors))
        batch = {name: columns.flat(tensors[column]) for name, column in present_columns.items()}
        batch["weights"] = spec.aggregation.weights(
            mask, totals, row_lengths, dtype=batch["advantages"].dtype
        )
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up to that of the optimizer batch
        with self.updating():
            passes = within_memory(
                self.engine, lambda: self._run_passes(data, batch, row_lengths, totals, share)
            )
            loss, of_routers = passes.loss, passes.of_routers
            loss.metrics.add_mean(LOSS, passes.value, share)
            loss.metrics.fetch()
            of_pass = HostCopy(loss.columns)
            report = self.engine.step()
        router_value, parts = loss_parts(of_routers, self._moe, self.engine)
        metrics = merge_metrics([loss.metrics.read(), {LOSS: Mean(share * router_value, 0)}])
        metrics |= loss.loads.metrics("actor", self.engine.parallel, share)
        metrics |= {metric.of("actor"): Mean(part * share, share) for metric, part in parts.items()}
        if self._algorithm.use_kl_loss:
            metrics[KL_COEF] = Mean(self._algorithm.kl_loss_coef, 1)
        return BatchAndMetrics(
            batch=response_columns(data, of_pass.wait()), metrics=(Update.of("actor", report, metrics),)
        )

    def _run_passes(
        self,
        data: DataProto,
        batch: Mapping[str, Tensor],
        row_lengths: Tensor,
        totals: BatchTotals,
        share: int,
    ) -> _Passes:
        """All passes of an update; arguments as of `update_policy` and `_BatchLoss`."""
        spec = self._loss
        if spec.declaration.prepare is not None:
            before = self.engine.map_tokens(data, log_prob_column("log_probs", data))
            batch = {**batch, **self._prepared(batch, before["log_probs"])}
        of_routers = router_loss(self.engine, self._moe, data)
        has_gradient = rows_with_gradient(spec, batch, row_lengths)
        if of_routers is not None:
            has_gradient = [True] * len(data)
        loss = _BatchLoss(
            spec, batch, row_lengths, totals, temperature=data.meta_info["temperature"], share=share,
            device=self.engine.model.device,
        )  # fmt: skip
        with_gradient = [row for row, has in enumerate(has_gradient) if has]
        value = self.engine.accumulate(data, loss, rows=with_gradient, router_loss=of_routers)
        without = [row for row, has in enumerate(has_gradient) if not has]
        if self.engine.parallel.max(len(without)):  # on any rank
            self.engine.map_tokens(data, loss.measure, rows=without)
        return _Passes(loss, value, of_routers)

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """As of every role: log-probs, entropies where the loss has them, and tokens that a teacher would choose."""
        if self._loss.takes_chosen_tokens:
            chosen = torch.zeros(
                (len(tokens.prediction_index), self._algorithm.distillation.top_k),
                dtype=torch.int64,
                device=tokens.model.device,
            )
            log_probs, entropies, at = tokens.log_probs_at(chosen, temperature=1.0)
            total = log_probs.sum() + at.log_probs.sum()
        else:
            log_probs, entropies = tokens.log_probs(temperature=1.0)
            total = log_probs.sum()
        return total + entropies.sum() if self._algorithm.entropy_coeff else total

    def _prepared(self, batch: Mapping[str, Tensor], log_probs: Tensor) -> dict[str, Tensor]:
        """Columns of these rows that the loss prepares once from all tokens of the optimizer batch, over all ranks.

        Args:
            batch: columns [N] of these rows, by the loss's own names.
            log_probs: [N], before the update.
        """
        whole = {"log_probs": log_probs.to(batch["weights"]), "advantages": batch["advantages"]}
        whole["old_log_probs"] = batch.get("old_log_probs", whole["log_probs"])
        ranks = self.engine.parallel
        masks = ranks.gather((batch["weights"] != 0).to(torch.uint8))
        start = sum(len(part) for part in masks[: ranks.dp_rank])
        end = start + len(masks[ranks.dp_rank])
        prepared = prepare_columns(
            self._loss.name,
            mask=torch.cat(masks).bool(),
            columns={name: torch.cat(ranks.gather(column)) for name, column in whole.items()},
            settings=self._loss.settings,
        )
        return {name: column[start:end] for name, column in prepared.items()}

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def compute_advantages(self, data: DataProto, *, kl_coef: float = 0.0) -> DataProto:
        """Columns advantages, returns and token_level_rewards [B, R~] of all rows of a step."""
        return compute_advantages(data, self._algorithm, kl_coef=kl_coef)

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def correct_rollout(self, data: DataProto) -> DataProto:
        """Columns and metrics of the rollout correction, from all rows of a step (`correction_columns`)."""
        return correction_columns(data, self._algorithm)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def summarize_batch(self, data: DataProto, sample_starts: Sequence[int]) -> BatchSummary:
        """Summary of all rows of a step with all their columns (`summarize`)."""
        return summarize(data, self._algorithm, sample_starts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_sync(self, num_receivers: int, dtypes: Mapping[str, str], *, store: str = "") -> Endpoint | None:
        """Get ready to send weights to rollout workers in other processes; rank 0 says where they meet it.

        Args:
            num_receivers: rollout workers.
            dtypes: names of the dtypes in which they hold weights of these names.
            store: resources.weight_store.
        """
        if self._sender is not None:
            self._sender.close()
        held = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
        module = self.engine.model.module
        self._sender = WeightSender(module, rank=self.rank, dtypes=held, store=store)
        return self._sender.open(num_receivers=num_receivers, host=self.master_addr)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, version: int) -> SyncReport:
        """Bring every rollout worker to this version, while they call `receive_weights`; an adapter is merged.

        One that was not completed is reported as such; a later one may succeed.
        """
        self.engine.load_to_device()
        if self._sender is None:
            raise ValueError("the actor sends weights to nobody: call open_sync first")
        try:
            return self._sender.send(version, self.engine.streamed_weights())
        except SyncError as error:
            return SyncReport.failed(version, error)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def probe(self) -> Probe:
        """Log-probs of a few tokens, to compare with engines whose weights cannot be read."""
        return probe_of(self.engine)

    def close(self) -> None:
        """Leave the rollout workers, if there are any."""
        if self._sender is not None:
            self._sender.close()


class _Passes(NamedTuple):
    """Passes of an update, behind which its step is taken."""

    loss: _BatchLoss
    value: Tensor
    """Of the loss, on this rank."""
    of_routers: RouterLoss | None


class _BatchLoss:
    """The loss of one optimizer batch, called by the engine on some tokens at a time, with metrics and log-probs of the
    pass."""

    def __init__(
        self,
        spec: LossSpec,
        batch: Mapping[str, Tensor],
        row_lengths: Tensor,
        totals: BatchTotals,
        *,
        temperature: float,
        share: float,
        device: torch.device,
    ) -> None:
        """Arguments as of `policy_loss`, for all rows that this rank has.

        Args:
            batch: columns [N], tokens end to end.
            row_lengths: [B], tokens of each row.
            share: weight of this rank in the mean of losses.
            device: of the model.
        """
        self._spec, self._totals = spec, totals
        self._temperature, self._share = temperature, share
        self._num_trained = int((batch["weights"] != 0).sum())
        self._row_ids = row_numbers(row_lengths)
        self._batch = {name: sent(column, device) for name, column in batch.items()}
        self.metrics, self.loads = TensorMetrics(), ExpertLoads()
        self.columns = {name: torch.zeros_like(self._batch["weights"]) for name in ("log_probs", "entropys")}
        """[N], by the weights before the step."""

    def __call__(self, tokens: Tokens) -> Tensor:
        """The part of the loss that these tokens have."""
        weights = self._batch["weights"]
        positions = sent(tokens.response_index, weights.device)
        inputs = {name: column[positions] for name, column in self._batch.items()}
        chosen_log_probs = is_likely = None
        if self._spec.takes_chosen_tokens:
            log_probs, entropies, at = tokens.log_probs_at(
                inputs["teacher_ids"], temperature=self._temperature
            )
            chosen_log_probs, is_likely = at.log_probs, at.is_likely
        else:
            log_probs, entropies = tokens.log_probs(temperature=self._temperature)
        result = policy_loss(
            self._spec,
            log_probs,
            entropies,
            inputs,
            row_ids=self._row_ids[tokens.response_index],
            totals=self._totals,
            chosen_log_probs=chosen_log_probs,
            is_likely=is_likely,
        )
        self.loads.add(tokens)
        record_loss(self.metrics, result, num_trained=self._num_trained, share=self._share)
        for name, values in (("log_probs", log_probs), ("entropys", entropies)):
            self.columns[name][positions] = values.detach().to(self.columns[name])
        return result.loss

    def measure(self, tokens: Tokens) -> dict[str, Tensor]:
        """Tokens of rows that cannot move the policy: they are seen alone, without a gradient."""
        self(tokens)
        return {}
