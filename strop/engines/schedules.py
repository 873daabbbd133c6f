"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from strop.engines.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`.

    Linear warm-up reaches the peak after `warmup_steps`, or round(warmup_share * total_steps). Then, with a share of
    the decay that is left, from 1 to 0 at the last step: lr * (min_lr_ratio + (1 - min_lr_ratio) * share). linear and
    cosine (half a period) decay over all steps after the warm-up, from the peak at the first; wsd stays at the peak
    and decays over the last round(decay_share * total_steps) steps, every one of which is below the peak. After the
    last step the rate stays where it is.

    Raises:
        ValueError: a decaying schedule, or a warm-up as a share, without a known number of steps.

    Source: cosine: Loshchilov and Hutter 2017, arXiv:1608.03983. wsd: Hu et al. 2024, arXiv:2404.06395, with
        the linear decay of Haegele et al. 2024, arXiv:2405.18392.
    """
    if total_steps is None and (config.schedule != "constant" or config.warmup_share):
        asked = f"schedule is {config.schedule}" if config.schedule != "constant" else "warmup_share is set"
        raise ValueError(
            f"optim.{asked}, which needs to know the number of optimizer steps; set a number of steps or epochs, or "
            f"use schedule=constant and warmup_steps"
        )
    warmup = config.warmup_steps or round(config.warmup_share * (total_steps or 0))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant" or total_steps is None:
        return config.lr
    if config.schedule == "wsd":
        left = _wsd_left(config.decay_share, step, total_steps, warmup)
    else:
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def _wsd_left(decay_share: float, step: int, total_steps: int, warmup: int) -> float:
    # The decay is at least one step, and the warm-up keeps its own.
    num_decaying = max(1, min(round(decay_share * total_steps), total_steps - warmup))
    num_decayed = step - (total_steps - num_decaying) + 1
    return 1 - min(1.0, max(0.0, num_decayed / num_decaying))
