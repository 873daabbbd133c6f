"""Settings that do not go with an estimator are refused with what to do; those that do are taken."""

from __future__ import annotations

from operator import attrgetter

import pytest
import yaml

from strop.config import ConfigError
from strop.trainer.config import Config
from strop.trainer.loading import load

TURNS = ("agent.default_agent=env_agent", "agent.credit=turn", "agent.environment.name=guess")


def config(*overrides: str) -> Config:
    return load(overrides=["model.path=model", "data.train_files=[train.jsonl]", *overrides])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm.adv_estimator=gdpo"], "takes the parts of the reward one by one"),
        (["algorithm.reward_keys=[a]"], "adv_estimator=grpo takes the whole reward: use gdpo, or remove it"),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.reward_keys=[a]", "algorithm.use_kl_in_reward=true"],
            "adv_estimator=gdpo: it takes the parts of the reward.* Use algorithm.use_kl_loss=true",
        ),
        (
            ["algorithm.adv_estimator=maxrl", "algorithm.use_kl_in_reward=true"],
            "adv_estimator=maxrl: it divides by the mean reward",
        ),
        (["algorithm.anchor_similarity=0.5"], r"anchor_similarity is 0.5, .*=grpo compares no states"),
        (["algorithm.adv_estimator=gigpo"], "must be a sample of its own: set agent.credit=turn"),
        (["algorithm.adv_estimator=raft"], "imitates every sample that is kept"),
        *(
            (
                ["algorithm.adv_estimator=gdpo", "algorithm.reward_keys=[a]", *setting],
                f"{key} changes the whole",
            )
            for key, setting in {
                "reward.overlong_buffer": ["reward.overlong_buffer=2", "reward.overlong_penalty=1"],
                "reward.weight": ["reward.weight=2"],
                "reward_model.path": ["reward_model.path=judge"],
            }.items()
        ),
        (
            ["algorithm.adv_estimator=remax", "reward_model.path=judge"],
            "reward_model.path changes the rewards of samples, but not those of the greedy answers",
        ),
        (
            ["algorithm.adv_estimator=remax", "trainer.skip_rollout=a"],
            "greedy answers, which are not recorded",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=gdpo", "algorithm.reward_keys=[a, score]", "algorithm.use_kl_loss=true"],
        ["algorithm.adv_estimator=maxrl"],
        ["algorithm.use_kl_in_reward=true"],
        ["algorithm.adv_estimator=raft", "algorithm.keep.best=1"],
        ["algorithm.adv_estimator=raft", "algorithm.keep.min_score=1"],
        ["algorithm.adv_estimator=remax", "reward.weight=2"],
        ["reward_model.path=judge", "reward.weight=2"],
        ["trainer.skip_rollout=a"],
        ["algorithm.adv_estimator=gigpo", "algorithm.anchor_similarity=0.5", *TURNS],
    ],
)
def test_what_does_is_taken(overrides: list[str]) -> None:
    made = config(*overrides)
    for key, value in (one.split("=", 1) for one in overrides):
        found = attrgetter(key)(made)
        assert (list(found) if isinstance(found, tuple) else found) == yaml.safe_load(value)


@pytest.mark.parametrize(
    ("overrides", "corrects"),
    [
        ([], False),
        (["algorithm.old_log_probs=rollout"], True),
        (["algorithm.correction.weights=token"], True),
        (["algorithm.old_log_probs=rollout", "algorithm.policy_loss=reinforce"], False),
    ],
)
def test_a_loss_knows_who_sampled_by_its_ratio_or_by_a_correction(
    overrides: list[str], corrects: bool
) -> None:
    assert config(*overrides).algorithm.corrects_for_age is corrects
