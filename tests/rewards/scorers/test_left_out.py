"""Built-in scorers where a reward model alone rewards."""

from __future__ import annotations

import pytest

from strop.rewards.config import RewardConfig
from strop.rewards.scorers.dispatch import has_scorer, known_data_sources
from strop.rewards.scorers.loading import load_built_in
from strop.rewards.worker_setup import function_setups

CALL = {"solution_str": "#### 3", "ground_truth": "3", "extra_info": {}}


def test_rows_that_nobody_scores_are_no_error_where_a_reward_model_alone_counts() -> None:
    (setup,) = function_setups(RewardConfig(weight=0.0), "")
    scorer = load_built_in(setup)
    scorer.prepare("mine")
    assert scorer.read(scorer({"data_source": "mine", **CALL})).score == 0.0
    known = scorer.read(scorer({"data_source": "openai/gsm8k", **CALL}))
    assert known.score == 1.0, "a source that has a scorer is measured"
    for source in ("strop/exact", "lighteval/MATH"):
        for truth in (None, ""):
            untold = scorer({"data_source": source, **CALL, "ground_truth": truth})
            assert scorer.read(untold).score == 0.0


def test_else_they_are_an_error() -> None:
    (setup,) = function_setups(RewardConfig(), "")
    scorer = load_built_in(setup)
    for refused in (lambda: scorer.prepare("mine"), lambda: scorer({"data_source": "mine", **CALL})):
        with pytest.raises(ValueError, match="no built-in scorer for data_source 'mine'"):
            refused()


def test_every_source_with_a_scorer_has_one() -> None:
    assert all(has_scorer(name.replace("*", "x")) for name in known_data_sources())
    assert not has_scorer("mine")
