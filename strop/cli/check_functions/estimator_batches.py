"""Small random batches with everything that an advantage estimator may be given, for checking estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Columns that estimators take, in float64."""

    token_level_rewards: Tensor
    """[B, R], 0 in the padding; may be above 0 on tokens that were given."""
    response_mask: Tensor
    """[B, R] bool."""
    group_ids: Tensor
    """[B] int64."""
    values: Tensor
    """[B, R]."""
    log_probs: Tensor
    """[B, R], for every column of log-probs."""
    sum_pi_squared: Tensor
    """[B, R]."""
    rollout_is_weights: Tensor
    """[B, R]."""
    reward_baselines: Tensor
    """[B]."""
    reward_parts: Tensor
    """[B, K]."""
    sample_index: Tensor
    """[B] int64; with turn_index, no two rows of a prompt have the same."""
    turn_index: Tensor
    """[B] int64."""
    anchor_ids: Tensor
    """[B] int64."""
    process_rewards: Tensor
    """[B, R]."""

    def columns(self) -> dict[str, Tensor]:
        """By the names under which estimators take them."""
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__}
        log_probs = columns.pop("log_probs")
        sums = self.token_level_rewards.sum(dim=-1)
        columns |= {"rewards": sums, "turn_rewards": sums}
        return {**columns, "old_log_probs": log_probs, "ref_log_prob": log_probs - 0.25}

    def map(self, per_row: Callable[[Tensor], Tensor]) -> Batch:
        """The same change made to every column along its rows."""
        return Batch(**{name: per_row(getattr(self, name)) for name in self.__dataclass_fields__})


def random_batch(generator: torch.Generator, *, like: Batch | None = None) -> Batch:
    """A few rows of a few prompts: given tokens between sampled ones, rows without a sampled token, lone samples.

    Rewards are eighths, at least 0, often equal, and sit on any token. With `like`, its width and group ids that
    it does not have.
    """

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def eighths(*shape: int) -> Tensor:
        return torch.randint(0, 9, shape, generator=generator).to(torch.float64) / 8

    def permuted() -> Tensor:
        return torch.randperm(num_rows, generator=generator).to(torch.float64)

    num_rows = number(4, 10)
    width = like.response_mask.shape[1] if like else number(2, 6)
    lengths = torch.randint(0, width + 1, (num_rows, 1), generator=generator)
    lengths[:2] = width  # at least two rows have a token to whiten
    inside = torch.arange(width)[None] < lengths
    mask = inside & (uniform(num_rows, width) < 0.75)
    mask[:2, 0] = True
    # Rewards on a part of the tokens, and never before the first sampled one, which would have nobody to credit.
    is_rewarded = inside & (uniform(num_rows, width) < 0.5) & (mask.cumsum(dim=-1) > 0)
    group_ids = torch.randint(0, max(2, num_rows // 2), (num_rows,), generator=generator) * 3 + 5
    group_ids[1] = group_ids[0]  # at least two rows can be compared
    group_ids = group_ids + (1000 if like else 0)
    log_probs = -0.05 - 2 * uniform(num_rows, width)
    return Batch(
        token_level_rewards=torch.where(is_rewarded, eighths(num_rows, width), 0.0),
        response_mask=mask,
        group_ids=group_ids,
        values=uniform(num_rows, width),
        log_probs=log_probs,
        sum_pi_squared=(2 * log_probs).exp() + 0.1 * uniform(num_rows, width),
        rollout_is_weights=0.5 + uniform(num_rows, width),
        reward_baselines=eighths(num_rows),
        # Distinct, and an odd number of them, so that the normalized parts of two samples cannot cancel.
        reward_parts=torch.stack([permuted() for _ in range(3)], dim=1) / 8,
        sample_index=torch.arange(num_rows) // 2,
        turn_index=torch.arange(num_rows) % 2,
        anchor_ids=torch.randint(-1, 2, (num_rows,), generator=generator),
        process_rewards=uniform(num_rows, width) - 0.5,
    )


COLUMNS = frozenset(random_batch(torch.Generator()).columns())
"""Names of `Batch.columns`."""
