"""Log-probs of prompts, from a model of this process.

Concurrency: called in the loop of the server; a batch is one pass of the model, during which nothing else is served.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.agents.openai_server.errors import ApiError, invalid
from strop.agents.openai_server.scoring import PromptScores
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.packing import make_rows
from strop.engines.tokens import Tokens
from strop.engines.training import Engine


class PromptScorer:
    """Scores prompts with a model of this process."""

    def __init__(self, policy: CausalLM, config: EngineConfig) -> None:
        """Args:
        policy: the model; it is not changed.
        config: size of a pass.
        """
        self._engine = Engine(policy, config, is_frozen=True)
        self._vocab_size = policy.vocab_size

    def score(self, prompts: Sequence[Sequence[int]]) -> list[PromptScores]:
        """Log-probs of each prompt's tokens.

        Raises:
            ApiError: 400, a prompt has a token that the model has not, or is too long.
        """
        largest = max(token for prompt in prompts for token in prompt)
        if largest >= self._vocab_size:
            raise invalid(
                "prompt", f"has the token {largest}, but those of the model end at {self._vocab_size - 1}"
            )
        first = [torch.tensor(prompt[:1]) for prompt in prompts]
        next_tokens = [
            torch.tensor([*prompt[1:], 0]) for prompt in prompts
        ]  # the last position is that of the next token
        try:
            columns = self._engine.map_tokens(make_rows(first, next_tokens), _prompt_columns)
        except ValueError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        scores, start = [], 0
        for prompt in prompts:
            span = slice(start, start + len(prompt))
            start += len(prompt)
            scores.append(
                PromptScores(
                    log_probs=tuple(columns["log_probs"][span].tolist()[:-1]),
                    top_ids=tuple(columns["top_ids"][span, 0].tolist()),
                    top_log_probs=tuple(columns["top_log_probs"][span, 0].tolist()),
                )
            )
        return scores


def _prompt_columns(tokens: Tokens) -> dict[str, Tensor]:
    ids, log_probs = tokens.top_k(1, temperature=1.0)
    return {"log_probs": tokens.log_probs(temperature=1.0)[0], "top_ids": ids, "top_log_probs": log_probs}
