"""Registered functions and functions of a user's own: names, types, defaults, and every sentence of refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithms.advantages.verl_convention import adv_config, call_advantage_estimator
from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.group_functions.shaping import overlong_penalty
from strop.algorithms.losses.verl_convention import UserLoss, call_policy_loss, loss_config
from strop.algorithms.registry import (
    Declaration,
    FunctionRegistry,
    check_settings,
    own_settings,
    settings_for,
    with_own_settings,
)
from strop.algorithms.resampling import pf_ppo_weights, resample_rows
from strop.algorithms.verl_aggregation import agg_loss
from strop.algorithms.verl_config import VerlConfig
from strop.utils.registry import name_of
from strop.utils.rng import random_key, uniforms


class Names(Enum):
    MINE = "mine"


def one(x: int, *, beta: float = 1.0) -> int:
    return x


def other(x: int) -> int:
    return -x


# --------------------------------------------------------------------------------------------- registry


def test_an_enum_stands_for_its_value() -> None:
    assert name_of(Names.MINE) == name_of("mine") == "mine"
    registry: FunctionRegistry[Any] = FunctionRegistry("thing")
    assert registry.register(Names.MINE, needs=["x"])(one) is one
    assert registry["mine"] is one
    assert registry.declaration(Names.MINE) == registry.declaration("mine")


def test_names_that_are_taken() -> None:
    fixed: FunctionRegistry[Any] = FunctionRegistry("thing")
    fixed.register("mine", needs=["x"])(one)
    fixed.register("mine", needs=["x"], settings=["beta"])(one)  # the same function may be declared again
    assert fixed.declaration("mine").settings == {"beta"}
    with pytest.raises(
        ValueError, match=r"thing 'mine' is already registered by .*\.one: choose another name for .*\.other"
    ):
        fixed.register("mine", needs=["x"])(other)
    assert fixed["mine"] is one
    loose: FunctionRegistry[Any] = FunctionRegistry("thing", replaceable=True)
    loose.register("mine", needs=["x"])(one)
    loose.register("mine")(other)
    assert loose["mine"] is other
    assert loose.declaration("mine") == Declaration()


def test_a_name_that_nobody_has() -> None:
    registry: FunctionRegistry[Any] = FunctionRegistry("thing")
    with pytest.raises(ValueError, match="unknown thing 'x'; known: none. One of your own"):
        registry["x"]
    registry.register("b", needs=["x"])(one)
    registry.register("a", needs=["x"])(other)
    for call in (registry.__getitem__, registry.declaration):
        with pytest.raises(ValueError, match="unknown thing 'x'; known: a, b. One of"):
            call("x")
    registry["bare"] = one
    assert registry.declaration("bare") == Declaration()


def test_what_a_declaration_says() -> None:
    verl = frozenset({"config"})
    registry: FunctionRegistry[Any] = FunctionRegistry("thing", verl_parameters=verl)

    def field(x: int, config: object) -> int:
        return x

    registry.register("ours", needs=["x"])(one)
    registry.register("field", needs=["x"])(field)
    registry.register("bare")(other)
    assert [registry.declaration(name).is_user_convention for name in ("ours", "field", "bare")] == [
        False,
        True,
        True,
    ]
    assert [registry.declaration(name).follows_verl for name in ("ours", "field", "bare")] == [
        False,
        True,
        False,
    ]
    plain = Declaration()
    assert not any((plain.is_group_relative, plain.moves_without_advantage, plain.follows_verl))
    assert (plain.needs, plain.settings, plain.prepared) == (frozenset(),) * 3
    full = registry.register(
        "full",
        needs=["x"],
        group_relative=True,
        aggregation="token-sum",
        moves_without_advantage=True,
        aliases=["also"],
    )
    full(one)
    got = registry.declaration("also")
    assert got.is_group_relative
    assert got.moves_without_advantage
    assert got.aggregation == "token-sum"
    assert registry.declaration("ours").aggregation is None


def test_settings_are_the_defaults_that_are_no_columns() -> None:
    def mixed(x: int, y: int = 0, *, beta: float = 1.0, shared: float = 2.0) -> int:
        return x

    declaration = Declaration(needs=frozenset({"x", "y"}), settings=frozenset({"shared"}))
    assert own_settings(mixed, declaration) == {"beta": 1.0}
    assert settings_for(mixed, declaration, {"x": 1, "y": 2, "beta": 3, "shared": 4, "no": 5}) == {
        "beta": 3,
        "shared": 4,
    }

    def narrow(x: int) -> int:
        return x

    assert settings_for(narrow, declaration, {"shared": 4}) == {}, "declared, but no argument of this one"


@pytest.mark.parametrize(
    ("default", "fits", "wrong", "wanted"),
    [
        (True, [True, False], [1, 0.0, "true", None], "true or false"),
        (1, [0, -3], [True, 1.5, "1", None], "a whole number"),
        (0.5, [1, 2.5, math.inf], [True, "1", math.nan, None], "a number"),
        ("a", ["", "b"], [1, None, True], "a word"),
        ((1,), [(), [1, 2], ("a",)], ["ab", 1, None, {1}], "a list"),
        ([1], [(), [1, 2]], ["ab", 1, None], "a list"),
        (None, [1, "a", None, True], [], ""),
        (Names.MINE, [1, "a", None], [], ""),
    ],
)
def test_a_value_is_of_the_kind_of_its_default(
    default: object, fits: list[object], wrong: list[object], wanted: str
) -> None:
    def function(x: int, *, setting: object = default) -> int:
        return x

    declaration = Declaration(needs=frozenset({"x"}))
    for value in fits:
        check_settings("thing", "mine", with_own_settings(function, declaration), {"setting": value})
    for value in wrong:
        with pytest.raises(
            ValueError, match=f"the setting 'setting' of thing 'mine' is .*; it must be {wanted}, and its"
        ):
            check_settings("thing", "mine", with_own_settings(function, declaration), {"setting": value})


def test_settings_that_a_function_does_not_have() -> None:
    declaration = Declaration(needs=frozenset({"x"}))
    with pytest.raises(
        ValueError, match=r"thing 'mine' has no setting 'bet'; did you mean 'beta'\? It has beta$"
    ):
        check_settings("thing", "mine", with_own_settings(one, declaration), {"bet": 1.0})
    with pytest.raises(ValueError, match="thing 'mine' has no setting 'beta'; it has none$"):
        check_settings("thing", "mine", with_own_settings(other, declaration), {"beta": 1.0})
    # A key of the config is only named for a function that has the setting.
    with pytest.raises(ValueError, match="has no setting 'beta'; it has none$"):
        check_settings(
            "thing",
            "mine",
            with_own_settings(other, declaration),
            {"beta": 1.0},
            elsewhere={"beta": "algorithm.beta"},
        )
    with pytest.raises(ValueError, match="'beta' of thing 'mine' has a key of its own: set algorithm.beta"):
        check_settings(
            "thing",
            "mine",
            with_own_settings(one, declaration),
            {"beta": 1.0},
            elsewhere={"beta": "algorithm.beta"},
        )
    # All of them are looked at, not the first alone.
    with pytest.raises(ValueError, match="no setting 'gamma'"):
        check_settings("thing", "mine", with_own_settings(one, declaration), {"beta": 1.0, "gamma": 1.0})


def test_columns_that_a_function_has_no_parameter_for() -> None:
    registry: FunctionRegistry[Any] = FunctionRegistry("thing")
    with pytest.raises(ValueError, match="'mine' declares .*other has no parameter"):
        registry.register("mine", needs=["x", "y"])(other)
    with pytest.raises(ValueError, match="'mine' declares .*other has no parameter"):
        registry.register("mine", needs=["x"], settings=["beta"])(other)

    def open_ended(**columns: object) -> int:
        return len(columns)

    registry.register("open", needs=["x", "y"])(open_ended)
    assert set(registry) == {"open"}


# --------------------------------------------------------------------------------------- user functions


def test_the_config_of_verl_reads_like_an_object_and_like_a_mapping() -> None:
    config = VerlConfig({"clip_ratio": 0.2, "inner": {"name": "x"}})
    assert (config.clip_ratio, config["clip_ratio"], config.get("clip_ratio"), config.get("no", 7)) == (
        0.2,
        0.2,
        0.2,
        7,
    )
    assert isinstance(config.inner, VerlConfig)
    assert config.inner.name == config["inner"]["name"] == "x"
    assert (list(config), len(config), "inner" in config) == (["clip_ratio", "inner"], 2, True)
    assert repr(config) == "VerlConfig({'clip_ratio': 0.2, 'inner': VerlConfig({'name': 'x'})})"
    with pytest.raises(KeyError):
        config["no"]
    with pytest.raises(
        AttributeError,
        match=r"this config has no clip_rati; did you mean clip_ratio\? It has clip_ratio, inner",
    ):
        config.clip_rati  # noqa: B018
    with pytest.raises(AttributeError, match=r"this config has no zzz\. It has clip_ratio, inner"):
        config.zzz  # noqa: B018
    with pytest.raises(AttributeError, match="cannot be changed: clip_ratio was set to 1"):
        config.clip_ratio = 1


def test_the_configs_that_functions_of_verl_get() -> None:
    algorithm = AlgorithmConfig(clip_ratio=0.1, clip_ratio_high=0.3, norm_adv_by_std=False, gamma=0.5)
    config = loss_config(
        algorithm,
        name="mine",
        totals=BatchTotals(num_tokens=12, num_samples=3),
        loss_agg_mode="token-sum",
        settings={"width": 2.0, "gamma": 9.0},
    )
    assert (config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high) == (0.1, 0.1, 0.3)
    assert (config.loss_agg_mode, config.width, config.gamma) == ("token-sum", 2.0, 0.5)
    assert dict(config.policy_loss) == {"width": 2.0, "gamma": 9.0, "loss_mode": "mine"}
    assert dict(config.global_batch_info) == {
        "dp_size": 1,
        "batch_num_tokens": 12,
        "global_batch_size": 3,
        "loss_scale_factor": None,
    }
    assert config.correction.weights == "none"
    estimator = adv_config(algorithm, settings={"width": 2.0})
    assert (estimator.norm_adv_by_std_in_grpo, estimator.gamma, estimator.width) == (False, 0.5, 2.0)
    assert not adv_config(algorithm).get("width")


CONFIG = VerlConfig({})
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def called(function: Callable[..., object], **columns: Tensor) -> UserLoss:
    base = {name: torch.full((2, 3), 0.5) for name in ("old_log_probs", "advantages")}
    log_probs = torch.full((2, 3), 0.5, requires_grad=True)
    return call_policy_loss(
        function,
        columns={"log_probs": log_probs, **base, **columns},
        mask=MASK,
        loss_agg_mode="token-mean",
        config=CONFIG,
    )


def mean_of(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    return agg_loss(log_prob, response_mask, "token-mean")


def test_a_loss_of_verl_gets_clean_columns_and_a_mask_of_numbers() -> None:
    seen: dict[str, Any] = {}

    def loss(
        log_prob: Tensor, response_mask: Tensor, rollout_is_weights: Tensor | None = None, **rest: Any
    ) -> object:
        seen.update(rest, mask=response_mask, weights=rollout_is_weights, log_prob=log_prob.detach())
        return mean_of(log_prob, response_mask), {}

    got = called(loss, rollout_log_probs=torch.full((2, 3), 7.0))
    assert got.loss.item() == 0.5
    assert seen["mask"].dtype == torch.int64
    assert seen["log_prob"].tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]
    assert seen["rollout_log_probs"].tolist() == [[7.0, 7.0, 0.0], [7.0, 0.0, 0.0]]
    assert seen["weights"] is None
    assert seen["loss_agg_mode"] == "token-mean"
    assert "rollout_is_weights" not in seen  # nothing is given that there is not
    called(loss, rollout_is_weights=torch.ones(2, 3))
    assert seen["weights"].tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_metrics_of_a_loss_of_verl_are_numbers_of_any_kind() -> None:
    def loss(log_prob: Tensor, response_mask: Tensor) -> object:
        metrics = {"a": 2.0, "b": torch.tensor([3.0]), "c": True, "d": 4, "e": (0 * log_prob).sum() + 5}
        return mean_of(log_prob, response_mask), metrics

    metrics = called(loss).metrics
    assert {name: value.item() for name, value in metrics.items()} == {"a": 2, "b": 3, "c": 1, "d": 4, "e": 5}
    assert {(value.dtype, value.dim()) for value in metrics.values()} == {(torch.float64, 0)}
    assert not any(value.requires_grad for value in metrics.values())

    def older(log_prob: Tensor, response_mask: Tensor) -> object:
        return mean_of(log_prob, response_mask), torch.tensor(0.5), 0.25, 0

    assert {name: value.item() for name, value in called(older).metrics.items()} == {
        "actor/pg_clipfrac": 0.5,
        "actor/ppo_kl": 0.25,
        "actor/pg_clipfrac_lower": 0.0,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda loss: loss, r"returned a tensor of shape \(\), but a policy loss returns \(loss, metrics\)"),
        (lambda loss: None, "returned None, but a policy loss"),
        (lambda loss: 1.0, "returned a float, but a policy loss"),
        (lambda loss: (loss, 1.0), r"returned \(a tensor of shape \(\), a float\), but"),
        (lambda loss: (loss, 1.0, 2.0), r"returned \(a tensor of shape \(\), a float, a float\), but"),
        (lambda loss: (1.0, {}), r"returned \(a float, a dict\), but"),
        (lambda loss: (loss[None], {}), r"returned a loss of shape \(1,\), but a loss is one number"),
        (lambda loss: (loss.detach(), {}), "returned a loss without a gradient"),
        (
            lambda loss: (loss, {"a": torch.ones(2)}),
            r"returned the metric 'a' as a tensor of shape \(2,\); a metric is",
        ),
        (lambda loss: (loss, {"a": "high"}), "returned the metric 'a' as a str; a metric is one number"),
        (lambda loss: (loss, {"a": None}), "returned the metric 'a' as None; a metric is one number"),
    ],
)
def test_what_is_no_result_of_a_loss(make: Callable[[Tensor], object], message: str) -> None:
    def loss(log_prob: Tensor, response_mask: Tensor) -> object:
        return make(mean_of(log_prob, response_mask))

    with pytest.raises(ValueError, match=message):
        called(loss)


def test_parameters_that_nobody_fills_are_named() -> None:
    def wants(log_prob: Tensor, entropy: Tensor, temperature: float, note: str = "", *rest: object) -> object:
        return log_prob.sum(), {}

    with pytest.raises(
        ValueError, match="wants requires entropy, temperature, which nobody gives it: verl's"
    ):
        called(wants)

    def no_weights(log_prob: Tensor) -> object:
        return log_prob.sum(), {}

    assert called(no_weights).metrics == {}
    with pytest.raises(
        ValueError, match="no_weights has no parameter rollout_is_weights, so the importance weights"
    ):
        called(no_weights, rollout_is_weights=torch.ones(2, 3))
    flat = torch.ones(3)
    columns = {"log_probs": flat, "old_log_probs": flat, "advantages": flat}
    with pytest.raises(ValueError, match=r"takes padded columns \[B, R\], but the mask has shape \(3,\)"):
        call_policy_loss(no_weights, columns=columns, mask=flat, loss_agg_mode="token-mean", config=CONFIG)


def estimated(function: Callable[..., object], **extra: Any) -> tuple[Tensor, Tensor]:
    return call_advantage_estimator(
        function,
        token_level_rewards=torch.full((2, 3), 2.0, requires_grad=True),
        response_mask=MASK.bool(),
        index=np.array(["a", "b"], dtype=object),
        config=CONFIG,
        extra=extra,
    )


def test_an_estimator_of_verl_gets_what_it_takes() -> None:
    seen: dict[str, Any] = {}

    def estimator(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any, values: Tensor | None = None
    ) -> Any:
        seen.update(index=list(index), values=values, dtype=response_mask.dtype, grad=torch.is_grad_enabled())
        return token_level_rewards, token_level_rewards * math.inf

    advantages, returns = estimated(estimator, values=torch.ones(2, 3), other=1)
    assert advantages.tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]
    assert returns[0].tolist() == [math.inf, math.inf, 0.0]
    assert seen["index"] == ["a", "b"]
    assert (seen["dtype"], seen["grad"]) == (torch.int64, False)
    assert seen["values"] is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda r: r, r"returned a tensor of shape \(2, 3\), but an advantage estimator returns"),
        (lambda r: (r,), r"returned \(a tensor of shape \(2, 3\)\), but"),
        (lambda r: (r, r, r), "but an advantage estimator returns"),
        (lambda r: [r, r], "returned a list, but"),
        (lambda r: (r, r[:1]), r"a tensor of shape \(1, 3\)\), but .*the shape of the rewards, \(2, 3\)"),
        (lambda r: (r[0], r), r"returned \(a tensor of shape \(3,\), a tensor of shape \(2, 3\)\), but"),
        (lambda r: (r, 1.0), "a float"),
        (lambda r: (r * math.nan, r), "returned 3 advantages that are NaN or infinite"),
        (lambda r: (r * math.inf, r), "returned 3 advantages that are NaN or infinite"),
    ],
)
def test_what_is_no_result_of_an_estimator(make: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimated(lambda token_level_rewards: make(token_level_rewards))


def test_a_number_outside_the_mask_is_no_harm() -> None:
    outside = torch.where(MASK.bool(), 1.0, math.nan)
    assert estimated(lambda token_level_rewards: (outside, outside))[0].tolist() == [
        [1.0, 1.0, 0.0],
        [1.0, 0.0, 0.0],
    ]


# ---------------------------------------------------------------------------------------------- shaping


def test_the_overlong_penalty_at_its_corners() -> None:
    lengths = torch.tensor([0, 6, 7, 8, 10, 11])
    got = overlong_penalty(lengths, max_tokens=10, buffer_tokens=4, factor=2.0, dtype=torch.float64)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert not got[:2].signbit().any()
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=10).tolist()[:2] == [
        0.0,
        pytest.approx(-0.6),
    ]
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=1, factor=0.0).tolist() == [0.0] * 6
    assert overlong_penalty(lengths, max_tokens=1, buffer_tokens=1).dtype == torch.float32
    for buffer in (0, 11, -1):
        with pytest.raises(ValueError, match=f"the over-long buffer is {buffer} tokens"):
            overlong_penalty(lengths, max_tokens=10, buffer_tokens=buffer)
    for factor in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="the over-long penalty factor is"):
            overlong_penalty(lengths, max_tokens=10, buffer_tokens=4, factor=factor)


def test_a_power_of_0_weighs_all_alike() -> None:
    scores = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    assert pf_ppo_weights(scores, power=0.0).tolist() == [1 + 1e-8] * 3
    for power in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="the reweighting power is"):
            pf_ppo_weights(scores, power=power)
    assert pf_ppo_weights(scores[:1], method="max_min").tolist() == [1 + 1e-8]
    with pytest.raises(ValueError, match="there are no scores to weigh"):
        pf_ppo_weights(scores[:0])


def test_draws_invert_the_sums_of_the_weights() -> None:
    weights, key = torch.tensor([1.0, 0.0, 2.0, 5.0]), random_key(3, "draws")
    numbers = uniforms(np.full(50, key, dtype=np.uint64), np.arange(50))
    # Below 1/8 the first, below 3/8 the third, else the last.
    expected = [0 if u < 1 / 8 else 2 if u < 3 / 8 else 3 for u in numbers]
    assert resample_rows(weights, key=key, num_rows=50).tolist() == expected
    assert len(resample_rows(weights, key=key)) == 4
    assert resample_rows(weights, key=key, num_rows=0).tolist() == []
    with pytest.raises(ValueError, match="-1 rows are to be drawn"):
        resample_rows(weights, key=key, num_rows=-1)
    for wrong in ([], [0.0, 0.0], [1.0, -1e-9], [-1.0]):
        with pytest.raises(ValueError, match="weights must be at least 0 with a sum above 0"):
            resample_rows(torch.tensor(wrong), key=key)
    assert resample_rows(torch.tensor([1e-9]), key=key, num_rows=2).tolist() == [0, 0]
