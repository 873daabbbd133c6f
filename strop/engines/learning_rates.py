"""Learning rates that are too large for a trained model, and those that are usual; warm-ups that never end.

AdamW moves a weight by about the learning rate in its first update, whatever the gradient, and Muon's updates are
scaled to the same size. The matrices of language models hold numbers of 0.02 to 0.1 in size (root mean square).
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.engines.config import OptimizerConfig

LARGE = 1e-2
"""Rates above it move every weight by much of its size in one update."""
DESTROYING = 0.1
"""From it on an update is larger than the weights themselves."""
OF_ADAPTERS = 10.0
"""Factor of rates with LoRA, whose matrices begin at 0 and are multiplied with small ones."""
_USUAL = {
    "actor": ("1e-6 to 1e-5", "1e-5 to 1e-4"),
    "sft": ("1e-5 to 5e-5", "1e-4 to 5e-4"),
    "prefer": ("1e-7 to 1e-5", "1e-6 to 1e-4"),
}
"""By the section that trains the model: of all weights, and of adapters."""


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """Sentences about a peak learning rate that is too large for a trained model."""

    is_destroying: bool
    """An update is larger than the weights themselves."""
    text: str
    """The rate, and what it does."""
    advice: str
    """Consequence, and usual rates."""


def too_large(section: str, optim: OptimizerConfig, *, has_adapter: bool) -> TooLarge | None:
    """Warning about the peak learning rate; None where it is not too large.

    Args:
        section: that trains the model, with `optim` in it.
        optim: its optimizer.
        has_adapter: LoRA adapters are trained instead of all weights.
    """
    lr = optim.lr / (OF_ADAPTERS if has_adapter else 1.0)
    if lr <= LARGE:
        return None
    is_destroying = lr >= DESTROYING
    moved = "every weight of the adapters" if has_adapter else "every weight"
    when = "an update after the warm-up" if optim.warmup_steps or optim.warmup_share else "the first update"
    size = "more than weights are in size" if is_destroying else "much of a weight's size"
    effect = "destroys" if is_destroying else "may destroy"
    return TooLarge(
        is_destroying=is_destroying,
        text=f"{section}.optim.lr={optim.lr:g} moves {moved} by about that much in {when}, {size}",
        advice=f"that {effect} what a trained model has learned; {_usual(section, optim, has_adapter)}",
    )


def unfinished_warm_up(section: str, optim: OptimizerConfig, num_updates: int) -> str:
    """Warning about a warm-up that is longer than the run; empty where it ends.

    Args:
        section: that trains the model, with `optim` in it.
        optim: its optimizer.
        num_updates: optimizer steps of the run.
    """
    if optim.warmup_steps <= num_updates:
        return ""
    return (
        f"{section}.optim.warmup_steps is {optim.warmup_steps}, and the run has {num_updates} optimizer "
        f"step{'' if num_updates == 1 else 's'}: the learning rate comes to {num_updates / optim.warmup_steps:.1%} of "
        f"{section}.optim.lr at most; lower it, or give {section}.optim.warmup_share in its place"
    )


def _usual(section: str, optim: OptimizerConfig, has_adapter: bool) -> str:
    """Rates to use in its place, in words."""
    full, adapters = _USUAL[section]
    text = f"usual are {adapters} with LoRA" if has_adapter else f"usual are {full}, {adapters} with LoRA"
    muon = "; Muon's updates are scaled to AdamW's here, so the 0.02 of other implementations is too large for it"
    return f"{text}, 1e-3 for a tiny model{muon if optim.name == 'muon' else ''}"
