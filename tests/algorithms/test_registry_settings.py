from __future__ import annotations

from collections.abc import Callable

import pytest

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.algorithms.registry import (
    Declaration,
    FunctionRegistry,
    check_settings,
    own_settings,
    settings_for,
    with_own_settings,
)
from strop.algorithms.specs import ADV_DECLARATIONS, LOSS_DECLARATIONS
from strop.utils.registry import Registry


def prepare(*, log_probs: int, share: float = 0.1, clip_low: float = 0.2) -> dict[str, int]:
    return {"chosen": log_probs}


def loss(log_probs: int, chosen: int, *, clip_low: float, beta: float = 1.0, is_soft: bool = False) -> int:
    return log_probs


DECLARED = Declaration(
    needs=frozenset({"log_probs", "chosen"}),
    settings=frozenset({"clip_low"}),
    prepare=prepare,
    prepared=frozenset({"chosen"}),
)
KEYS = {"clip_low": "algorithm.clip_ratio_low"}


def test_own_settings_are_the_keyword_defaults_of_the_function_and_of_its_statistics() -> None:
    assert own_settings(loss, DECLARED) == {"beta": 1.0, "is_soft": False, "share": 0.1}


def test_a_function_gets_the_settings_it_takes() -> None:
    given = {"clip_low": 0.3, "beta": 2.0, "share": 0.5, "gamma": 1.0}
    assert settings_for(loss, DECLARED, given) == {"clip_low": 0.3, "beta": 2.0}

    def open_ended(**columns: object) -> None:
        """Takes what it declares."""

    assert settings_for(open_ended, DECLARED, given) == {"clip_low": 0.3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"betas": 2.0},
            r"loss 'mine' has no setting 'betas'; did you mean 'beta'\? It has beta, is_soft, share",
        ),
        ({"clip_low": 0.1}, "'clip_low' of loss 'mine' has a key of its own: set algorithm.clip_ratio_low"),
        ({"is_soft": 1}, "'is_soft' of loss 'mine' is 1; it must be true or false, and its default is false"),
        ({"beta": float("nan")}, "'beta' of loss 'mine' is nan; it must be a number"),
    ],
)
def test_settings_are_checked_by_name_and_type(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings("loss", "mine", with_own_settings(loss, DECLARED), settings, elsewhere=KEYS)


def test_valid_settings_pass() -> None:
    check_settings(
        "loss",
        "mine",
        with_own_settings(loss, DECLARED),
        {"beta": 2, "share": 0.5, "is_soft": True},
        elsewhere=KEYS,
    )
    # Without a key of its own, a declared setting is set here.
    check_settings("loss", "mine", with_own_settings(loss, DECLARED), {"clip_low": 0.1})
    # verl's convention reads its config, so any setting may be meant.
    check_settings("loss", "mine", with_own_settings(loss, Declaration()), {"anything": "goes"})


def test_what_a_function_cannot_take_is_refused_when_it_is_registered() -> None:
    registry: FunctionRegistry = FunctionRegistry("loss", replaceable=True)
    with pytest.raises(ValueError, match="'mine' declares values, but .*loss has no parameter of that name"):
        registry.register("mine", needs=["log_probs", "values"])(loss)
    with pytest.raises(ValueError, match="declares the aggregation 'token-men'; known: token-mean"):
        registry.register("mine", needs=["log_probs"], aggregation="token-men")(loss)
    with pytest.raises(ValueError, match="prepares chosen but does not list it in needs"):
        registry.register("mine", needs=["log_probs"], prepare=prepare, prepared=["chosen"])(loss)
    assert not registry


def test_an_alias_is_a_second_name_of_the_same_declaration() -> None:
    registry: FunctionRegistry = FunctionRegistry("loss")
    registry.register("mine", needs=["log_probs"], aliases=["yours"])(loss)
    assert registry["yours"] is registry["mine"] is loss
    assert registry.declaration("yours") is registry.declaration("mine")
    assert not registry.declaration("mine").is_user_convention

    with pytest.raises(ValueError, match="loss 'yours' is already registered by"):
        registry.register("other", aliases=["yours"])(prepare)
    assert "other" not in registry


def test_a_built_in_function_has_the_signature_that_its_declaration_says() -> None:
    declared: Registry[Declaration] = Registry(
        "loss",
        {
            "mine": Declaration(needs=frozenset({"log_probs"}), options={"beta": 1.0}),
            "yours": Declaration(needs=frozenset({"log_probs"}), options={"beta": 2.0}),
            "theirs": Declaration(needs=frozenset({"values"})),
        },
    )
    registry: FunctionRegistry[Callable[..., int]] = FunctionRegistry("loss", declarations=declared)

    def right(log_probs: int, *, beta: float = 1.0) -> int:
        return log_probs

    assert registry.implements("mine")(right) is right is registry["mine"]
    assert registry.declaration("mine") is declared["mine"]
    with pytest.raises(AssertionError, match="loss 'yours' declares {'beta': 2.0}, but has {'beta': 1.0}"):
        registry.implements("yours")(right)
    with pytest.raises(
        ValueError, match="'theirs' declares values, but .*right has no parameter of that name"
    ):
        registry.implements("theirs")(right)
    with pytest.raises(ValueError, match="unknown loss 'ours'; known: mine, theirs, yours"):
        registry.implements("ours")(right)


def test_the_tables_name_every_built_in_function_and_no_other() -> None:
    for declared, registered in (
        (ADV_DECLARATIONS, ADV_ESTIMATOR_REGISTRY), (LOSS_DECLARATIONS, POLICY_LOSS_REGISTRY)
    ):  # fmt: skip
        others = {name for name, one in registered.items() if not one.__module__.startswith("strop.")}
        assert set(declared) - others == set(registered) - others
