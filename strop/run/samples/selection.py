"""Rejection sampling: selection of the samples of a prompt that are good enough to be imitated."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def select_samples(
    scores: Sequence[float], prompts: Sequence[Hashable], *, best: int | None, min_score: float | None
) -> list[int]:
    """Numbers of the samples that are kept, in ascending order.

    Of each prompt the `best` samples with the largest scores, of those with at least min_score; of equal scores the
    earlier sample. A score that is no finite number is never kept.

    Args:
        scores: of each sample, in the order in which they were drawn.
        prompts: of each sample; equal for the samples that are compared.
        best: at most so many of each prompt; None: all.
        min_score: None: any score.

    Source: Dong et al. 2023, arXiv:2304.06767, step 2, has best=1; Xiong et al. 2025, arXiv:2504.11343, keeps all right
        answers.
    """
    of_prompt: dict[Hashable, list[int]] = {}
    for number, (score, prompt) in enumerate(zip(scores, prompts, strict=True)):
        if math.isfinite(score) and (min_score is None or score >= min_score):
            of_prompt.setdefault(prompt, []).append(number)
    selected = [
        number
        for numbers in of_prompt.values()
        for number in sorted(numbers, key=lambda number: (-scores[number], number))[:best]
    ]
    return sorted(selected)
