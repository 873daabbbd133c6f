"""Operations and tokens of the passes of an engine."""

from __future__ import annotations

from strop.engines.causal_lm import CausalLM
from strop.engines.flops import model_work
from strop.engines.parallel.ranks import Parallel
from strop.engines.tokens import TokenCounts, Tokens


class PassCounts:
    """Operations and tokens of all passes of a rank so far."""

    def __init__(self, model: CausalLM, parallel: Parallel) -> None:
        """Args:
        model: just loaded, and whole.
        parallel: the ranks that hold it.
        """
        self._work, self._parallel = model_work(model), parallel
        self.operations: float | None = 0.0 if self._work else None
        """Of floating point; None where the model's are not known."""
        self.tokens = TokenCounts()

    def add(self, tokens: Tokens, *, trains: bool) -> None:
        """Note a pass over a micro-batch; ranks that share a sequence, or its layers, share its operations."""
        self.tokens = self.tokens.with_pass(tokens)
        if self._work is not None and self.operations is not None:
            operations = self._work.training(tokens) if trains else self._work.forward(tokens)
            self.operations += operations / (self._parallel.ranks_per_row * self._parallel.pp_size)
