"""A model that learns from preferences: numbers of a batch's conversations, and steps along their weighed gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.aggregation import weighted_sum
from strop.controller import Dispatch, register
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.engines.value_models import load_value_model
from strop.protocol import DataProto
from strop.utils.device import sent
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.rows import Update, flat_mask


class PreferenceWorker(TrainedWorker):
    """Holds the policy or the reward model and its optimizer, or this rank's share of them.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimizerConfig,
        learning: TrainingInit,
        *,
        scores: bool,
        padding: int | None = None,
    ) -> None:
        """Load the model.

        Args:
            model, engine, optim, learning: as of every trained role.
            scores: the model is a classifier with one score, else it says the log-prob of answers.
            padding: token id that the saved classifier takes for padding.
        """
        super().__init__()
        self._scores = scores
        load = load_value_model if scores else load_model
        self._learn(load, model, engine, optim, learning, role="actor")
        self.engine.model.unused_tokens = ()
        if scores:
            self.engine.model.module.config.get_text_config().pad_token_id = padding  # type: ignore[operator, union-attr]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_numbers(self, data: DataProto) -> DataProto:
        """Column numbers [B] float64: the log-prob of each answer, or the score of each conversation.

        Args:
            data: columns prompts [B, P~]; responses and loss_mask [B, R~].
        """
        mask, lengths = flat_mask(data.tensors())
        outputs = within_memory(
            self.engine,
            lambda: self.engine.map_tokens(data, lambda tokens: {"numbers": self._numbers(tokens)}),
        )
        numbers = torch.where(mask, outputs["numbers"].double().cpu(), 0.0)
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sums = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, row, numbers)
        return DataProto.from_dict({"numbers": sums})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> Update:
        """One optimizer step along the sum of the numbers' gradients, each with its weight.

        Args:
            data: this rank's rows: as `compute_numbers`, and column weights [B].
        """
        mask, lengths = flat_mask(data.tensors())
        weights = torch.repeat_interleave(data.tensors()["weights"], lengths) * mask

        def loss(tokens: Tokens) -> Tensor:
            numbers = self._numbers(tokens)
            return weighted_sum(numbers, sent(weights[tokens.response_index], numbers.device).to(numbers))

        within_memory(self.engine, lambda: self.engine.accumulate(data, loss))
        return Update.of("train", self.engine.step(), {})

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """As of every role: log-probs, or scores."""
        return self._numbers(tokens).sum()

    def _numbers(self, tokens: Tokens) -> Tensor:
        """Of each token [M]."""
        return tokens.values() if self._scores else tokens.log_probs(temperature=1.0)[0]
