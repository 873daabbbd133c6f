"""The implicit process reward model: rewards of single tokens, learned during the run from the outcomes of answers."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, row_numbers, valid_tokens_per_row
from strop.algorithms.implicit_reward import outcome_terms, process_rewards
from strop.controller import Dispatch, register
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.kinds import frozen_engine
from strop.engines.model import load_model
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.utils.device import sent
from strop.utils.host_copy import HostCopy
from strop.utils.metrics import Mean, Metric
from strop.workers.config import PrmConfig
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.rows import Update, flat_mask, response_columns

PRM = Metric(
    "prm/{loss,acc,score_mean}",
    "nats; share; 1",
    "of the process reward model, before its optimizer step: cross-entropy with the outcomes; training sequences whose "
    "score has the sign of the outcome, and half of those without one; mean score, which is the sum of a sequence's "
    "process rewards",
)


NO_SCORE = 1e-6
"""A score is 0 up to rounding before a model has learned, and then its sign would depend on the cut into passes."""


class PrmWorker(TrainedWorker):
    """Holds the process reward model with its optimizer, and the weights that it began with.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order, each
    with its own rows, also with none.
    """

    def __init__(self, model: ModelConfig, prm: PrmConfig, learning: TrainingInit) -> None:
        """Load the model twice: one copy learns, one stays as it is.

        Args:
            model: the policy's; its folder is this model's too where `prm.path` is empty.
            prm: of the run.
            learning: on which device, and from where.
        """
        super().__init__()
        self._prm = prm
        start = dataclasses.replace(model, path=prm.path or model.path, lora=LoraConfig())
        load = partial(load_model, policy=model)
        parallel = self._learn(load, start, prm.engine, prm.optim, learning, role="prm")
        frozen = dataclasses.replace(start, gradient_checkpointing=False, freeze_vision_tower=False)
        self._frozen = frozen_engine(
            load(frozen, parallel=parallel, holds_half=prm.engine.kind == "torch"), prm.engine, parallel
        )
        self._frozen.budget = self.engine.budget

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_prm_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column prm_ref_log_prob [B, R~]: log-probs under the weights that this model began with."""

        def log_probs(tokens: Tokens) -> dict[str, Tensor]:
            return {"prm_ref_log_prob": tokens.log_probs(temperature=1.0)[0]}

        outputs = within_memory(self._frozen, lambda: self._frozen.map_tokens(data, log_probs))
        return response_columns(data, outputs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_process_rewards(self, data: DataProto) -> DataProto:
        """Column process_rewards [B, R~] under the weights of now, from column prm_ref_log_prob [B, R~]."""
        before = columns.flat(data.tensors()["prm_ref_log_prob"])

        def rewards(tokens: Tokens) -> dict[str, Tensor]:
            now = tokens.log_probs(temperature=1.0)[0]
            reference = sent(before[tokens.response_index], now.device).to(now)
            return {"process_rewards": process_rewards(now, reference, beta=self._prm.beta)}

        return self.token_columns(data, rewards)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_prm(self, data: DataProto, totals: BatchTotals) -> Update:
        """One optimizer step on the outcomes; these rows are this rank's share of its batch.

        Args:
            data: columns prompts [B, P~]; responses, response_mask, token_level_scores and prm_ref_log_prob [B, R~].
            totals: counts of the whole optimizer batch, over all ranks; the loss divides by its samples, which are
                rows with a sampled token.
        """
        with self.updating():
            return self._update(data, totals)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: both copies leave the device until they are called again."""
        self.engine.offload()
        self._frozen.offload()

    def _update(self, data: DataProto, totals: BatchTotals) -> Update:
        tensors = data.tensors()
        mask, row_lengths = flat_mask({"response_mask": data.tensors()["response_mask"]})
        before = columns.flat(tensors["prm_ref_log_prob"])
        row_of = row_numbers(row_lengths)  # [N]
        counted = valid_tokens_per_row(mask, row_lengths) > 0  # [B]
        outcomes = _outcomes(tensors["token_level_scores"], self._prm.right_above)

        def run_passes() -> tuple[Tensor, list[Tensor]]:
            statistics: list[Tensor] = []

            def loss(tokens: Tokens) -> Tensor:
                now = tokens.log_probs(temperature=1.0)[0]
                rows, sequences = torch.unique(row_of[tokens.response_index], return_inverse=True)  # [S], [M]
                inputs = [sent(column[tokens.response_index], now.device) for column in (before, mask)]
                rewards = process_rewards(now, inputs[0].to(now), beta=self._prm.beta)
                targets = sent(outcomes[rows], now.device).to(now)
                terms, scores = outcome_terms(rewards, inputs[1], sent(sequences, now.device), targets)
                weights = sent(counted[rows].to(terms.dtype) / totals.num_samples, terms.device)
                is_right = ((scores > 0) == (targets > 0)).to(terms)
                is_right = torch.where(scores.abs() > NO_SCORE, is_right, 0.5)
                of_counted = sent(torch.nonzero(counted[rows])[:, 0], scores.device)
                statistics.append(torch.stack([is_right, scores.detach()])[:, of_counted].double())
                return (terms * weights).sum()

            return self.engine.accumulate(data, loss), statistics

        value, statistics = within_memory(self.engine, run_passes)
        empty = torch.zeros(2, 0, device=value.device, dtype=torch.float64)
        copies = HostCopy({"loss": value, "numbers": torch.cat([empty, *statistics], dim=1)})
        report = self.engine.step()
        fetched = copies.wait()
        numbers = fetched["numbers"]
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up to that of the optimizer batch
        metrics: dict[str, Mean] = {PRM.of("loss"): Mean(float(fetched["loss"]), share)}
        if count := numbers.shape[1]:
            acc, score = (numbers.sum(dim=1)).tolist()
            metrics |= {PRM.of("acc"): Mean(acc, count), PRM.of("score_mean"): Mean(score, count)}
        return Update.of("prm", report, metrics)

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """As of every role: log-probs."""
        return tokens.log_probs(temperature=1.0)[0].sum()


def _outcomes(scores: Tensor, right_above: float) -> Tensor:
    """[B]: 1 for each row whose score is above this number, else 0."""
    rights = [float(row.double().sum()) > right_above for row in columns.rows(scores)]
    return torch.tensor(rights, dtype=torch.float32)
