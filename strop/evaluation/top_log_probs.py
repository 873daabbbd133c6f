"""Top-k log-probs of a model at each token of given answers: the log of a teacher."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.kinds import frozen_engine
from strop.engines.model import load_model
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.workers.models import ModelWorker

TEMPERATURE = 1.0
"""Temperature of the log-probs, whatever the answers were sampled with."""


class TopLogProbs(ModelWorker):
    """Top-k log-probs of a model in this process."""

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, *, k: int, num_ids: int, device: str
    ) -> None:
        """Load the model.

        Args:
            model: a language model.
            engine: limits of a pass.
            k: tokens per position.
            num_ids: tokens with ids from this on are ignored: heads are often padded beyond the tokenizer.
            device: `auto` or a device name.

        Raises:
            ValueError: the model has fewer tokens than k.
        """
        super().__init__()
        parallel = self.join(engine, device=device)
        language_model = load_model(model, parallel=parallel, holds_half=engine.kind == "torch")
        if k > min(num_ids, language_model.vocab_size):
            raise ValueError(
                f"{k} likely tokens are wanted in each place, but the model has "
                f"{min(num_ids, language_model.vocab_size)} tokens: use at most that"
            )
        padding = range(num_ids, language_model.vocab_size)
        self._k = k
        self._banned = torch.tensor([*padding], device=parallel.device) if padding else None
        self.engine = frozen_engine(language_model, engine, parallel)

    def score(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """Ids and log-probs [R, k] of each response, the most likely first.

        Args:
            prompts, responses: token ids; a response may be empty.
        """
        numbers = [number for number, response in enumerate(responses) if response]
        width = (0, self._k)
        results = [(np.zeros(width, dtype=np.int32), np.zeros(width, dtype=np.float32)) for _ in responses]
        if not numbers:
            return results
        data = DataProto.from_dict(
            {
                "prompts": columns.jagged([torch.tensor(prompts[number]) for number in numbers]),
                "responses": columns.jagged([torch.tensor(responses[number]) for number in numbers]),
            }
        )

        def top_k(tokens: Tokens) -> dict[str, Tensor]:
            ids, log_probs = tokens.top_k(self._k, temperature=TEMPERATURE, banned=self._banned)
            return {"ids": ids.to(torch.int32), "log_probs": log_probs.float()}

        top_columns = self.token_columns(data, top_k).tensors()
        rows = zip(columns.rows(top_columns["ids"]), columns.rows(top_columns["log_probs"]), strict=True)
        for number, (ids, log_probs) in zip(numbers, rows, strict=True):
            results[number] = (ids.cpu().numpy(), log_probs.cpu().numpy())
        return results
