"""Each rule that losses and estimators are held to, on a function that just keeps it and on one that just breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algorithms.contract.estimator_batches import Batch
from algorithms.contract.estimator_rules import RULES, EstimatorTraits, _difference
from algorithms.contract.estimators import check_adv_estimator
from algorithms.contract.policy_losses import check_policy_loss
from algorithms.planted_bugs import right
from probing import CLAIMS, broken, ratio, sentences, terms
from torch import Tensor

from strop.algorithms.advantages.groups import center_groups, expand_to_tokens
from strop.algorithms.losses import PolicyLossTerms
from strop.algorithms.registry import Declaration
from strop.algorithms.verl_aggregation import agg_loss


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def centered(batch: Batch) -> Tensor:
    """Dr. GRPO: keeps every rule that CLAIMS asks for."""
    rewards = batch.columns()["rewards"]
    return expand_to_tokens(center_groups(rewards, batch.group_ids)[0], batch.response_mask)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_an_estimator_without_a_fault_keeps_the_rule(rule: str) -> None:
    assert broken(rule, centered) == []


def noted(column: str) -> Callable[[Batch], Tensor]:
    """Reads a column where nothing is sampled."""

    def estimate(batch: Batch) -> Tensor:
        outside = (batch.columns()[column] * ~batch.response_mask).sum(dim=1, keepdim=True)
        return centered(batch) + 1e-6 * outside * batch.response_mask

    return estimate


@pytest.mark.parametrize("column", ["values", "old_log_probs", "sum_pi_squared", "rollout_is_weights"])
def test_any_column_may_be_the_one_that_is_read_outside_the_mask(column: str) -> None:
    (sentence, *_) = broken("values outside the mask never matter", noted(column))
    assert sentence.startswith(
        "with other values, log-probs or weights outside the mask, the advantage of row "
    )


@pytest.mark.parametrize("name", Batch.__dataclass_fields__)
def test_any_column_may_be_the_one_that_is_written(name: str) -> None:
    def estimate(batch: Batch) -> Tensor:
        advantages = centered(batch)
        column = getattr(batch, name)
        column[-1] = ~column[-1] if column.dtype == torch.bool else column[-1] + 1
        return advantages

    assert set(broken("inputs stay as they are", estimate)) == {
        f"the call changed {name} in place; the trainer uses the columns again"
    }


def test_columns_are_padded_on_the_right_outside_the_mask() -> None:
    def rest(batch: Batch) -> Tensor:
        # Right on every batch that is not padded, and blind to what a padded one must not show.
        assert not batch.response_mask[:, -1:].any() or batch.values[:, -1].max() <= 1
        return centered(batch)

    assert broken("padding never matters", rest) == []
    for width in (
        lambda batch: centered(batch) * batch.response_mask.shape[1],
        lambda batch: centered(batch) + 1e-6 * batch.values.mean() * batch.response_mask,
        lambda batch: centered(batch) + 1e-6 * batch.token_level_rewards.shape[1] * batch.response_mask,
    ):
        assert all(
            sentence.startswith("with two columns of padding on the right, the advantage of row ")
            for sentence in broken("padding never matters", width)
        )
        assert broken("padding never matters", width)
    # The parts of the reward are no tokens: three of them stay three.
    assert not broken("padding never matters", lambda b: centered(b) * b.reward_parts.shape[1])


@pytest.mark.parametrize(
    ("rule", "estimate", "sentence"),
    [
        (
            "float64 and finite",
            lambda b: centered(b).float(),
            r"float64 columns gave advantages of torch.float32",
        ),
        ("float64 and finite", lambda b: centered(b) / 0, r"finite columns gave the advantages \[.*\]"),
        (
            "zero outside the mask",
            lambda b: torch.ones_like(b.values),
            r"a token outside the mask has advantage 1",
        ),
        (
            "the order of rows never matters",
            lambda b: centered(b) + torch.arange(len(b.group_ids))[:, None] * b.response_mask,
            r"with rows in another order, the advantage of row \d, token \d is .* where .* was expected",
        ),
        (
            "group ids are names",
            lambda b: centered(b) * b.group_ids[:, None],
            r"with other numbers for the same groups, the advantage .*",
        ),
        (
            "group ids are names",
            lambda b: centered(b) * (b.group_ids > 0)[:, None],
            r"with other numbers for the same groups, the advantage .*",
        ),
        (
            "a reward counts wherever it sits",
            lambda b: expand_to_tokens((b.token_level_rewards * b.response_mask).sum(1), b.response_mask),
            r"with rewards moved from given tokens to the sampled token before each, the advantage .*",
        ),
        (
            "a higher reward has the higher advantage",
            lambda b: torch.zeros_like(b.values),
            r"of two answers to one prompt, reward 1 got the advantage 0 and reward 0 got 0",
        ),
        (
            "a higher reward has the higher advantage",
            lambda b: -centered(b),
            r"of two answers to one prompt, reward 1 got the advantage -0.5 and reward 0 got 0.5",
        ),
        (
            "a group of one has advantage 0",
            lambda b: 0.25 * b.response_mask.double(),
            r"the only sample of a prompt has advantage 0.25: it has nothing to be compared with",
        ),
        (
            "equal rewards give exactly 0",
            lambda b: 1e-18 * b.response_mask.double(),
            r"7 samples with reward 0.1 each got an advantage of 1e-18, not 0",
        ),
        (
            "equal rewards give exactly 0",
            lambda b: float(len(b.group_ids) == 8) * b.response_mask.double(),
            r"8 samples with reward 0.1 each got an advantage of 1, not 0",
        ),
        (
            "a constant added to a group changes nothing",
            lambda b: expand_to_tokens(b.columns()["rewards"], b.response_mask),
            r"with 4 added to every reward of one prompt, the advantage .*",
        ),
        (
            "a constant added to a group changes nothing",
            lambda b: expand_to_tokens(b.reward_parts.sum(1), b.response_mask),
            r"with 4 added to every reward of one prompt, the advantage .*",
        ),
        ("rewards scale as claimed", lambda b: centered(b) ** 2, r"with rewards times 4, the advantage .*"),
        (
            "rewards scale as claimed",
            lambda b: centered(b) + b.response_mask,
            r"with rewards times 4, the advantage .*",
        ),
        (
            "prompts do not see each other",
            lambda b: centered(b) - centered(b).mean() + 1e-6 * len(b.group_ids),
            r"with other prompts in the same batch, the advantage .*",
        ),
    ],
)
def test_an_estimator_with_a_fault(rule: str, estimate: Callable[[Batch], Tensor], sentence: str) -> None:
    found = broken(rule, estimate)
    assert found
    assert all(re.fullmatch(sentence, one) for one in found), found


def test_rules_that_are_not_claimed_are_not_asked() -> None:
    nothing = EstimatorTraits()
    assert (nothing.compares_groups, nothing.is_shift_invariant, nothing.is_batch_wide) == (
        False,
        False,
        False,
    )
    assert nothing.scaling == "none"

    def raw(batch: Batch) -> Tensor:
        return expand_to_tokens(batch.columns()["rewards"] ** 2, batch.response_mask)

    for rule in (
        "a group of one has advantage 0",
        "equal rewards give exactly 0",
        "a constant added to a group changes nothing",
        "rewards scale as claimed",
    ):
        assert broken(rule, raw)
        assert not broken(rule, raw, nothing)
    whitened = replace(nothing, is_batch_wide=True)
    assert broken("prompts do not see each other", lambda b: raw(b) - raw(b).mean(), nothing)
    assert not broken("prompts do not see each other", lambda b: raw(b) - raw(b).mean(), whitened)
    invariant = replace(CLAIMS, scaling="invariant")
    assert broken("rewards scale as claimed", centered, invariant)
    assert not broken("rewards scale as claimed", lambda b: centered(b).sign(), invariant)


def test_differences_are_told_from_rounding() -> None:
    expected = double([[0.0, 100.0], [0.5, -2.0]])
    assert _difference(expected + 0.9e-9, expected, "x") is None
    assert _difference(expected * (1 - 0.9e-9), expected, "x") is None
    assert _difference(expected + double([[0, 0.9e-7], [0, -1.9e-9]]), expected, "x") is None
    for place, change in (((0, 0), 1.1e-9), ((0, 1), 1.1e-7), ((1, 0), -1.1e-9), ((1, 1), 2.1e-9)):
        got = expected.clone()
        got[place] += change
        row, column = place
        sentence = _difference(got, expected, "a change")
        assert sentence is not None
        assert sentence.startswith(f"with a change, the advantage of row {row}, token {column} is ")
        assert sentence.endswith(f" where {expected[place]:g} was expected")
    several = _difference(expected + double([[0, 0.25], [0.5, 0]]), expected, "x")
    assert several == "with x, the advantage of row 0, token 1 is 100.25 where 100 was expected"
    assert _difference(expected + 0.9e-4, expected, "x", 1e-4) is None
    assert _difference(expected + 1.1e-4, expected, "x", 1e-4) is not None


# -------------------------------------------------------------------------------- the check of estimators


def test_a_fault_that_only_some_batches_show_is_found_on_a_later_one() -> None:
    calls = []

    def wide(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(tuple(response_mask.shape))
        advantages, _ = right(rewards=rewards, group_ids=group_ids, response_mask=response_mask)
        return advantages + 1.0 * (response_mask.shape[1] == 5), advantages

    assert {f.rule for f in check_adv_estimator(wide, num_batches=8)} >= {"zero outside the mask"}
    first = calls.copy()
    calls.clear()
    check_adv_estimator(wide, num_batches=8)
    assert calls == first  # the same seed, the same batches
    calls.clear()
    check_adv_estimator(wide, num_batches=8, seed=1)
    assert calls != first
    calls.clear()
    check_adv_estimator(right, num_batches=0)
    assert not calls


def test_a_broken_rule_does_not_hide_a_later_one() -> None:
    def two_faults(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        advantages, _ = right(rewards=rewards, group_ids=group_ids, response_mask=response_mask)
        # Nothing but a wrong number outside the mask at first; from the fifth batch on the sign is wrong too.
        batches.add(tuple(response_mask.shape))
        sign = -1.0 if len(batches) > 8 else 1.0
        return sign * advantages + 1.0 * ~response_mask, advantages

    batches: set[tuple[int, ...]] = set()
    found = [finding.rule for finding in check_adv_estimator(two_faults, num_batches=12)]
    assert found[0] == "zero outside the mask"
    assert "a higher reward has the higher advantage" in found
    assert len(found) == len(set(found))


def test_shared_settings_of_the_check_are_below_1_so_that_a_forgotten_discount_shows() -> None:
    seen: dict[str, object] = {}

    def discounting(
        *,
        rewards: Tensor,
        response_mask: Tensor,
        gamma: float = 1.0,
        lam: float = 1.0,
        norm_by_std: bool = False,
        own: int = 3,
    ) -> tuple[Tensor, Tensor]:
        seen.update(gamma=gamma, lam=lam, norm_by_std=norm_by_std, own=own)
        advantages = expand_to_tokens(rewards, response_mask)
        return advantages, advantages

    check_adv_estimator(discounting, num_batches=1)
    assert seen == {"gamma": 0.9, "lam": 0.8, "norm_by_std": True, "own": 3}
    check_adv_estimator(discounting, num_batches=1, settings={"gamma": 0.5, "own": 4})
    assert seen == {"gamma": 0.5, "lam": 0.8, "norm_by_std": True, "own": 4}


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError],
)
def test_what_a_function_raises_ends_its_check(error: type[Exception]) -> None:
    def raising(*, rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        raise error("no")

    (finding,) = check_adv_estimator(raising)
    assert finding.rule == "it runs"
    assert finding.sentence.startswith(f"raising raised {error.__name__}: ")


def test_a_function_is_ours_if_all_that_it_requires_is_ours() -> None:
    def of_verl(rewards: Tensor, response_mask: Tensor, config: object = None) -> tuple[Tensor, Tensor]:
        return rewards, rewards

    (finding,) = check_adv_estimator(of_verl)
    assert "of_verl requires rewards, which nobody gives it: verl's convention has" in finding.sentence
    declared = Declaration(needs=frozenset({"rewards", "response_mask", "group_ids"}))
    assert check_adv_estimator(right, declaration=declared) == []
    assert check_adv_estimator("grpo") == check_adv_estimator("rloo_vectorized") == []
    with pytest.raises(ValueError, match="unknown advantage estimator 'grp'"):
        check_adv_estimator("grp")


# ------------------------------------------------------------------------------------ the check of losses


def test_columns_that_are_written_are_named() -> None:
    def writes(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PolicyLossTerms:
        result = terms(-ratio(log_probs, old_log_probs) * advantages.clone())
        if response_mask.dim() == 2:
            advantages[1, 1] += 1.0
            response_mask[0, 2] = True
        return result

    assert sentences(writes)["inputs"] == (
        "it writes into the columns it is given: advantages, response_mask changed"
    )


def test_values_from_outside_the_mask_are_found() -> None:
    def reads(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PolicyLossTerms:
        outside = (advantages * ~response_mask).mean()
        return terms(-ratio(log_probs, old_log_probs) * advantages * (1 + outside))

    assert sentences(reads)["outside the mask"].startswith(
        "depends on values outside the mask: with 7.25 there in place of 0, the loss is "
    )


def test_rows_are_known_in_the_flat_layout() -> None:
    def by_row(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, row_ids: Tensor
    ) -> PolicyLossTerms:
        rows = row_ids.reshape(-1)
        totals = torch.zeros(int(rows.max()) + 1, dtype=log_probs.dtype).index_add(
            0, rows, (log_probs - old_log_probs).detach().reshape(-1)
        )
        return terms(-ratio(log_probs, old_log_probs) * advantages * (1 + totals[row_ids].clamp(-1, 1) ** 2))

    assert sentences(by_row) == {}


def test_remedies_for_a_cut_go_by_the_convention() -> None:
    def ours(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PolicyLossTerms:
        return terms(-ratio(log_probs, old_log_probs) * advantages * response_mask.sum())

    found = sentences(ours)["cut of the batch"]
    assert found.startswith("changes with how the batch is cut: for two and three responses in two calls, ")
    assert found.endswith("; compute what concerns the whole batch in prepare")

    def fields(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> object:
        return agg_loss(-ratio(log_prob, old_log_prob) * advantages, response_mask, "token-mean"), {}

    assert sentences(fields)["cut of the batch"].endswith(
        "; reduce it with agg_loss(..., **config.global_batch_info)"
    )


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_one_positive_factor_of_reinforce_will_do(factor: float) -> None:
    def scaled(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(-factor * ratio(log_probs, old_log_probs) * advantages)

    assert sentences(scaled) == {}


def test_a_loss_that_teaches_nothing_is_said_to() -> None:
    def flat(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(0.0 * log_probs * advantages)

    assert sentences(flat) == {
        "on-policy": "no gradient where log_probs equal old_log_probs: nothing is ever learned"
    }


@pytest.mark.parametrize("bound", [20.0, 25.0])
def test_log_ratios_are_bounded_before_they_get_out_of_hand(bound: float) -> None:
    def bounded(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(-(log_probs - old_log_probs).clamp(-bound, bound).exp() * advantages)

    # e^25 = 7e10 is large and below 1e12; only a gradient above that, or one that is not finite, is out of hand.
    assert sentences(bounded) == {}

    def squared(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(-(log_probs - old_log_probs).clamp(-30, 30).exp() * advantages)

    assert "not finite, or out of hand, at log-ratio 50 in float32" in sentences(squared)["extreme log-ratio"]

    def down(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(
            -ratio(log_probs, old_log_probs) * advantages + 0 * (old_log_probs - log_probs).detach().exp()
        )

    assert "at log-ratio -200 in float32" in sentences(down)["extreme log-ratio"]


def test_numbers_that_are_not_finite_end_the_check() -> None:
    def broken_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        return terms(log_probs / 0 * advantages)

    found = sentences(broken_loss)
    assert set(found) == {"finite"}
    assert found["finite"].startswith("on ordinary numbers the loss is ")


def test_settings_and_modes_of_the_check() -> None:
    seen: dict[str, object] = {}

    def own(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        clip_low: float,
        clip_c: float,
        width: float = 0.5,
    ) -> PolicyLossTerms:
        seen.update(clip_low=clip_low, clip_c=clip_c, width=width)
        return terms(-ratio(log_probs, old_log_probs) * advantages)

    assert sentences(own) == {}
    assert seen == {"clip_low": 0.2, "clip_c": 3.0, "width": 0.5}
    assert sentences(own, settings={"clip_low": 0.1, "width": 0.25}) == {}
    assert seen == {"clip_low": 0.1, "clip_c": 3.0, "width": 0.25}
    with pytest.raises(ValueError, match="'own' has no setting 'widht'; did you mean 'width'"):
        check_policy_loss(own, settings={"widht": 1.0})
    for mode in ("token-mean", "seq-mean-token-mean", "token-sum"):
        assert sentences("sapo", loss_agg_mode=mode) == {}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown policy loss 'sap'"):
        check_policy_loss("sap")
