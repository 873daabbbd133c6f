"""Every number of the algorithm's configuration at the edge of what is allowed, and just beyond."""

from __future__ import annotations

import math
from typing import Any

import pytest

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.algorithms.reward_kl_config import KlControlConfig
from strop.algorithms.rollout_correction_config import STATISTICS, CorrectionConfig, read_rule
from strop.utils.setting_text import setting_text

TINY = 1e-12
NAN, INF = math.nan, math.inf
SCALED: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum-norm"}
WEIGHTED: dict[str, Any] = {"weights": "token"}
MASKED: dict[str, Any] = {"weights": "token", "mode": "mask"}


@pytest.mark.parametrize(
    ("record", "given", "field", "allowed", "refused"),
    [
        (KlControlConfig, {}, "kl_coef", [0.0, 5.0], [-TINY, NAN, INF]),
        (KlControlConfig, {"type": "adaptive"}, "kl_coef", [TINY, 5.0], [0.0, -1.0, INF]),
        (KlControlConfig, {}, "horizon", [1, 10], [0, -1]),
        (KlControlConfig, {}, "target_kl", [TINY, 5.0], [0.0, -1.0, NAN, INF]),
        (KlControlConfig, {}, "type", ["fixed", "adaptive"], ["adaptiv"]),
        (FilterGroupsConfig, {"enable": True}, "max_rounds", [1, 2], [0, -1]),
        (FilterGroupsConfig, {"enable": True}, "defer_failed", [0, 1], [-1]),
        (FilterGroupsConfig, {"enable": True}, "metric", ["acc", "score"], ["accuracy"]),
        (FilterGroupsConfig, {"enable": True}, "at_limit", ["train", "stop"], ["skip"]),
        (FilterGroupsConfig, {"enable": True, "highest_mean": 0.5}, "lowest_mean", [0.5, 0.0], [0.5 + TINY]),
        (AlgorithmConfig, {}, "clip_ratio", [0.0, 5.0], [-TINY, NAN, INF]),
        (AlgorithmConfig, {}, "clip_ratio_low", [0.0, 5.0, None], [-TINY, NAN, INF]),
        (AlgorithmConfig, {}, "clip_ratio_high", [0.0, 5.0, None], [-TINY, NAN, INF]),
        (AlgorithmConfig, {}, "clip_ratio_c", [1 + TINY, 2.0, INF], [1.0, 0.0, NAN]),
        (AlgorithmConfig, {}, "entropy_coeff", [-1.0, 0.0, 1.0], [NAN, INF, -INF]),
        (AlgorithmConfig, {"use_kl_loss": True}, "kl_loss_coef", [-1.0, 0.0, 1.0], [NAN, INF]),
        (AlgorithmConfig, {}, "gamma", [0.0, 1.0], [-TINY, 1 + TINY, NAN]),
        (AlgorithmConfig, {}, "lam", [0.0, 1.0], [-TINY, 1 + TINY, NAN]),
        (AlgorithmConfig, {}, "cliprange_value", [TINY, 9.0, INF], [0.0, -1.0, NAN]),
        (AlgorithmConfig, SCALED, "loss_scale_factor", [TINY, 512.0, None], [0.0, -1.0, NAN, INF]),
        (AlgorithmConfig, {"resampling": "pow"}, "resampling_power", [0.0, 9.0], [-TINY, NAN, INF]),
        (AlgorithmConfig, {"resampling": "pow"}, "resampling_within", ["batch", "prompt"], ["group"]),
        (AlgorithmConfig, {}, "resampling", ["none", "pow", "max_min", "max_random"], ["max"]),
        (CorrectionConfig, {}, "weights", ["none", "token", "sequence", "geometric"], ["row"]),
        (CorrectionConfig, WEIGHTED, "mode", ["truncate", "mask"], ["clip"]),
        (CorrectionConfig, WEIGHTED, "upper", [1, 1.0, 9.0, INF], [1 - TINY, NAN, True, "2"]),
        (CorrectionConfig, MASKED, "lower", [TINY, 1, 1.0], [0.0, 1 + TINY, NAN, True, None]),
    ],
)  # fmt: skip
def test_edges(
    record: type, given: dict[str, Any], field: str, allowed: list[object], refused: list[object]
) -> None:
    for value in allowed:
        assert getattr(record(**given, **{field: value}), field) == value
    for value in refused:
        with pytest.raises(ValueError, match=field):
            record(**given, **{field: value})


