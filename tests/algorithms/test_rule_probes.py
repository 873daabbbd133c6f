"""What the checks of losses and estimators show to the function: the changed batches, number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from algorithms.contract.estimator_batches import COLUMNS, Batch, random_batch
from algorithms.contract.estimator_rules import RULES, Trial
from algorithms.contract.estimators import TRAITS, _resolve, check_adv_estimator
from algorithms.contract.loss_probe import (
    ATOL,
    RTOL,
    LossBatch,
    ProbedLoss,
    Seen,
    example_batch,
    gap_between,
)
from algorithms.contract.policy_losses import _subject
from probing import CLAIMS, broken, ratio, sentences, terms
from torch import Tensor

from strop.algorithms.advantages import get_adv_estimator_fn
from strop.algorithms.aggregation import batch_totals
from strop.algorithms.losses import PolicyLossTerms, get_policy_loss_fn
from strop.algorithms.registry import Declaration, FunctionRegistry, settings_for
from strop.algorithms.specs import adv_estimator_declaration
from strop.algorithms.verl_aggregation import agg_loss
from strop.cli.check_functions.estimators import inferred_declaration


def shown(rule: str, seed: int) -> tuple[Batch, list[Batch]]:
    """The trial's batch, and those that the rule tries, up to a copy of the first."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(generator)
    seen: list[Batch] = []

    def estimate(tried: Batch) -> Tensor:
        seen.append(tried)
        return torch.zeros_like(tried.values)

    RULES[rule](Trial(estimate=estimate, batch=batch, traits=CLAIMS, generator=generator))
    return batch, [tried for tried in seen if tried is not batch]


@pytest.mark.parametrize("seed", range(6))
def test_the_lone_sample_is_alone_and_has_tokens(seed: int) -> None:
    batch, (alone,) = shown("a group of one has advantage 0", seed)
    assert alone.group_ids[-1] not in alone.group_ids[:-1]
    assert torch.equal(alone.group_ids[:-1], batch.group_ids[:-1])
    assert torch.equal(alone.response_mask[-1], batch.response_mask[0])
    assert torch.equal(alone.response_mask[:-1], batch.response_mask[:-1])
    assert alone.response_mask[-1].any()
    assert alone.token_level_rewards is batch.token_level_rewards


@pytest.mark.parametrize("seed", range(12))
def test_the_constant_reaches_every_reward_of_the_first_prompt_and_no_other(seed: int) -> None:
    batch, (shifted,) = shown("a constant added to a group changes nothing", seed)
    change = shifted.token_level_rewards - batch.token_level_rewards
    for row, mask in enumerate(batch.response_mask.tolist()):
        expected = [0.0] * len(mask)
        if batch.group_ids[row] == batch.group_ids[0]:
            expected[max([t for t, is_sampled in enumerate(mask) if is_sampled], default=0)] = 4.0
        assert change[row].tolist() == expected
        in_group = 4.0 * float(batch.group_ids[row] == batch.group_ids[0])
        assert (shifted.reward_parts - batch.reward_parts)[row].tolist() == [in_group] * 3


def test_equal_rewards_are_a_tenth_whose_sum_is_rounded() -> None:
    _, tried = shown("equal rewards give exactly 0", 0)
    assert [len(batch.group_ids) for batch in tried] == [7, 8]
    for batch in tried:
        size = len(batch.group_ids)
        assert len(set(batch.group_ids.tolist())) == 1
        assert batch.token_level_rewards.tolist() == [[0.0, 0.0, 0.1]] * size
        assert batch.reward_parts.tolist() == [[0.1] * 3] * size
        assert batch.response_mask.tolist() == [[True] * 3] * size
        assert batch.log_probs.tolist() == [[-0.5] * 3] * size
        assert batch.reward_baselines.tolist() == [batch.reward_baselines[0].item()] * size
        for drawn in (batch.values, batch.sum_pi_squared, batch.rollout_is_weights):
            assert drawn.shape == (size, 3)
            assert len(set(drawn.flatten().tolist())) == 3 * size
    assert sum([0.1] * 7) / 7 != 0.1 or sum([0.1] * 8) / 8 != 0.1


