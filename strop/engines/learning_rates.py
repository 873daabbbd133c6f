"""Learning rates that are too large for a trained model, and those that are usual.

AdamW moves a weight by about the learning rate in its first update, whatever the gradient, and Muon's updates are
scaled to the same size. The matrices of language models hold numbers of 0.02 to 0.1 in size (root mean square).
"""

from __future__ import annotations

from typing import Literal

from strop.engines.config import OptimizerConfig

LARGE = 1e-2
"""Rates above it move every weight by much of its size in one update."""
DESTROYING = 0.1
"""From it on an update is larger than the weights themselves."""
OF_ADAPTERS = 10.0
"""How much larger rates are with LoRA, whose matrices begin at 0 and are multiplied with small ones."""


def how_large(optim: OptimizerConfig, *, has_adapter: bool) -> Literal["usual", "large", "destroying"]:
    """What the peak learning rate does to a trained model in the first update."""
    lr = optim.lr / (OF_ADAPTERS if has_adapter else 1.0)
    return "destroying" if lr >= DESTROYING else "large" if optim.lr > LARGE else "usual"


_USUAL = {
    "actor": ("1e-6 to 1e-5", "1e-5 to 1e-4"),
    "sft": ("1e-5 to 5e-5", "1e-4 to 5e-4"),
    "prefer": ("1e-7 to 1e-5", "1e-6 to 1e-4"),
}
"""By the section that trains the model: of all weights, and of adapters."""


def usual(section: str, optim: OptimizerConfig, *, has_adapter: bool) -> str:
    """Rates to use in its place, in words."""
    whole, adapters = _USUAL[section]
    text = f"usual are {adapters} with LoRA" if has_adapter else f"usual are {whole}, {adapters} with LoRA"
    muon = "; Muon's updates are scaled to AdamW's here, so the 0.02 of other implementations is too large for it"
    return f"{text}, 1e-3 for a tiny model{muon if optim.name == 'muon' else ''}"