def test_one_end_of_the_band_of_means_may_be_open() -> None:
    for band in ({"lowest_mean": 5.0}, {"highest_mean": -5.0}):
        assert FilterGroupsConfig(enable=True, **band).enable


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "mask"},
        {"normalize": True},
        {"upper": 3.0},
        {"lower": 0.4},
        {"weights": "token", "lower": 0.4},  # mode=truncate has no lower bound
    ],
)
def test_a_bound_of_weights_that_there_are_not_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"algorithm.correction.{list(given)[-1]} is ") as caught:
        CorrectionConfig(**given)
    if "lower" in given:
        why = "mode=truncate has no lower bound" if "weights" in given else "weights=none has no weights"
        assert f"but algorithm.correction.{why}: set algorithm.correction.mode=mask" in str(caught.value)


def test_statistics_are_levels_by_kinds_without_the_largest_k1() -> None:
    assert set(STATISTICS) == {
        "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    }  # fmt: skip
    for name in STATISTICS:
        rule = read_rule(name, 2.0)
        assert f"{rule.level}_{rule.kind}" == name
        assert (rule.lower, rule.upper) == (0.5 if rule.kind == "k1" else -INF, 2.0)


@pytest.mark.parametrize(
    ("bound", "ends"),
    [(1 + 1e-9, (1 / (1 + 1e-9), 1 + 1e-9)), ([1, 1], (1, 1)), ((0.5, 1), (0.5, 1)), ([1e-9, 9], (1e-9, 9))],
)
def test_ranges_of_a_ratio(bound: object, ends: tuple[float, float]) -> None:
    rule = read_rule("seq_mean_k1", bound)
    assert (rule.lower, rule.upper) == ends


@pytest.mark.parametrize(
    "bound",
    [1.0, 0.5, NAN, True, [1.0], [0.5, 1, 2], [0.0, 2], [-1, 2], [1.1, 2], [0.5, 0.9], [NAN, 2], [0.5, True], "2"],
)  # fmt: skip
def test_ranges_that_are_none(bound: object) -> None:
    with pytest.raises(ValueError, match=r"algorithm.correction.reject.token_k1 is "):
        CorrectionConfig(reject={"token_k1": bound})


@pytest.mark.parametrize("bound", [0.0, -1.0, NAN, INF, True, [0.5, 2.0], None])
def test_bounds_of_a_divergence_that_are_none(bound: object) -> None:
    with pytest.raises(
        ValueError, match=r"algorithm.correction.reject.seq_max_k3 is .*, but k3 is a divergence"
    ):
        CorrectionConfig(reject={"seq_max_k3": bound})


def test_the_largest_k1_and_unknown_statistics_are_refused_each_in_its_words() -> None:
    with pytest.raises(ValueError, match="seq_max_k1 is not offered, because k1 has a sign"):
        read_rule("seq_max_k1", 2.0)
    with pytest.raises(ValueError, match="there is no statistic 'seq_k1'; known: token_k1, "):
        read_rule("seq_k1", 2.0)


def test_a_correction_is_on_if_it_weighs_or_rejects() -> None:
    assert not CorrectionConfig().is_on
    assert CorrectionConfig(weights="token").is_on
    assert CorrectionConfig(reject={"token_k2": 1.0}).is_on


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_ratio_that_holds_the_correction_takes_no_weights(loss: str) -> None:
    weighted = CorrectionConfig(weights="token")
    with pytest.raises(ValueError, match="would be corrected twice: set algorithm.correction.weights=none"):
        AlgorithmConfig(correction=weighted, old_log_probs="rollout", policy_loss=loss)
    assert AlgorithmConfig(correction=weighted, policy_loss=loss).correction.is_on
    assert AlgorithmConfig(old_log_probs="rollout", policy_loss=loss).old_log_probs == "rollout"
    for plain in ("reinforce", "gpg"):
        config = AlgorithmConfig(correction=weighted, old_log_probs="rollout", policy_loss=plain)
        assert config.correction.is_on


def test_parts_of_the_reward_have_one_weight_each_and_one_name_each() -> None:
    assert AlgorithmConfig(reward_keys=("a", "b"), reward_weights=(1.0, 2.0)).reward_weights == (1.0, 2.0)
    assert AlgorithmConfig(reward_keys=("a", "b")).reward_weights == ()
    for weights in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match=f"reward_weights has {len(weights)} numbers for 2"):
            AlgorithmConfig(reward_keys=("a", "b"), reward_weights=weights)
    with pytest.raises(ValueError, match="reward_keys names a part twice: a, a"):
        AlgorithmConfig(reward_keys=("a", "a"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resampling": "max_min", "resampling_power": 3.0}, "resampling=max_min takes no power"),
        ({"resampling_power": 3.0}, "resampling=none takes no power"),
        ({"resampling_within": "prompt"}, "resampling=none draws nothing"),
        ({"shaping_settings": {"a": 1}}, "shaping_settings has a, but algorithm.reward_shaping names no"),
        (
            {"loss_scale_factor": 5.0, "loss_agg_mode": "token-mean"},
            "only algorithm.loss_agg_mode=.* that is token-mean",
        ),
    ],
)
def test_settings_that_could_not_act_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**given)