def test_twins_differ_in_their_reward_alone() -> None:
    _, (twins,) = shown("a higher reward has the higher advantage", 0)
    assert twins.token_level_rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert twins.reward_parts.tolist() == [[1.0] * 3, [0.0] * 3]
    assert twins.response_mask.tolist() == [[True, True]] * 2
    assert twins.group_ids.shape == twins.reward_baselines.shape == (2,)
    for column, number in (
        (twins.values, 0.5),
        (twins.sum_pi_squared, 0.5),
        (twins.log_probs, -1.0),
        (twins.rollout_is_weights, 1.0),
    ):
        assert column.tolist() == [[number] * 2] * 2
        assert column.dtype == torch.float64
    assert twins.group_ids[0] == twins.group_ids[1]
    assert twins.reward_baselines[0] == twins.reward_baselines[1]


def test_scaled_rewards_are_four_times_as_large() -> None:
    batch, (scaled,) = shown("rewards scale as claimed", 0)
    for name in Batch.__dataclass_fields__:
        factor = (
            4
            if name
            in {"token_level_rewards", "values", "reward_baselines", "reward_parts", "process_rewards"}
            else 1
        )
        assert torch.equal(getattr(scaled, name), factor * getattr(batch, name)), name


def test_claims_of_the_estimators() -> None:
    # Papers of the others subtract something of the group: a mean, one without the sample, a weighted one, a best. What
    # raft learns from was chosen before.
    alone = {"gae", "raft", "reinforce_plus_plus", "remax"}
    assert {name for name, traits in TRAITS.items() if not traits.compares_groups} == alone
    # A mean that is subtracted takes a constant with it; alpha of gpg counts rewards that are not 0, maxrl divides by
    # their mean, gae and reinforce_plus_plus whiten the batch, the baseline of remax is a reward of its own, and a
    # constant for every answer is more for the longer episode of gigpo.
    moved = {"gae", "gigpo", "gpg", "maxrl", "reinforce_plus_plus", "remax"}
    assert {name for name, traits in TRAITS.items() if not traits.is_shift_invariant} == moved


# ------------------------------------------------------------------------------------ the batch of the losses


@pytest.mark.parametrize("seed", range(5))
def test_the_batch_of_the_losses_is_near_what_training_sees(seed: int) -> None:
    batch = example_batch(seed)
    new, old, advantages = (batch.columns[name] for name in ("log_probs", "old_log_probs", "advantages"))
    assert batch.mask.sum(dim=1).tolist() == [4, 6, 1, 3, 3]
    assert all((column[~batch.mask] == 0).all() for column in batch.columns.values())
    assert (-0.2 - old[batch.mask]).abs().max() < 5  # five standard deviations of what is taken from -0.2
    assert (old[batch.mask] <= -0.2).all()
    assert (old[batch.mask].max() > -0.6).item()  # nearly all of 17 draws would have to be above 0.4 in size
    assert (new[batch.mask] <= -0.01).all()
    log_ratio = (new - old)[batch.mask]
    assert 0.05 < log_ratio.std() < 0.4
    # Advantages of a response keep near its own: 0.2 noise moves none of 17 by 1.
    per_row = torch.tensor([[1.0], [-0.75], [0.5], [-1.5], [2.0]], dtype=torch.float64)
    apart = (advantages - per_row)[batch.mask]
    assert apart.abs().min() > 0
    assert apart.abs().max() < 1
    assert 0.02 < (batch.columns["ref_log_prob"] - old)[batch.mask].std() < 0.25
    assert 0.002 < (batch.columns["rollout_log_probs"] - old)[batch.mask].std() < 0.025


def test_on_policy_the_advantages_of_a_response_are_one_number() -> None:
    batch = example_batch(3, on_policy=True)
    assert torch.equal(batch.columns["log_probs"], batch.columns["old_log_probs"])
    for row, number in enumerate([1.0, -0.75, 0.5, -1.5, 2.0]):
        assert set(batch.columns["advantages"][row][batch.mask[row]].tolist()) == {number}


