"""Probe of an engine's weights by what it computes, where they cannot be read back.

The trainer says what its model gives to a few tokens; the engine must give the same, up to the rounding of its
precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from strop.engines.kinds import ModelEngine
from strop.engines.packing import make_rows
from strop.rollout.weight_sync.types import Probe, SyncCorrupted

NUM_TOKENS = 24
TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
"""Largest mean difference of log-probs between two computations of the same, by the precision of the engine. Weights of
no meaning, or a head that kept its old ones, differ by a multiple of it."""


def probe_of(engine: ModelEngine) -> Probe:
    """Log-probs of a model for a few tokens; all its ranks call this."""
    model = engine.model
    ids = probe_tokens(model.config.get_text_config().vocab_size, never=model.never_sampled)
    rows = make_rows([torch.tensor(ids[:1])], [torch.tensor(ids[1:])])
    outputs = engine.map_tokens(rows, lambda tokens: {"log_probs": tokens.log_probs(temperature=1.0)[0]})
    return Probe(token_ids=ids, log_probs=tuple(outputs["log_probs"].tolist()))


def check_probe(probe: Probe, log_probs: Sequence[float], *, version: int, dtype: str) -> float:
    """Compare with what an engine says; the mean difference.

    Args:
        probe: what the trainer's model says.
        log_probs: the engine's log-probs of the same tokens.
        version: policy version that both hold.
        dtype: precision of the engine.

    Raises:
        SyncCorrupted: it is larger than `TOLERANCE`, or no number.
    """
    differences = [abs(a - b) for a, b in zip(log_probs, probe.log_probs, strict=True)]
    mean, limit = sum(differences) / len(differences), TOLERANCE[dtype]
    if not mean <= limit:
        raise SyncCorrupted(
            f"sync {version} corrupted: on a probe of {len(differences)} tokens the engine's log-probs differ by "
            f"{mean:.3g} on average from the trainer's, and rounding in {dtype} accounts for {limit:g}: the engine "
            f"does not compute with the weights that it was given, or in another way than the trainer"
        )
    return mean


def probe_tokens(vocab_size: int, *, never: Collection[int] = ()) -> tuple[int, ...]:
    """Tokens [NUM_TOKENS] from all over a vocabulary, always the same.

    Args:
        vocab_size: of the model.
        never: tokens that are not among them, such as those that stand for images.
    """
    tokens = ((position * 7919 + 3) % vocab_size for position in itertools.count())
    return tuple(itertools.islice((token for token in tokens if token not in never), NUM_TOKENS))
