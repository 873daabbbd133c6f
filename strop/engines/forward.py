"""One forward pass over a micro-batch: log-probs and entropies, or values, of its response tokens.

With sequence parallelism a rank runs its part of the micro-batch; results are those of all of it, on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.head import (
    ChosenTokens,
    token_log_probs,
    token_log_probs_at,
    token_sum_pi_squared,
    token_top_k,
    token_values,
)
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
            banned=model.banned_ids,
        )

    log_probs, entropies = model.run(compute)
    if isinstance(part, SequenceShard):
        log_probs, entropies = part.gather(torch.stack([log_probs, entropies], dim=1)).unbind(1)
    return log_probs, entropies


def token_outputs_at(
    model: CausalLM, micro_batch: MicroBatch, chosen: Tensor, *, temperature: float, parallel: Parallel
) -> tuple[Tensor, Tensor, ChosenTokens]:
    """As `token_outputs`, with what the policy says about chosen tokens [M, K] in the place of each response token."""
    part = _part(micro_batch, parallel)
    here = part.share(chosen) if isinstance(part, SequenceShard) else chosen

    def compute() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_probs, entropies, at = token_log_probs_at(
            _predicting(model, part),
            model.head_weight,
            model.head_bias,
            part.targets,
            here,
            temperature=temperature,
            banned=model.banned_ids,
        )
        return log_probs, entropies, at.log_probs, at.is_likely

    log_probs, entropies, at, is_likely = model.run(compute)
    if isinstance(part, SequenceShard):
        together = part.gather(torch.cat([log_probs[:, None], entropies[:, None], at], dim=1))
        log_probs, entropies, at = together[:, 0], together[:, 1], together[:, 2:]
        is_likely = part.gather(is_likely.to(torch.uint8)).bool()
    return log_probs, entropies, ChosenTokens(log_probs=at, is_likely=is_likely)


def top_k_outputs(
    model: CausalLM,
    micro_batch: MicroBatch,
    k: int,
    *,
    temperature: float,
    banned: Tensor | None,
    parallel: Parallel,
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens in the place of each response token: ids [M, k] and log-probs [M, k].

    `banned` are ids that are passed over, beside those of the model itself.
    """
    part = _part(micro_batch, parallel)
    passed_over = [ids for ids in (model.banned_ids, banned) if ids is not None]

    def compute() -> tuple[Tensor, Tensor]:
        return token_top_k(
            _predicting(model, part),
            model.head_weight,
            model.head_bias,
            k,
            temperature=temperature,
            banned=torch.cat(passed_over) if passed_over else None,
        )

    ids, log_probs = model.run(compute)
    if isinstance(part, SequenceShard):
        ids, log_probs = part.gather(ids), part.gather(log_probs)
    return ids, log_probs


def concentrations(
    model: CausalLM, micro_batch: MicroBatch, *, temperature: float, parallel: Parallel
) -> Tensor:
    """Sum of squared probabilities [M] of the distributions that the response tokens were drawn from."""
    part = _part(micro_batch, parallel)

    def compute() -> Tensor:
        return token_sum_pi_squared(
            _predicting(model, part),
            model.head_weight,
            model.head_bias,
            temperature=temperature,
            banned=model.banned_ids,
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
    """What this rank runs.

    Raises:
        ValueError: a row has media, and ranks share each sequence.
    """
    if micro_batch.pictures is not None and parallel.sp_group is not None:
        raise ValueError(
            "a sample has images, and engine.sequence_parallel divides sequences over ranks, which images cannot be: "
            "use engine.sequence_parallel=1"
        )
    return micro_batch if parallel.sp_group is None else shard_micro_batch(micro_batch, parallel.sp_group)


def _predicting(model: CausalLM, part: MicroBatch | SequenceShard) -> Tensor:
    """Hidden states before the response tokens: [M, D], or [m, D] of this rank's share."""
    if isinstance(part, SequenceShard):
        return part.predicting(model.backbone(part.input_ids, part.position_ids, part.attention))
    hidden = model.backbone(part.input_ids, part.position_ids, part.attention, part.pictures)
    return F.embedding(part.hidden_index, hidden)