def test_settings_that_act_are_taken() -> None:
    assert AlgorithmConfig(resampling="max_min", resampling_within="prompt").resampling_power == 2.0
    shaped = AlgorithmConfig(reward_shaping="mine", shaping_settings={"a": 1})
    assert (shaped.reward_shaping, shaped.shaping_settings) == ("mine", {"a": 1})
    assert AlgorithmConfig(reward_shaping="mine").shaping_settings == {}


def test_nothing_set_means_nothing_changed() -> None:
    config = AlgorithmConfig()
    assert (config.entropy_coeff, config.kl_loss_coef, config.use_kl_loss) == (0.0, 0.001, False)
    assert (config.resampling, config.resampling_power, config.resampling_within) == ("none", 2.0, "batch")
    assert config.correction == CorrectionConfig(
        weights="none", mode="truncate", upper=2.0, lower=0.5, normalize=False, reject={}
    )
    groups = config.filter_groups
    assert (groups.enable, groups.metric, groups.max_rounds) == (False, "acc", 10)
    assert (groups.at_limit, groups.retire_solved, groups.defer_failed) == ("train", False, 0)


@pytest.mark.parametrize(
    ("given", "field", "allowed", "refused"),
    [
        ({}, "kind", ["none", "reverse_kl", "forward_kl"], ["kl", ""]),
        ({"kind": "reverse_kl"}, "coef", [TINY, 1.0, 9.0], [0.0, -1.0, NAN, INF]),
        ({"kind": "forward_kl"}, "top_k", [1, 2], [0, -1]),
        ({"kind": "forward_kl"}, "with_tail", [True, False], []),
        ({"kind": "reverse_kl"}, "kl_kind", ["k1+", "k2", "k3", "abs"], ["k1", "kl", "k4"]),
        ({"kind": "reverse_kl"}, "top_k", [64], [63]),
        ({"kind": "reverse_kl"}, "with_tail", [False], [True]),
        ({"kind": "forward_kl"}, "kl_kind", ["k1+"], ["k3"]),
        ({}, "coef", [1.0], [2.0]),
        ({}, "top_k", [64], [8]),
    ],
)  # fmt: skip
def test_edges_of_what_is_learned_from_a_teacher(
    given: dict[str, Any], field: str, allowed: list[object], refused: list[object]
) -> None:
    for value in allowed:
        config = DistillationConfig(**given, **{field: value})
        assert getattr(config, field) == value
        assert config.is_on == (config.kind != "none")
    for value in refused:
        shown = setting_text(value)
        with pytest.raises(
            ValueError, match=f"algorithm.distillation.{field} is {shown!r}|{field} is {shown}"
        ):
            DistillationConfig(**given, **{field: value})


def test_a_setting_of_the_other_kind_names_that_kind() -> None:
    with pytest.raises(
        ValueError, match="a setting of algorithm.distillation.kind=forward_kl and that is reverse_kl"
    ):
        DistillationConfig(kind="reverse_kl", top_k=3)
    with pytest.raises(
        ValueError, match="a setting of algorithm.distillation.kind=reverse_kl and that is forward_kl"
    ):
        DistillationConfig(kind="forward_kl", kl_kind="k3")
    with pytest.raises(ValueError, match="whose gradient averages to zero"):
        DistillationConfig(kind="reverse_kl", kl_kind="kl")
    with pytest.raises(ValueError, match=r"kl_kind is 'k4', but it needs one of k1, kl, abs"):
        DistillationConfig(kind="reverse_kl", kl_kind="k4")  # type: ignore[arg-type]
    config = DistillationConfig()
    assert (config.kind, config.coef, config.top_k, config.with_tail, config.kl_kind) == (
        "none",
        1.0,
        64,
        False,
        "k1+",
    )