def linear(*, log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    return terms(-log_probs * advantages)


@pytest.mark.parametrize(("mode", "gradient"), [("token-mean", -1 / 6), ("seq-mean-token-sum", -1 / 2)])
def test_a_probed_loss_is_reduced_over_the_whole_batch(mode: str, gradient: float) -> None:
    # Advantages of 1: d(-log p)/d(log p) = -1, times the weight of a token: 1/6 for one of six, 1/2 per response.
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    columns = {
        "log_probs": torch.where(mask, -0.5, 0.0).double(),
        "advantages": mask.double(),
    }
    declaration = Declaration(needs=frozenset({"log_probs", "advantages"}))
    loss = ProbedLoss(name="linear", function=linear, declaration=declaration, settings={}, mode=mode)
    seen = loss.seen(LossBatch(columns, mask))
    assert seen.gradient.tolist() == (gradient * mask.double()).tolist()
    assert seen.loss == pytest.approx({"token-mean": 0.5, "seq-mean-token-sum": 1.5}[mode], abs=1e-15)
    part = loss.seen(LossBatch(columns, mask).rows(torch.tensor([0])), batch_totals(mask))
    assert part.gradient.tolist() == [[gradient, gradient, 0.0, 0.0]]
    assert part.loss == pytest.approx({"token-mean": 1 / 6, "seq-mean-token-sum": 0.5}[mode], abs=1e-15)


# ------------------------------------------------------------------------------------ edges of the rules of losses


def test_log_ratios_of_the_check_go_far_out_on_both_sides_in_ordinary_log_probs() -> None:
    seen: set[tuple[float, float]] = set()

    def watches(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PolicyLossTerms:
        if log_probs.dtype == torch.float32:
            seen.update(
                zip(log_probs[response_mask].tolist(), old_log_probs[response_mask].tolist(), strict=True)
            )
        return terms(-ratio(log_probs, old_log_probs) * advantages)

    assert sentences(watches) == {}
    assert seen == {(-0.5, -50.5), (-50.5, -0.5), (-0.5, -200.5), (-200.5, -0.5)}


class Scaled(torch.autograd.Function):
    """The same value, and where told a gradient that is `factor` times as large; NaN for one that is no number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, where: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(where)
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.where(ctx.saved_tensors[0], ctx.factor * gradient, gradient), None, None


@pytest.mark.parametrize("place", [0, 1])
def test_one_gradient_that_is_not_finite_is_enough(place: int) -> None:
    def breaks(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        is_broken = (log_probs - old_log_probs).abs() > 30
        if is_broken.dim() == 2:
            is_broken[:, :place] = is_broken[:, place + 1 :] = False
            is_broken[1:] = False
        values = -ratio(Scaled.apply(log_probs, is_broken, torch.nan), old_log_probs) * advantages
        return terms(values)

    assert set(sentences(breaks)) == {"extreme log-ratio"}


def test_a_gradient_on_one_token_outside_the_mask_is_enough() -> None:
    def pulls(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PolicyLossTerms:
        values = -ratio(log_probs, old_log_probs) * advantages
        if response_mask.dim() == 2 and not response_mask[0, 2]:
            one = log_probs[0, 2]
            values = values + (one - one.detach()) * response_mask
        return terms(values)

    assert sentences(pulls)["outside the mask"].startswith(
        "tokens outside the mask have a gradient, of up to "
    )


@pytest.mark.parametrize(
    ("above", "others", "ending"),
    [
        (1.0, -1.0, "away from rewarded answers"),
        (1.0, 0.5, "one constant for all tokens is expected"),
        (1.0, 1.001, "1 to 1.001 times that of REINFORCE, and one constant for all tokens is expected"),
        (1.0, 0.0, "is 0 to 1 times that of REINFORCE, and one constant for all tokens is expected"),
        (1.0, -0.0, "is 0 to 1 times that of REINFORCE, and one constant for all tokens is expected"),
        (1e-7, 1.01e-7, "one constant for all tokens is expected"),  # a small loss is held to the same share
    ],
)
def test_what_is_wrong_on_policy_goes_by_the_factors_of_reinforce(
    above: float, others: float, ending: str
) -> None:
    def uneven(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        factor = torch.where(advantages > 0, above, others)
        return terms(-factor * ratio(log_probs, old_log_probs) * advantages)

    found = sentences(uneven)
    assert set(found) == {"on-policy"}
    assert all(part in found["on-policy"] for part in ending.split(", and "))


@pytest.mark.parametrize(("nudge", "is_found"), [(0.5e-8, False), (0.125, True)])
def test_one_term_of_the_flat_layout_that_differs_by_more_than_rounding_is_enough(
    nudge: float, is_found: bool
) -> None:
    # 1e-8 is what float64 is taken to lose on the largest term; far more than that of the smallest.
    def one_differs(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        values = -ratio(log_probs, old_log_probs) * advantages
        if log_probs.dim() == 1:
            size = 1.0 if is_found else values.detach().abs().max()
            values = torch.cat([values[:1] + nudge * size, values[1:]])
        return terms(values)

    expected = "flat columns [N] give other terms than padded ones [B, R], by up to 0.125"
    assert sentences(one_differs) == ({"layout": expected} if is_found else {})


def test_flat_columns_give_one_term_per_token_in_one_row() -> None:
    def in_rows(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        values = -ratio(log_probs, old_log_probs) * advantages
        return terms(values.reshape(-1, values.shape[-1]))

    # The rows of the example go up to their last token: 5 + 6 + 1 + 4 + 3 = 19 places.
    found = sentences(in_rows)["layout"]
    assert "flat columns [N] do not give one term per token: policy loss" in found
    assert "returned terms of shape (1, 19) for columns of shape (19,)" in found


@pytest.mark.parametrize("takes_them", [True, False])
def test_importance_weights_of_the_check_are_a_half_on_sampled_tokens_and_count(takes_them: bool) -> None:
    seen: list[Tensor] = []

    def weighs(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: object = None,
        rollout_is_weights: Tensor | None = None,
    ) -> object:
        values = -ratio(log_prob, old_log_prob) * advantages
        if rollout_is_weights is not None:
            seen.append(rollout_is_weights)
            values = values * (rollout_is_weights if takes_them else 1.0)
        return agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info), {}  # type: ignore[attr-defined]

    found = sentences(weighs)
    assert set(found) == (set() if takes_them else {"importance weights"})
    assert takes_them or found["importance weights"].startswith(
        "rollout_is_weights is a parameter, but weights of 0.5 change nothing: the loss stays "
    )
    mask = example_batch(0).mask
    assert seen
    assert all(weights.tolist() == (0.5 * mask).tolist() for weights in seen)


def test_two_results_are_equal_up_to_and_at_their_tolerance() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.float64)
    at_most = ATOL + RTOL  # of a loss of 0, whose scale is 1
    assert gap_between(Seen(0.0, nothing), Seen(at_most, nothing)) is None
    assert gap_between(Seen(0.0, nothing), Seen(-at_most, nothing)) is None
    assert (
        gap_between(Seen(0.0, nothing), Seen(at_most * (1 + 1e-12), nothing))
        == "the loss is 1.001e-08 and not 0"
    )
    assert gap_between(Seen(0.0, nothing), Seen(float("nan"), nothing)) == "the loss is nan and not 0"
    steep = torch.tensor([[100.0, 1.0]], dtype=torch.float64)
    near = steep + torch.tensor([[0.0, 0.99e-6]], dtype=torch.float64)  # 100 * RTOL is 1e-6
    far = steep + torch.tensor([[0.0, 1.01e-6]], dtype=torch.float64)
    assert gap_between(Seen(1.0, steep), Seen(1.0, near)) is None
    assert gap_between(Seen(1.0, steep), Seen(1.0, far)) == (
        "the loss stays 1, but its gradient changes by up to 1.01e-06 (its largest entry is 100)"
    )


def test_the_zero_advantage_rule_takes_a_gradient_of_its_tolerance_for_none() -> None:
    def pulls(size: float) -> set[str]:
        def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
            own = size * (advantages == 0) * log_probs
            return terms(-ratio(log_probs, old_log_probs) * advantages + own)

        return set(sentences(loss))

    # Under token-mean each of 17 tokens weighs 1/17.
    assert pulls(17 * 0.99 * ATOL) == set()
    assert pulls(17 * 1.01 * ATOL) == {"zero advantage"}


def test_a_setting_may_be_one_of_prepare_alone() -> None:
    def prepare(advantages: Tensor, width: float = 2.0) -> dict[str, Tensor]:
        return {"scaled": advantages / width}

    def prepared(*, log_probs: Tensor, old_log_probs: Tensor, scaled: Tensor) -> PolicyLossTerms:
        return terms(-ratio(log_probs, old_log_probs) * scaled)

    registry: FunctionRegistry[Callable[..., object]] = FunctionRegistry("policy loss")
    options: dict[str, Any] = {
        "needs": ("log_probs", "old_log_probs", "advantages", "scaled"),
        "prepared": ("scaled",),
        "prepare": prepare,
    }
    registry.register("prepared_loss", settings=("width",), **options)(prepared)
    assert registry["prepared_loss"] is prepared
    with pytest.raises(ValueError, match="declares height, but .*prepared has no parameter of that name"):
        registry.register("other", settings=("height",), **options)(prepared)


# ------------------------------------------------------------------------------------ one token, one row is enough


def at(row: int, column: int, value: float) -> Callable[[Batch], Tensor]:
    def estimate(batch: Batch) -> Tensor:
        advantages = torch.zeros_like(batch.values)
        advantages[row, column] = value
        return advantages

    return estimate


def test_one_advantage_that_is_not_0_is_enough() -> None:
    assert broken("a group of one has advantage 0", at(-1, 0, -0.5))[0].startswith(
        "the only sample of a prompt has advantage 0.5:"
    )
    assert broken("equal rewards give exactly 0", at(0, 0, -0.5))[0].startswith(
        "7 samples with reward 0.1 each got an advantage of 0.5"
    )


def test_the_last_token_is_the_one_whose_reward_is_compared() -> None:
    # Credit for the token with the reward alone, as with a discount of 0: the twins differ at the last one.
    def own_reward(batch: Batch) -> Tensor:
        return batch.token_level_rewards * batch.response_mask

    assert broken("a higher reward has the higher advantage", own_reward) == []


def test_a_scale_that_is_off_by_a_thousandth_is_seen() -> None:
    def bent(batch: Batch) -> Tensor:
        rewards = batch.token_level_rewards
        return (rewards + 0.001 * rewards.clamp(max=1.0)) * batch.response_mask

    assert broken("rewards scale as claimed", bent)


def test_a_registered_function_is_checked_as_what_it_is_registered() -> None:
    # By itself its signature would say nothing of the groups that its declaration compares.
    for name in ("grpo", "gae", "remax"):
        function = get_adv_estimator_fn(name)
        assert check_adv_estimator(function) == check_adv_estimator(name) == []
        assert _resolve(function, None) == (name, function, adv_estimator_declaration(name))
    # So this is seen above.
    assert inferred_declaration(get_adv_estimator_fn("gae")) != adv_estimator_declaration("gae")
    findings = check_adv_estimator(get_adv_estimator_fn("remax"), traits=CLAIMS)
    assert findings
    assert all(finding.sentence.startswith("remax: ") for finding in findings)


def test_a_function_may_require_every_column() -> None:
    def takes_all(
        anchor_ids: Tensor, group_ids: Tensor, old_log_probs: Tensor, process_rewards: Tensor, ref_log_prob: Tensor,
        response_mask: Tensor, reward_baselines: Tensor, reward_parts: Tensor, rewards: Tensor,
        rollout_is_weights: Tensor, sample_index: Tensor, sum_pi_squared: Tensor, token_level_rewards: Tensor,
        turn_index: Tensor, turn_rewards: Tensor, values: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return values, values

    declaration = inferred_declaration(takes_all)
    assert declaration.needs == COLUMNS
    assert declaration.is_group_relative


def test_a_registered_loss_is_checked_under_its_first_name_and_its_own_aggregation() -> None:
    seen: set[str] = set()
    for subject in ("gspo", get_policy_loss_fn("gspo_token")):
        probed = _subject(subject, {}, None)
        seen.add(probed.name)
        assert probed.mode == "seq-mean-token-mean"
    assert seen == {"gspo"}
    assert _subject("gspo", {}, "token-sum").mode == "token-sum"
    assert _subject("vanilla", {}, None).mode == "token-mean"


def test_a_gradient_that_is_in_one_place_no_number_ends_the_check() -> None:
    def breaks(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        where = torch.zeros_like(log_probs, dtype=torch.bool)
        where.reshape(-1)[0] = True
        return PolicyLossTerms(
            terms=-ratio(Scaled.apply(log_probs, where, torch.nan), old_log_probs) * advantages, statistics={}
        )

    assert set(sentences(breaks)) == {"finite"}


def test_a_loss_without_a_gradient_is_probed_as_zero() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    columns = {"log_probs": -mask.double(), "advantages": mask.double()}

    def constant(*, log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(advantages.clone())

    def detached(*, log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        other = torch.ones(1, dtype=torch.float64, requires_grad=True)
        return terms(advantages * other)

    declaration = Declaration(needs=frozenset({"log_probs", "advantages"}))
    for function in (constant, detached):
        loss = ProbedLoss(
            name="flat", function=function, declaration=declaration, settings={}, mode="token-mean"
        )
        assert loss.seen(LossBatch(columns, mask)).gradient.tolist() == [[0.0, 0.0]]


def test_the_smallest_batch_has_one_token_and_one_sample() -> None:
    mask = torch.tensor([[True]])
    columns = {"log_probs": torch.full((1, 1), -0.5).double(), "advantages": torch.ones(1, 1).double()}
    declaration = Declaration(needs=frozenset({"log_probs", "advantages"}))
    for mode in ("token-mean", "seq-mean-token-mean"):
        loss = ProbedLoss(name="linear", function=linear, declaration=declaration, settings={}, mode=mode)
        assert loss.seen(LossBatch(columns, mask)).gradient.tolist() == [[-1.0]]
        empty = loss.seen(LossBatch(columns, ~mask))
        assert (empty.loss, empty.gradient.tolist()) == (0.0, [[0.0]])


def test_functions_with_any_keywords_take_declared_settings_and_those_of_their_own() -> None:
    def anything(first: Tensor, *, depth: int = 0, **rest: object) -> Tensor:
        return first

    declaration = Declaration(needs=frozenset({"first"}), settings=frozenset({"width"}))
    given = {"width": 1, "height": 2, "depth": 3}
    assert settings_for(anything, declaration, given) == {"width": 1, "depth": 3}
    registry: FunctionRegistry[Callable[..., object]] = FunctionRegistry("policy loss")
    registry.register("anything", needs=("first", "second"), settings=("width",))(anything)
    assert registry["anything"] is anything


@pytest.mark.parametrize("own", ["token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_loss_that_averages_in_its_own_way_is_compared_in_that_way(own: str) -> None:
    def stubborn(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: object = None,
    ) -> object:
        values = -ratio(log_prob, old_log_prob) * advantages
        return agg_loss(values, response_mask, own, **config.global_batch_info), {}  # type: ignore[attr-defined]

    assert sentences(stubborn) == {}


def test_one_gradient_that_is_out_of_hand_is_enough() -> None:
    def breaks(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        where = (log_probs - old_log_probs > 30) & (advantages == advantages.max())
        return PolicyLossTerms(
            terms=-ratio(Scaled.apply(log_probs, where, 1e20), old_log_probs) * advantages
            - 1e-3 * torch.where(where, Scaled.apply(log_probs, where, 1e20), 0.0),
            statistics={},
        )

    assert set(sentences(breaks)) == {"extreme log-ratio"}
