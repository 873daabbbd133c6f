"""Which samples rejection sampling keeps, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.sample_selection_config import KeepConfig
from strop.run.samples.selection import select_samples
from strop.trainer.config import Config

SCORES = [0.5, 1.0, 0.2, 1.0, 0.0, math.nan, 1.0, -1.0]
PROMPTS = ["a", "b", "a", "b", "c", "c", "b", "a"]


@pytest.mark.parametrize(
    ("best", "min_score", "kept"),
    [
        (1, None, [0, 1, 4]),  # a: 0.5; b: the first of three equal ones; c: 0, since the other is no number
        (2, None, [0, 1, 2, 3, 4]),
        (None, 0.5, [0, 1, 3, 6]),
        (None, 1.0, [1, 3, 6]),
        (2, 1.0, [1, 3]),
        (1, 2.0, []),
        (None, None, [0, 1, 2, 3, 4, 6, 7]),
    ],
)
def test_the_best_of_each_prompt_are_kept(best: int | None, min_score: float | None, kept: list[int]) -> None:
    assert select_samples(SCORES, PROMPTS, best=best, min_score=min_score) == kept


def test_every_sample_that_is_kept_counts_the_same() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    rewards = torch.tensor([0.25, -3.0])
    advantages, returns = ADV_ESTIMATOR_REGISTRY["raft"](rewards=rewards, response_mask=mask)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
    assert returns is advantages
    with pytest.raises(ValueError, match="rewards must be finite"):
        ADV_ESTIMATOR_REGISTRY["raft"](rewards=torch.tensor([0.0, math.inf]), response_mask=mask)


def test_settings_under_which_nothing_is_chosen_or_twice_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set algorithm\.keep\.best or algorithm\.keep\.min_score"):
        Config(algorithm=AlgorithmConfig(adv_estimator="raft"))
    with pytest.raises(ValueError, match=r"algorithm\.keep and algorithm\.resampling=pow both choose"):
        AlgorithmConfig(keep=KeepConfig(best=1), resampling="pow")
    assert not KeepConfig().is_on
    assert KeepConfig(min_score=0.0).is_on
