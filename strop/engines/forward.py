"""One forward pass over a micro-batch: log-probs and entropies, or values, of its response tokens.

With sequence parallelism a rank runs its part of the micro-batch; results are those of all of it, on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.head import token_log_probs, token_sum_pi_squared, token_values
from strop.engines.packing import MicroBatch
from strop.engines.parallel import Parallel
from strop.engines.ulysses import SequenceShard, shard_micro_batch


def token_outputs(
    model: CausalLM, micro_batch: MicroBatch, *, temperature: float, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] and entropies [M] of the response tokens, differentiable, in at least float32."""
    part = _part(micro_batch, parallel)

    def compute() -> tuple[Tensor, Tensor]:
        return token_log_probs(
            _predicting(model, part),
            model.head_weight,
            model.head_bias,
            part.targets,
            temperature=temperature,
        )

    log_probs, entropies = model.run(compute)
    if isinstance(part, SequenceShard):
        log_probs, entropies = part.gather(torch.stack([log_probs, entropies], dim=1)).unbind(1)
    return log_probs, entropies


def concentrations(
    model: CausalLM, micro_batch: MicroBatch, *, temperature: float, parallel: Parallel
) -> Tensor:
    """Sum of squared probabilities [M] of the distributions that the response tokens were drawn from."""
    part = _part(micro_batch, parallel)

    def compute() -> Tensor:
        return token_sum_pi_squared(
            _predicting(model, part), model.head_weight, model.head_bias, temperature=temperature
        )

    values = model.run(compute)
    return part.gather(values) if isinstance(part, SequenceShard) else values


def value_outputs(model: CausalLM, micro_batch: MicroBatch, *, parallel: Parallel) -> Tensor:
    """Values [M] of the states before the response tokens, differentiable, in at least float32."""
    part = _part(micro_batch, parallel)

    def compute() -> Tensor:
        return token_values(_predicting(model, part), model.head_weight, model.head_bias)

    values = model.run(compute)
    return part.gather(values) if isinstance(part, SequenceShard) else values


def _part(micro_batch: MicroBatch, parallel: Parallel) -> MicroBatch | SequenceShard:
    """What this rank runs."""
    return micro_batch if parallel.sp_group is None else shard_micro_batch(micro_batch, parallel.sp_group)


def _predicting(model: CausalLM, part: MicroBatch | SequenceShard) -> Tensor:
    """Hidden states before the response tokens: [M, D], or [m, D] of this rank's share."""
    hidden = model.backbone(part.input_ids, part.position_ids, part.attention)
    if isinstance(part, SequenceShard):
        return part.predicting(hidden)
    return F.embedding(part.hidden_index, hidden)
