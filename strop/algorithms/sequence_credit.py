"""Credit of episodes that consist of several training sequences: one of them represents the episode.

A chat template that rewrites history cuts an episode into sequences that are trained one by one. The episode still has
one reward, and counts once in the statistics of its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def with_answer_scores(
    token_level_scores: Tensor, row_lengths: Tensor, answer_scores: Tensor | None
) -> Tensor:
    """Rewards per token [B, R]: the scores, with a reward model's on the last token.

    Args:
        token_level_scores: [B, R], in reward units.
        row_lengths: [B] int64, tokens of each response.
        answer_scores: [B], a reward model's score of the whole answer; None without one.
    """
    if answer_scores is None:
        return token_level_scores
    is_last = torch.arange(token_level_scores.shape[1])[None] == row_lengths[:, None] - 1  # [B, R]
    return token_level_scores + torch.where(is_last, answer_scores.to(token_level_scores.dtype)[:, None], 0.0)


def episode_representatives(episode_ids: Sequence[str], mask: Tensor) -> tuple[list[int], list[int]] | None:
    """Representative row of each episode, where episodes have several training sequences; None where none has.

    It is the last one of which a token is trained: an episode counts once in the statistics of its group, and one
    whose last sequence was rejected keeps its advantage.

    Args:
        episode_ids: [B], equal for the sequences of an episode.
        mask: [B, R] bool, tokens that are trained.

    Returns:
        The representative rows in order, and for each row [B] the position of its representative among them.
    """
    if len(set(episode_ids)) == len(episode_ids):
        return None
    has_tokens = mask.any(dim=-1).tolist()
    representative: dict[str, int] = {}
    for row, name in enumerate(episode_ids):
        if has_tokens[row] or name not in representative or not has_tokens[representative[name]]:
            representative[name] = row
    rows = sorted(representative.values())
    position = {row: index for index, row in enumerate(rows)}
    return rows, [position[representative[name]] for name in episode_ids]


def spread_over_sequences(
    advantages: Tensor, returns: Tensor, mask: Tensor, rows: list[int], representative_of: list[int]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of all sequences, from those [E, R] of the representatives.

    A representative keeps its own. Every other token of the episode gets that of the representative's first trained
    token: the credit for all that followed, which is the advantage of every token for outcome rewards.

    Args:
        mask: [B, R] bool, tokens that are trained.
        rows, representative_of: see `episode_representatives`.
    """
    first = mask[rows].int().argmax(dim=-1, keepdim=True)  # [E, 1]
    spread = []
    for values in (advantages, returns):
        credit = values.gather(1, first)[representative_of]  # [B, 1]
        whole = torch.where(mask, credit, torch.zeros_like(credit))  # [B, R]
        whole[rows] = values
        spread.append(whole)
    return spread[0], spread[1]
