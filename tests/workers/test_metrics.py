from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.batch_metrics import critic_metrics, group_metrics, mean_max_min, mismatch_metrics
from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto
from strop.protocol.columns import from_padded
from strop.workers.metrics import (
    TURNS,
    episode_metrics,
    length_metrics,
    reward_outcome_metrics,
    throughput_metrics,
    timing_metrics,
)
from strop.workers.off_policy_metrics import batch_off_policy_metrics, off_policy_metrics
from strop.workers.reports import EpisodeReport


def test_critic_metrics_average_over_samples_and_over_valid_tokens() -> None:
    metrics = critic_metrics(
        scores=[0.0, 1.0],
        rewards=torch.tensor([-1.0, 2.0]),
        advantages=torch.tensor([[1.0, 2.0], [6.0, math.nan]]),
        returns=torch.tensor([[1.0, 1.0], [4.0, 99.0]]),
        response_mask=torch.tensor([[1, 1], [1, 0]]),
    )
    assert metrics == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.5,
        "critic/rewards/max": 2.0,
        "critic/rewards/min": -1.0,
        "critic/advantages/mean": 3.0,
        "critic/advantages/max": 6.0,
        "critic/advantages/min": 1.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 4.0,
        "critic/returns/min": 1.0,
    }


def test_lengths_by_hand() -> None:
    metrics = length_metrics(
        prompt_lengths=[4, 8],
        response_lengths=torch.tensor([2, 10]),
        is_aborted=[True, False],
        is_cut=[False, False],
        max_prompt_tokens=8,
        max_response_tokens=10,
    )
    assert metrics == {
        "prompt_length/mean": 6.0,
        "prompt_length/max": 8.0,
        "prompt_length/min": 4.0,
        "prompt_length/clip_ratio": 0.5,
        "response_length/mean": 6.0,
        "response_length/max": 10.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.5,
        "response_length_non_aborted/mean": 10.0,
        "response_length_non_aborted/max": 10.0,
        "response_length_non_aborted/min": 10.0,
        "response_length_non_aborted/clip_ratio": 1.0,
        "response/aborted_ratio": 0.5,
    }


def test_nothing_is_clipped_below_the_configured_limit() -> None:
    # Compared with the longest of the batch, the clip ratio would never be below 1/B.
    metrics = length_metrics(
        prompt_lengths=[5, 5],
        response_lengths=[7, 7],
        is_aborted=[False, False],
        is_cut=[False, False],
        max_prompt_tokens=6,
        max_response_tokens=8,
    )
    assert metrics["response_length/clip_ratio"] == 0.0
    assert metrics["prompt_length/clip_ratio"] == 0.0


def test_an_episode_that_the_limit_ended_is_clipped_however_short_it_is() -> None:
    reports = [
        EpisodeReport(
            uid="a",
            sample_index=n,
            data_source="",
            num_prompt_tokens=1,
            num_response_tokens=2,
            stop_reason=reason,
        )
        for n, reason in enumerate(["length", "stop", "max_tokens", "aborted"])
    ]
    metrics = episode_metrics(reports, max_prompt_tokens=5, max_response_tokens=5)
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["response_length_non_aborted/clip_ratio"] == pytest.approx(1 / 3)


def test_turns() -> None:
    assert mean_max_min(TURNS, [2, 4, 6]) == {
        "num_turns/min": 2.0,
        "num_turns/max": 6.0,
        "num_turns/mean": 4.0,
    }


def test_statistics_over_nothing_are_left_out() -> None:
    none = torch.zeros(0)
    assert mean_max_min(TURNS, []) == {}
    assert group_metrics(none, none.long()) == {}
    assert mismatch_metrics(none[None], none[None], none[None]) == {"training/rollout_probs_diff_valid": 0.0}
    metrics = length_metrics(
        prompt_lengths=[],
        response_lengths=[],
        is_aborted=[],
        is_cut=[],
        max_prompt_tokens=1,
        max_response_tokens=1,
    )
    assert metrics == {}


def test_times_per_token() -> None:
    seconds = {"gen": 2.0, "update_actor": 3.0, "reward_model": 0.5}
    assert timing_metrics(seconds, num_response_tokens=100, num_total_tokens=600) == {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 3.0,
        "timing_s/reward_model": 0.5,
        "timing_per_token_ms/gen": 20.0,
        "timing_per_token_ms/update_actor": 5.0,
    }
    empty = timing_metrics({"gen": 2.0}, num_response_tokens=0, num_total_tokens=0)
    assert empty["timing_per_token_ms/gen"] == 0.0


def test_throughput_is_per_second_and_device() -> None:
    assert throughput_metrics(num_total_tokens=600, step_s=2.0, num_devices=3) == {
        "perf/total_num_tokens": 600.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 100.0,
    }


def test_group_shares_by_hand() -> None:
    # Groups: 5 solved by all, 2 by none, 8 mixed, 9 all at a half, 1 alone.
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.5])
    group_ids = torch.tensor([5, 2, 5, 2, 9, 8, 8, 1, 9])
    assert group_metrics(rewards, group_ids) == {
        "rollout/groups_all_max": 0.2,
        "rollout/groups_all_min": 0.2,
        "rollout/groups_mixed": 0.2,
        "rollout/groups_all_equal": 0.2,
        "rollout/groups_single": 0.2,
    }


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.0])), min_size=1, max_size=15
    )
)
@settings(max_examples=40, deadline=None)
def test_group_shares_add_up_to_one(rows: list[tuple[int, float]]) -> None:
    metrics = group_metrics(torch.tensor([r for _, r in rows]), torch.tensor([g for g, _ in rows]))
    assert sum(metrics.values()) == pytest.approx(1.0)


