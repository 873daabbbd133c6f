"""Settings that do nothing beside the others are named before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import Project, train_in

import strop.config.presets as presets
from strop.algorithms.kl import kl_penalty
from strop.config import load_config
from strop.trainer.checks.idle_settings import idle_settings
from strop.trainer.config import Config
from strop.trainer.loading import load

PRESETS = sorted(file.stem for file in (Path(presets.__path__[0]) / "algorithm").glob("*.yaml"))


def warnings(*settings: str) -> list[str]:
    return idle_settings(load_config(Config, overrides=["model.path=tiny", *settings]))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["algorithm.kl_loss_coef=0.5"],
            ("WARNING: algorithm.kl_loss_coef is set, and algorithm.use_kl_loss is false, so it does nothing: set that "
            "to true for a KL term in the loss"),
        ),
        (
            ["algorithm.kl_ctrl.kl_coef=0.3", "algorithm.kl_penalty=k3"],
            ("WARNING: algorithm.kl_ctrl.kl_coef, algorithm.kl_penalty are set, and algorithm.use_kl_in_reward is "
            "false, so they do nothing: set that to true for a KL penalty in the reward"),
        ),
        (
            ["algorithm.cliprange_value=0.2", "critic.optim.lr=1e-3"],
            ("WARNING: algorithm.cliprange_value is set, and algorithm.adv_estimator=grpo has no critic, so it does "
            "nothing: use gae for PPO with one"),
        ),
        (
            ["algorithm.policy_loss=sapo", "algorithm.clip_ratio=0.1"],
            ("WARNING: algorithm.clip_ratio is set, and algorithm.policy_loss=sapo takes no such number, so it does "
            "nothing: see `strop config explain algorithm.policy_loss`, or leave it out"),
        ),
        (
            ["algorithm.policy_loss=gspo", "algorithm.clip_ratio=0.1", "algorithm.clip_ratio_c=4"],
            ("WARNING: algorithm.clip_ratio_c is set, and algorithm.policy_loss=gspo takes no such number, so it does "
            "nothing: see `strop config explain algorithm.policy_loss`, or leave it out"),
        ),
    ],
)  # fmt: skip
def test_a_setting_that_does_nothing_is_named(settings: list[str], sentence: str) -> None:
    assert warnings(*settings) == [sentence]


@pytest.mark.parametrize(("kind", "holds"), [("k1", False), ("kl", False), ("k1+", True), ("k2", True)])
def test_a_kl_term_without_a_gradient_is_named(kind: str, holds: bool) -> None:
    """The expected gradient over all tokens of a distribution: sum of p times that of the estimate."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (log_probs.detach().exp() * kl_penalty(log_probs, reference, kind)).sum().backward()
    assert logits.grad is not None
    assert (float(logits.grad.norm()) > 1e-3) == holds
    said = warnings("algorithm.use_kl_loss=true", f"algorithm.kl_loss_type={kind}")
    assert [f"algorithm.kl_loss_type={kind} has a gradient" in line for line in said] == [True] * (not holds)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["algorithm.kl_loss_coef=0", "algorithm.kl_ctrl.kl_coef=0"],
        ["algorithm.kl_loss_coef=0", "algorithm.kl_loss_type=k1", "algorithm.use_kl_loss=true"],
        ["algorithm.kl_loss_coef=0", "algorithm.kl_loss_type=k1"],
        ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.5", "algorithm.kl_loss_type=k2"],
        ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "algorithm.cliprange_value=0.2"],
        ["algorithm.policy_loss=cispo", "algorithm.clip_ratio_high=4"],
    ],
)
def test_a_setting_that_is_used_is_not(settings: list[str]) -> None:
    assert warnings(*settings) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_settings_that_do_nothing(preset: str) -> None:
    asked = {
        "gdpo": ["algorithm.reward_keys=[score]"],
        "gigpo": ["agent.credit=turn"],
        "dapo": ["data.max_response_tokens=8192"],
    }
    teacher = ["teacher.path=teacher"] if "distillation" in preset else []
    assert warnings("trainer.max_steps=3", *asked.get(preset, []), *teacher, f"algorithm={preset}") == []


def test_the_quickstart_has_none() -> None:
    assert idle_settings(load("quickstart", overrides=["model.path=tiny"])) == []


def test_groups_that_are_judged_by_what_is_not_trained_on_are_named() -> None:
    judged = ["trainer.max_steps=1", "algorithm.filter_groups.enable=true", "reward_model.path=judge"]
    assert warnings(*judged) == []
    (said,) = warnings(*judged, "reward.weight=0")
    assert "judges a group by its scores without the reward model" in said


def test_a_run_says_so(project: Project, tmp_path: Path) -> None:
    settings = ["trainer.max_steps=1", "data.val_files=[]", "algorithm.kl_loss_coef=0.5"]
    said = train_in(tmp_path / "run", project.config(*settings)).said
    assert [line for line in said if "algorithm.kl_loss_coef is set" in line]
