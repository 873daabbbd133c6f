"""The critic: values of the states before each token, and value updates."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, weighted_sum
from strop.algorithms.batch_metrics import EXPLAINED_VARIANCE
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import aggregation_of
from strop.algorithms.losses.value import VALUE_STATISTIC, explained_variance, value_loss_terms
from strop.algorithms.registry import load_extensions
from strop.controller import Dispatch, register
from strop.engines.config import ModelConfig
from strop.engines.multimodal.families import takes_media
from strop.engines.pretrained_config import load_model_config
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.engines.value_models import check_value_model, load_value_model
from strop.protocol import DataProto, columns
from strop.utils.device import sent
from strop.utils.metrics import Metric, Reduction
from strop.utils.tensor_metrics import TensorMetrics
from strop.workers.config import CriticConfig
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.rows import Update, flat_mask

LOSS = Metric(
    "critic/{loss,vf_loss}",
    "reward^2",
    "of the critic, if there is one, as it is reduced; the same number",
)


def check_critic(policy: ModelConfig, path: str) -> None:
    """Refuse a model that no critic can begin from, before any process starts.

    Args:
        policy: whose model the critic starts from where it has none of its own.
        path: of the critic; empty: none.
    """
    path = path or policy.path
    model = dataclasses.replace(policy, path=path)
    if takes_media(load_model_config(model)):
        raise ValueError(
            f"the critic would start from {path!r}, a vision-language model, and critics take text alone: use an "
            f"estimator without a critic, such as algorithm.adv_estimator=grpo, or for prompts without images set "
            f"critic.path to a model of text with the same tokenizer"
        )
    check_value_model(model)


class CriticWorker(TrainedWorker):
    """Holds the value model and its optimizer, or this rank's share of them.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order, each
    with its own rows, also with none.
    """

    def __init__(
        self, model: ModelConfig, critic: CriticConfig, algorithm: AlgorithmConfig, learning: TrainingInit
    ) -> None:
        """Load the value model: a causal language model with a head of zeros, or a classifier with its own.

        Args:
            model: the policy's; its folder is the critic's too where `critic.path` is empty.
            critic, algorithm: of the run.
            learning: on which device, and from where.
        """
        super().__init__()
        self._clip_range = algorithm.cliprange_value
        load_extensions(algorithm.extensions)
        self._aggregation = aggregation_of(algorithm)  # as the policy's
        value_model = dataclasses.replace(model, path=critic.path or model.path, lora=critic.lora)
        self._learn(load_value_model, value_model, critic.engine, critic.optim, learning, role="critic")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, data: DataProto) -> DataProto:
        """Column values [B, R~]: the return expected before each response token, in reward units."""
        return self.token_columns(data, lambda tokens: {"values": tokens.values()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto, totals: BatchTotals) -> Update:
        """One optimizer step on the value loss; these rows are this rank's share of its batch.

        Args:
            data: columns prompts [B, P~]; responses, response_mask, values (those at the start of the step) and
                returns [B, R~].
            totals: counts of the whole optimizer batch, over all ranks; the loss divides by them.
        """
        mask, row_lengths = flat_mask(data.tensors())
        old_values, returns = (columns.flat(data.tensors()[name]) for name in ("values", "returns"))
        weights = self._aggregation.weights(mask, totals, row_lengths, dtype=returns.dtype)
        num_trained = int((weights != 0).sum())

        def run_passes() -> tuple[Tensor, TensorMetrics]:
            metrics = TensorMetrics()

            def loss(tokens: Tokens) -> Tensor:
                values = tokens.values()
                inputs = [
                    sent(column[tokens.response_index], values.device).to(values)
                    for column in (old_values, returns, weights)
                ]
                trained = inputs[2] != 0
                terms = value_loss_terms(values, *inputs[:2], mask=trained, clip_range=self._clip_range)
                for name, numbers in terms.statistics.items():
                    metrics.add_tokens(VALUE_STATISTIC.of(name), numbers, trained, count=num_trained)
                return weighted_sum(terms.terms, inputs[2])

            return self.engine.accumulate(data, loss), metrics

        with self.updating():
            value, metrics = within_memory(self.engine, run_passes)
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up to that of the optimizer batch
        for name in ("loss", "vf_loss"):
            metrics.add_mean(LOSS.of(name), value, share)
        metrics.fetch()
        report = self.engine.step()
        all_metrics: dict[str, Reduction] = {
            EXPLAINED_VARIANCE: explained_variance(old_values, returns, weights != 0),
            **metrics.read(),
        }
        return Update.of("critic", report, all_metrics)

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """As of every role: values."""
        return tokens.values().sum()
