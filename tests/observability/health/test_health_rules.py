"""The rules on a run's metrics, each on numbers made up for it: when it speaks, and when it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from strop.observability.health import RULES, HealthMonitor, History

ROOT = Path(__file__).parents[3]


def history(num_steps: int, **metrics: Any) -> History:
    """Each metric as a number for all steps, or a list of one number per step; `a__b` stands for `a/b`."""
    made = History()
    for step in range(num_steps):
        made.add(
            {
                name.replace("__", "/"): value[step] if isinstance(value, list) else value
                for name, value in metrics.items()
            }
        )
    return made


def flat(value: float) -> dict[str, float]:
    return {"critic__advantages__max": value, "critic__advantages__min": -value}


NAN, INF = math.nan, math.inf
GROUPS = {"rollout__groups_all_min": 0.9, "rollout__groups_all_max": 0.0}
SCORED = {"reward__timeout": 0.0, "reward__ok": 90.0}
VAL = "val-core__gsm8k__acc__mean@1"
LEAST = {"critic__score__min": 0.0}
LOST = {"critic__score__mean": [0.4, 0.0, 0.0], "actor__entropy": [0.7, 1.5, 1.5]}
RISING = [0.1] * 5 + [0.5] * 35

SPEAKS: list[tuple[str, History, str]] = [
    ("no_signal", history(3, **flat(0.0), **GROUPS, response_length__clip_ratio=0.98), "98 % of the answers are cut"),
    ("no_signal", history(3, **flat(1e-9), rollout__groups_all_max=1.0), "use harder ones"),
    ("no_signal", history(3, **flat(0.0), rollout__groups_all_equal=1.0), "does not tell the samples of a prompt"),
    ("no_signal", history(3, **flat(0.0), **GROUPS), "0 % are solved by every sample, 90 % by none - "),
    ("no_signal", history(3, **flat(0.0), **GROUPS), "for 3 steps: 0 % of the answers are cut at"),
    ("no_signal", history(3, **flat(0.0), **GROUPS), "warm the model up"),
    ("no_signal", history(1, **flat(0.0), **GROUPS), "in the first step: 0 % of the answers are cut"),
    ("few_groups_teach", history(10, rollout__groups_mixed=0.1, **GROUPS), "only 10 % of the groups can teach"),
    ("entropy_collapse", history(20, actor__entropy=0.01, critic__score__mean=0.3), "fallen to 0.010 nats"),
    ("entropy_growth", history(10, actor__entropy=[1.0] * 5 + [2.5] * 5), "from 1.00 to 2.50 nats"),
    ("truncation", history(3, response_length__clip_ratio=0.6), "60 % of the answers are cut"),
    # Twenty steps before the last five of forty lie steps 16 to 20 (0.1 each); the last five are 0.4.
    ("truncation", history(40, response_length__clip_ratio=[0.1] * 30 + [0.4] * 10), "rose from 10 % to 40 %"),
    ("policy_jump", history(3, actor__ppo_kl=-0.5), "a KL of 0.50 nats"),
    ("policy_jump", history(3, actor__pg_clipfrac=0.4), "40 % of the tokens are clipped"),
    # Seen with learning rates of 5e-3 and of 1 on the quickstart: every KL and clipped share of these steps is 0.
    (
        "policy_lost",
        history(3, **LEAST, critic__score__mean=[0.43, 0.05, 0.0], actor__entropy=[0.69, 1.47, 1.5], actor__ppo_kl=0.0),
        "from 0.43 to 0.05 and entropy went from 0.69 to 1.5 nats per token",
    ),
    ("policy_lost", history(3, **LEAST, critic__score__mean=[0.1, 0.0, 0.0], actor__entropy=[1.3, 2.2, 2.7]), "0.1 to"),
    ("policy_lost", history(3, **LEAST, critic__score__mean=[0.5, 0.0, 0.0], actor__entropy=[0.7, 0.01, 0]), "0.01"),
    (
        "policy_lost",
        history(30, **LEAST, critic__score__mean=[0.4] * 9 + [0.1] * 21, actor__entropy=[0.7] * 9 + [1.4] * 21),
        "from 0.4 to 0.1",
    ),
    ("kl_explosion", history(23, actor__kl_loss=[0.01] * 20 + [0.2] * 3), "from 0.01 to 0.2 within 3 steps"),
    ("gradient_not_finite", history(9, actor__skipped_updates=[0.0, 1.0, 1.0] * 3), "6 of the last 10 steps"),
    ("gradient_not_finite", history(4, actor__grad_norm=[1.0, NAN, INF, NAN]), "not finite"),
    ("gradient_zero", history(3, actor__grad_norm=0.0, **flat(1.0)), "exactly 0 for 3 steps"),
    ("gradient_spike", history(6, actor__grad_norm=[0.3, 0.4, 0.4, 0.5, 0.4, 8.0]), "is 8, 20 times its median of 0.4"),
    ("scorer_failures", history(10, reward__error=[0.0] * 5 + [10.0] * 5, **SCORED), "10.0 % of the samples"),
    ("mismatch", history(3, training__rollout_probs_diff_mean=0.02), "differ by 0.020 on average"),
    (
        "mismatch",
        history(10, training__rollout_probs_diff_mean=[0.001] * 5 + [0.004] * 5),
        "by 0.004 on average, 0.001 at the start",
    ),
    (
        "longer_but_worse",
        history(20, response_length__mean=[100.0] * 10 + [300.0] * 10, critic__score__mean=[0.6] * 10 + [0.4] * 10),
        "from 100 to 300 tokens while their score fell from 0.60 to 0.40",
    ),
    (
        "held_out_falls",
        history(40, critic__score__mean=RISING, **{VAL: [0.9] * 37 + [0.8, 0.7, 0.6]}),
        "fell from 0.90 to 0.60 over 3 validations",
    ),
    ("learning_rate_zero", history(3, actor__lr=0.0), "nothing is learned"),
    ("useless_critic", history(20, critic__vf_explained_var=-0.1), "for 20 steps"),
    (
        "process_rewards_swamp",
        history(3, prm__advantage_share=[0.97, 0.98, 0.99], rollout__groups_mixed=0.6),
        "process rewards make 98 % of the advantages, so right and wrong hardly count - set",
    ),
    # Seen with the formula alone on the quickstart, where one answer in ten is right: the first six steps.
    (
        "process_rewards_swamp",
        history(7, prm__advantage_share=[0.07, 0.18, 0.44, 0.85, 1.0, 1.0, 1.0],
                rollout__groups_mixed=[0.47, 0.41, 0.22, 0.06, 0.0, 0.0, 0.0]),
        "for in 0 % of the groups alone outcomes differ",
    ),
    ("process_rewards_at_chance", history(5, prm__pair_acc=[0.4, 0.6, 0.5, 0.4, 0.6]), "in 50 % of the pairs"),
    ("tool_fails", history(3, tools__a__calls__mean=[2.0, 1.5, 1.0], tools__a__errors__mean=[2.0, 1.5, 1.0]), "'a'"),
]  # fmt: skip

SILENT: list[tuple[str, History]] = [
    ("no_signal", history(1, **flat(0.2))),
    ("no_signal", history(3, critic__advantages__max=[0.5, 0.0, 0.0], critic__advantages__min=0.0)),
    ("no_signal", history(4, critic__advantages__max=[0.0, 0.0, 0.5, 0.0], critic__advantages__min=0.0)),
    ("no_signal", history(5, actor__lr=1.0)),
    ("no_signal", history(3, **flat(0.0), **GROUPS, distillation__loss=0.3)),
    ("no_signal", history(3, **flat(0.0), **GROUPS, **LEAST, **LOST)),
    ("few_groups_teach", history(10, rollout__groups_mixed=0.1, distillation__loss=0.3)),
    ("few_groups_teach", history(9, rollout__groups_mixed=0.1)),
    ("few_groups_teach", history(10, rollout__groups_mixed=0.2)),
    ("few_groups_teach", history(10, rollout__groups_mixed=0.0, rollout__groups_single=1.0)),
    ("entropy_collapse", history(20, actor__entropy=0.06)),
    ("entropy_collapse", history(40, actor__entropy=0.01, critic__score__mean=[s / 40 for s in range(40)])),
    ("entropy_collapse", history(20, actor__entropy=0.01, rollout__groups_all_max=0.9)),
    ("entropy_growth", history(10, actor__entropy=[0.1] * 5 + [0.4] * 5)),
    ("entropy_growth", history(20, actor__entropy=[1.0] * 10 + [2.5] * 10, critic__score__mean=[0.1] * 9 + [1] * 11)),
    ("truncation", history(40, response_length__clip_ratio=0.4)),
    ("policy_jump", history(3, actor__ppo_kl=0.1, actor__pg_clipfrac=[0.4, 0.4, 0.1])),
    ("policy_lost", history(3, **LEAST, critic__score__mean=[0.4, 0.21, 0.2], actor__entropy=[0.7, 1.5, 1.5])),
    ("policy_lost", history(3, **LEAST, critic__score__mean=[0.4, 0.1, 0.0], actor__entropy=[0.7, 1.0, 1.5])),
    ("policy_lost", history(3, **LEAST, critic__score__mean=[0.4, 0.0, 0.3], actor__entropy=[0.7, 1.5, 0.7])),
    ("policy_lost", history(2, **LEAST, critic__score__mean=[0.4, 0.0], actor__entropy=[0.7, 1.5])),
    ("policy_lost", history(9, critic__score__mean=0.4, actor__entropy=0.7)),
    ("truncation", history(3, **LEAST, **LOST, response_length__clip_ratio=[0.0, 1.0, 1.0])),
    ("kl_explosion", history(23, actor__kl_loss=[0.001] * 20 + [0.05] * 3)),
    ("gradient_not_finite", history(20, actor__skipped_updates=[1.0] * 10 + [0.0] * 10)),
    ("gradient_zero", history(3, actor__grad_norm=0.0, **flat(0.0))),
    ("gradient_spike", history(5, actor__grad_norm=[0.4, 0.4, 0.4, 0.4, 8.0])),
    ("gradient_spike", history(30, actor__grad_norm=[0.4] * 29 + [3.9])),
    ("scorer_failures", history(10, reward__error=1.0, **SCORED)),
    ("mismatch", history(10, training__rollout_probs_diff_mean=[1e-7] * 5 + [9e-4] * 5)),
    (
        "mismatch",
        history(3, training__rollout_probs_diff_mean=0.02, training__off_policy__trajectory_staleness_worst__max=1.0),
    ),
    ("longer_but_worse", history(20, response_length__mean=[100.0] * 10 + [300.0] * 10, critic__score__mean=0.5)),
    ("held_out_falls", history(40, critic__score__mean=0.5, **{VAL: [0.9] * 37 + [0.8, 0.7, 0.6]})),
    ("held_out_falls", history(40, critic__score__mean=RISING, **{VAL: [0.9] * 37 + [0.8, 0.8, 0.6]})),
    ("learning_rate_zero", history(3, actor__lr=[0.0, 0.0, 1e-6])),
    ("useless_critic", history(30, critic__vf_explained_var=[-1.0] * 15 + [0.1] + [-1.0] * 14)),
    ("process_rewards_swamp", history(3, prm__advantage_share=[0.97, 0.9, 0.99], rollout__groups_mixed=0.6)),
    ("process_rewards_swamp", history(2, prm__advantage_share=0.97, rollout__groups_mixed=0.6)),
    ("process_rewards_at_chance", history(4, prm__pair_acc=0.3)),
    ("process_rewards_at_chance", history(5, prm__pair_acc=0.55)),
    ("tool_fails", history(3, tools__a__calls__mean=2.0, tools__a__errors__mean=[2.0, 1.9, 2.0])),
    ("tool_fails", history(2, tools__a__calls__mean=2.0, tools__a__errors__mean=2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "seen", "words"), SPEAKS)
def test_a_rule_names_its_pattern_with_numbers_and_advice(name: str, seen: History, words: str) -> None:
    sentence = RULES[name](seen)
    assert words in sentence
    assert " - " in sentence, "what was seen - what to do"
    assert "\n" not in sentence


@pytest.mark.parametrize(("name", "seen"), SILENT)
def test_a_rule_is_silent_below_its_threshold(name: str, seen: History) -> None:
    assert RULES[name](seen) == ""


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_shown_speaking_and_silent_and_stands_on_its_page(name: str) -> None:
    assert name in {case[0] for case in SPEAKS}
    assert name in {case[0] for case in SILENT}
    assert RULES[name](History()) == ""
    assert f"| `{name}` |" in (ROOT / "docs" / "preflight.md").read_text()


def test_a_healthy_run_hears_nothing() -> None:
    monitor = HealthMonitor()
    for step in range(100):
        share = step / 100
        found = monitor.observe(
            {
                "critic/advantages/max": 1.5, "critic/advantages/min": -1.5, "rollout/groups_mixed": 0.8 - 0.5 * share,
                "rollout/groups_all_max": share / 2, "rollout/groups_all_min": 0.1, "actor/entropy": 1.0 - 0.9 * share,
                "actor/grad_norm": 0.4 + 0.2 * (step % 3), "actor/ppo_kl": 1e-3, "actor/pg_clipfrac": 0.01,
                "actor/kl_loss": 0.01 * step, "actor/lr": 1e-6 * min(step, 10) / 10, "actor/skipped_updates": 0.0,
                "critic/score/mean": 0.2 + 0.7 * share, "response_length/mean": 100.0 + step,
                "response_length/clip_ratio": 0.1, "training/rollout_probs_diff_mean": 1e-6,
                "reward/ok": 64.0, "reward/error": 0.0, "reward/timeout": 0.0, VAL.replace("__", "/"): 0.2 + share / 2,
            }
        )  # fmt: skip
        assert not found, step


def test_each_rule_speaks_once_also_after_a_continuation() -> None:
    numbers = {"actor/lr": 0.0}
    monitor = HealthMonitor()
    told = [[one.name for one in monitor.observe(numbers)] for _ in range(5)]
    assert told == [[], [], ["learning_rate_zero"], [], []]
    # Continued after two steps: the third completes the pattern, unless it was told before.
    again = HealthMonitor(earlier=[numbers, numbers])
    assert [one.name for one in again.observe(numbers)] == ["learning_rate_zero"]
    assert not HealthMonitor(earlier=[numbers, numbers], reported=["learning_rate_zero"]).observe(numbers)


def test_the_history_keeps_the_first_and_the_newest_values() -> None:
    seen = history(100, x=[float(step) for step in range(100)])
    assert seen.first("x") == 2.0, "the mean of 0 to 4"
    assert seen.last("x", 3) == [97.0, 98.0, 99.0]
    assert seen.last("x", 2, before=10) == [88.0, 89.0]
    assert seen.last("x", 41) == [], "forty are kept"
    assert seen.mean("x", 40) == 79.5
    assert (seen.count("x"), seen.count("y"), seen.first("y"), seen.mean("y", 1)) == (100, 0, None, None)
    assert history(4, x=1.0).first("x") is None