def test_reward_outcomes_are_counted() -> None:
    kinds = ["score", "timeout", "score", "error"]
    found = reward_outcome_metrics(kinds)  # type: ignore[arg-type]
    counts = {"ok": 2, "error": 1, "timeout": 1, "infrastructure": 0}
    assert found == {f"reward/{name}": count for name, count in counts.items()} | {
        f"reward/{name}_share": count / 4 for name, count in counts.items()
    }


def all_mismatch(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Of tokens and of samples, which are the rows of the mask."""
    valid = mask.bool()
    rows = torch.arange(mask.shape[0])[:, None].expand(mask.shape)[valid]
    return mismatch_metrics(train, rollout, mask) | off_policy_metrics(train[valid], rollout[valid], rows)


def test_equal_log_probs_have_no_mismatch() -> None:
    log_probs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    metrics = all_mismatch(log_probs, log_probs.clone(), torch.ones(3, 4))
    for name in ("probs_diff_max", "probs_diff_mean", "probs_diff_std", "log_probs_diff_max"):
        assert metrics[f"training/rollout_{name}"] == 0.0
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff"):
        assert metrics[f"rollout_corr/{name}"] == 0.0
    assert metrics["rollout_corr/ppl_ratio"] == 1.0
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0, abs=1e-12)


def test_mismatch_by_hand() -> None:
    # Sample 0: trainer 1/2, 1/4, rollout 1/4, 1/4. Sample 1: trainer 1/8, rollout 1/2. rho = ln 2, 0, -ln 4.
    ln2 = math.log(2)
    train = torch.tensor([[-ln2, -2 * ln2], [-3 * ln2, math.nan]], dtype=torch.float64)
    rollout = torch.tensor([[-2 * ln2, -2 * ln2], [-ln2, 0.0]], dtype=torch.float64)
    metrics = all_mismatch(train, rollout, torch.tensor([[1, 1], [1, 0]]))
    expected = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": 3 / 8,
        "training/rollout_probs_diff_mean": (1 / 4 + 0 + 3 / 8) / 3,
        "training/rollout_probs_diff_std": statistics.stdev([1 / 4, 0, 3 / 8]),
        "training/rollout_log_probs_diff_max": 2 * ln2,
        "training/rollout_actor_probs_pearson_corr": statistics.correlation(
            [1 / 2, 1 / 4, 1 / 8], [1 / 4, 1 / 4, 1 / 2]
        ),
        "rollout_corr/kl": ln2 / 3,
        "rollout_corr/k3_kl": ((2 - 1 - ln2) + 0 + (1 / 4 - 1 + 2 * ln2)) / 3,
        "rollout_corr/chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
        "rollout_corr/chi2_seq": (4 + 1 / 16) / 2 - 1,
        "rollout_corr/training_log_ppl": (1.5 * ln2 + 3 * ln2) / 2,
        "rollout_corr/training_ppl": (2**1.5 + 8) / 2,
        "rollout_corr/rollout_log_ppl": (2 * ln2 + ln2) / 2,
        "rollout_corr/rollout_ppl": (4 + 2) / 2,
        "rollout_corr/log_ppl_diff": (-0.5 * ln2 + 2 * ln2) / 2,
        "rollout_corr/log_ppl_abs_diff": (0.5 * ln2 + 2 * ln2) / 2,
        "rollout_corr/log_ppl_diff_max": 2 * ln2,
        "rollout_corr/log_ppl_diff_min": -0.5 * ln2,
        "rollout_corr/ppl_ratio": (2**-0.5 + 4) / 2,
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_flat_and_padded_layouts_give_the_same_mismatch() -> None:
    generator = torch.Generator().manual_seed(0)
    train = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    rollout = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([4, 1, 3])
    inside = torch.arange(4)[None, :] < lengths[:, None]
    mask = inside & (torch.rand(3, 4, generator=generator) > 0.3)
    padded = mismatch_metrics(train, rollout, mask)
    flat = mismatch_metrics(train[inside], rollout[inside], mask[inside])
    assert flat == pytest.approx(padded, abs=1e-12)
    columns = {"log_probs": train, "rollout_log_probs": rollout, "response_mask": mask}
    rows = {name: from_padded(column, inside) for name, column in columns.items()}
    made = batch_off_policy_metrics(
        DataProto.from_dict(rows | {"responses": rows["response_mask"]}), AlgorithmConfig()
    )
    assert made | padded == pytest.approx(all_mismatch(train, rollout, mask), abs=1e-12)


def test_a_constant_side_has_no_correlation() -> None:
    metrics = mismatch_metrics(torch.zeros(1, 2), torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2))
    assert "training/rollout_actor_probs_pearson_corr" not in metrics


def test_huge_differences_stay_finite() -> None:
    metrics = all_mismatch(torch.tensor([[-5e3, 0.0]]), torch.tensor([[0.0, -5e3]]), torch.ones(1, 2))
    assert metrics["training/rollout_log_probs_diff_max"] == 5e3
    for name in ("k3_kl", "chi2_token", "chi2_seq"):
        assert math.isfinite(metrics[f"rollout_corr/{name}"])
