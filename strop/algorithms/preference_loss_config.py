"""The numbers of losses of preferences, as a user sets them."""

from __future__ import annotations

from typing import Literal

from strop.config.sections import section
from strop.utils.field_types import NonNegativeFloat, PositiveFloat, Share

Loss = Literal["sigmoid", "hinge", "ipo", "kto", "orpo", "simpo", "reward"]
WITHOUT_REFERENCE = ("orpo", "simpo", "reward")
"""Losses that do not ask what the starting model says."""


@section("prefer")
class PreferenceLossConfig:
    """A loss of preferences, and its numbers."""

    loss: Loss = "sigmoid"
    """sigmoid: DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); hinge: SLiC's (Zhao et al. 2023,
    arXiv:2305.10425, as DPO's margin); ipo (Azar et al. 2023, arXiv:2310.12036, eq. 17, of mean log-probs); kto
    (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8), of single answers with a label; without the starting
    model, of mean log-probs: orpo (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7) and simpo (Meng et al. 2024,
    arXiv:2405.14734, eq. 6); reward: a reward model instead of a policy (Ouyang et al. 2022, arXiv:2203.02155, eq. 1;
    margins of rows as Touvron et al. 2023, arXiv:2307.09288, eq. 2)."""
    beta: PositiveFloat = 0.1
    """Strength with which the policy is held to the model that it began with; with orpo the weight of the odds ratio
    (the paper's lambda), with simpo the scale of the margin, for which the paper has 2 to 10; not for loss=reward."""
    simpo_gamma: NonNegativeFloat = 0.5
    """By how much a better answer is to win, after beta: simpo alone."""
    label_smoothing: Share = 0.0
    """Share of comparisons that are thought to be the other way round, below 0.5: sigmoid alone."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of good answers: kto alone."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of bad answers: kto alone."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the loss of imitating the better answers, per token (Pang et al. 2024, arXiv:2404.19733, eq. 1):
    sigmoid, hinge, ipo and simpo alone; orpo has it with weight 1."""
    center_coef: NonNegativeFloat = 0.0
    """Pulls the sum of both scores towards 0 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2): reward alone."""

    def __post_init__(self) -> None:
        if self.label_smoothing >= 0.5:
            raise ValueError(
                f"prefer.label_smoothing is {self.label_smoothing}: more than half of the comparisons would be wrong; "
                f"use a number below 0.5"
            )
        for name, readers, default in (
            ("beta", ("sigmoid", "hinge", "ipo", "kto", "orpo", "simpo"), 0.1),
            ("simpo_gamma", ("simpo",), 0.5),
            ("label_smoothing", ("sigmoid",), 0.0),
            ("nll_coef", ("sigmoid", "hinge", "ipo", "simpo"), 0.0),
            ("desirable_weight", ("kto",), 1.0),
            ("undesirable_weight", ("kto",), 1.0),
            ("center_coef", ("reward",), 0.0),
        ):
            if self.loss not in readers and (value := getattr(self, name)) != default:
                raise ValueError(
                    f"prefer.{name} is {value}, which prefer.loss={self.loss} does not read: remove it, or use "
                    f"{' or '.join(readers)}"
                )
