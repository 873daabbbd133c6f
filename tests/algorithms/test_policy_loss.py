"""The whole loss of the policy: its parts by hand in any cut, and what a configuration leaves open, resolved."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.aggregation import Aggregation, BatchTotals, row_numbers
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.algorithms.losses import (
    aggregation_of,
    loss_spec,
    policy_loss,
    record_loss,
    register_policy_loss,
    rows_with_gradient,
)
from strop.algorithms.losses.terms import POLICY_LOSS_REGISTRY
from strop.utils.metrics import Max, Mean, Min
from strop.utils.tensor_metrics import TensorMetrics

# Rows of 3, 1 and 2 tokens; the second token of the first row is a tool's. Ratio 1 everywhere but at the last token.
LENGTHS = torch.tensor([3, 1, 2])
MASK = torch.tensor([True, False, True, True, True, True])
OLD = torch.tensor([-1.0, math.nan, -2.0, -0.5, -1.5, -3.0], dtype=torch.float64)
LOG_PROBS = torch.tensor([-1.0, -7.0, -2.0, -0.5, -1.5, -3.0 + math.log(2)], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, math.nan, 1.0, -2.0, 0.0, 3.0], dtype=torch.float64)
REF = torch.tensor([-1.5, 0.0, -2.0, -0.5, -1.0, -3.0], dtype=torch.float64)
ENTROPIES = torch.tensor([0.5, 9.0, 0.25, 1.0, 0.0, 0.75], dtype=torch.float64)
TOTALS = BatchTotals(num_tokens=5, num_samples=3)


def batch_of(algorithm: AlgorithmConfig, **more: Tensor) -> dict[str, Tensor]:
    weights = loss_spec(algorithm).aggregation.weights(MASK, TOTALS, LENGTHS, dtype=torch.float64)
    return {
        "advantages": ADVANTAGES, "old_log_probs": OLD, "ref_log_prob": REF, "weights": weights, **more
    }  # fmt: skip


def part_of(batch: dict[str, Tensor], index: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Columns of some tokens, and what else the loss is told."""
    told = {"row_ids": row_numbers(LENGTHS)[index], "totals": TOTALS}
    return {name: column[index] for name, column in batch.items()}, told


def seen_of(
    algorithm: AlgorithmConfig, batch: dict[str, Tensor], parts: list[list[int]]
) -> tuple[float, dict[str, Any], Tensor]:
    """Loss, metrics, and gradient by log-probs, of a batch that is cut into these tokens."""
    log_probs = LOG_PROBS.clone().requires_grad_()
    metrics, total = TensorMetrics(), torch.zeros((), dtype=torch.float64)
    for part in parts:
        index = torch.tensor(part, dtype=torch.int64)
        columns, told = part_of(batch, index)
        seen = policy_loss(loss_spec(algorithm), log_probs[index], ENTROPIES[index], columns, **told)
        numbers = [*seen.shares.values(), *seen.tokens.values(), seen.distances]
        assert not any(number.requires_grad for number in numbers if number is not None), (
            "it would keep the graph"
        )
        record_loss(metrics, seen, num_trained=5, share=1)
        total = total + seen.loss
    (gradient,) = torch.autograd.grad(total, log_probs)
    return float(total.detach()), dict(metrics.read()), gradient


WHOLE = [[0, 1, 2, 3, 4, 5]]
CUTS = [WHOLE, [[3], [0, 1, 2], [], [4, 5]], [[4, 5, 0, 1, 2], [3]]]


@pytest.mark.parametrize("parts", CUTS, ids=["whole", "cut", "another order"])
def test_the_parts_of_the_loss_by_hand(parts: list[list[int]]) -> None:
    # Terms -A r: -1, -1, +2, 0, and at the last token r = 2 > 1.2: max(-6, -3.6) = -3.6. Their mean is -3.6 / 5.
    # Entropy: (0.5 + 0.25 + 1 + 0 + 0.75) / 5 = 0.5. KL k2, d^2 / 2: (0.125 + 0.125 + (ln 2)^2 / 2) / 5.
    algorithm = AlgorithmConfig(
        entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", loss_agg_mode="token-mean"
    )
    loss, metrics, gradient = seen_of(algorithm, batch_of(algorithm), parts)
    kl = (0.25 + math.log(2) ** 2 / 2) / 5
    assert loss == pytest.approx(-0.72 - 0.1 * 0.5 + 0.5 * kl, abs=1e-12)
    assert metrics["actor/pg_loss"].value == pytest.approx(-0.72, abs=1e-12)
    assert metrics["actor/entropy"] == Mean(2.5, 5)
    assert metrics["actor/entropy_loss"].value == pytest.approx(0.5, abs=1e-12)
    assert metrics["actor/kl_loss"].value == pytest.approx(kl, abs=1e-12)
    assert metrics["actor/pg_clipfrac"] == Mean(1.0, 5)
    # -A / 5 where the clip left it, and 0.5 * d / 5 of the KL term.
    by_hand = [-0.2 + 0.05, 0.0, -0.2, 0.4, -0.05, 0.1 * math.log(2)]
    torch.testing.assert_close(gradient, torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", CUTS, ids=["whole", "cut", "another order"])
@pytest.mark.parametrize("coef", [0.5, 2.0, 0.0])
def test_a_teacher_pulls_beside_the_policys_term(parts: list[list[int]], coef: float) -> None:
    # The value of k1+ is log p - log p_teacher: 0.5, 0, 0, -0.5, ln 2 at the trained tokens.
    teacher = DistillationConfig(kind="reverse_kl", coef=2.0)
    algorithm = AlgorithmConfig(distillation=teacher, policy_coef=coef)
    loss, metrics, _ = seen_of(algorithm, batch_of(algorithm, teacher_log_prob=REF), parts)
    distance = math.log(2) / 5
    assert loss == pytest.approx(coef * -0.72 + 2 * distance, abs=1e-12)
    assert "actor/entropy_loss" not in metrics, "it is no term of this loss"
    assert metrics["actor/pg_loss"].value == pytest.approx(-0.72, abs=1e-12)
    assert metrics["distillation/loss"].value == pytest.approx(distance, abs=1e-12)
    assert metrics["distillation/abs_loss"].value == pytest.approx((1 + math.log(2)) / 5, abs=1e-12)
    assert metrics["distillation/reverse_kl"].value == pytest.approx(math.log(2) / 5, abs=1e-12)
    assert metrics["distillation/loss_min"] == Min(-0.5)
    assert metrics["distillation/loss_max"].value == pytest.approx(math.log(2))
    assert isinstance(metrics["distillation/loss_max"], Max)


def test_without_old_log_probs_the_ratio_is_1_in_value_and_not_in_gradient() -> None:
    # Terms -A: -1, -1, 2, 0, -3; each token has the gradient -A / 5.
    batch = batch_of(AlgorithmConfig())
    del batch["old_log_probs"]
    loss, _, gradient = seen_of(AlgorithmConfig(), batch, WHOLE)
    assert loss == pytest.approx(-3 / 5, abs=1e-12)
    torch.testing.assert_close(gradient, -torch.where(MASK, ADVANTAGES, 0.0) / 5)


@pytest.mark.parametrize("with_tail", [False, True])
def test_the_chosen_tokens_of_a_teacher_by_hand(with_tail: bool) -> None:
    # At each token the teacher has 1/2 and 1/4 at two tokens where the policy has 1/4 twice: (1/2) ln 2, and with the
    # others as one (1/4) ln 2; the policy's mass in them is 1/2, and the first of them is likely under it too.
    teacher = DistillationConfig(kind="forward_kl", coef=2.0, with_tail=with_tail)
    spec = loss_spec(AlgorithmConfig(distillation=teacher, policy_coef=0.0))
    given = torch.tensor([0.5, 0.25], dtype=torch.float64).log().expand(6, 2)
    batch = batch_of(spec.algorithm, teacher_logprobs=given)
    chosen = torch.full((6, 2), 0.25, dtype=torch.float64).log().requires_grad_()
    likely = torch.tensor([True, False]).expand(6, 2)
    columns, told = part_of(batch, torch.arange(6))
    seen = policy_loss(spec, LOG_PROBS, ENTROPIES, columns, chosen_log_probs=chosen, is_likely=likely, **told)
    distance = (0.25 if with_tail else 0.5) * math.log(2)
    assert float(seen.loss.detach()) == pytest.approx(2 * distance, abs=1e-12)
    metrics = TensorMetrics()
    record_loss(metrics, seen, num_trained=5, share=1)
    read = dict(metrics.read())
    assert read["distillation/loss"].value == pytest.approx(distance, abs=1e-12)
    assert read["distillation/student_mass"].value == pytest.approx(0.5, abs=1e-12)
    assert read["distillation/overlap_ratio"].value == pytest.approx(0.5, abs=1e-12)


def test_importance_weights_of_the_rollout_act_on_the_policys_term_alone() -> None:
    # Weights 2, 1, 1, 3 and 0.5 of the terms -1, -1, 2, 0 and -3.6: -2.8 / 5. The entropy stays 0.5.
    algorithm = AlgorithmConfig(entropy_coeff=0.1)
    weights = torch.tensor([2.0, 9.0, 1.0, 1.0, 3.0, 0.5], dtype=torch.float64)
    loss, metrics, _ = seen_of(algorithm, batch_of(algorithm, rollout_is_weights=weights), WHOLE)
    assert loss == pytest.approx(-2.8 / 5 - 0.1 * 0.5, abs=1e-12)
    assert metrics["actor/pg_loss"].value == pytest.approx(-2.8 / 5, abs=1e-12)


@pytest.mark.parametrize("coeff", [-1.0, 1.0])
def test_an_entropy_coefficient_of_either_sign(coeff: float) -> None:
    algorithm = AlgorithmConfig(entropy_coeff=coeff)
    loss, _, _ = seen_of(algorithm, batch_of(algorithm), WHOLE)
    assert loss == pytest.approx(-0.72 - coeff * 0.5, abs=1e-12)


def test_the_loss_has_the_dtype_of_the_log_probs() -> None:
    algorithm = AlgorithmConfig(
        policy_loss="gspo"
    )  # which reads the rows of tokens, numbers that stay integers
    columns, told = part_of(batch_of(algorithm), torch.arange(6))
    assert columns["advantages"].dtype == torch.float64
    seen = policy_loss(loss_spec(algorithm), LOG_PROBS.float(), ENTROPIES.float(), columns, **told)
    assert {seen.loss.dtype, *(values.dtype for values in seen.tokens.values())} == {torch.float32}


def test_a_loss_of_verls_convention_sees_padded_rows_and_no_empty_part() -> None:
    shapes: list[tuple[int, ...]] = []

    def mine(log_prob: Tensor, advantages: Tensor, response_mask: Tensor, config: Any, **_: Any) -> Any:
        shapes.append(tuple(response_mask.shape))
        loss = -(log_prob * advantages * response_mask).sum() / config.global_batch_info.batch_num_tokens
        return loss, {"actor/mine": advantages.sum() / response_mask.sum()}

    register_policy_loss("mine")(mine)
    try:
        algorithm = AlgorithmConfig(policy_loss="mine")
        teacher_ids = torch.zeros(
            6, 2, dtype=torch.int64
        )  # a column that is no number per token is not offered
        loss, metrics, gradient = seen_of(algorithm, batch_of(algorithm, teacher_ids=teacher_ids), CUTS[1])
    finally:
        del POLICY_LOSS_REGISTRY["mine"]
    assert shapes == [(1, 1), (1, 3), (1, 2)]
    weights = torch.where(MASK, ADVANTAGES, 0.0)
    torch.testing.assert_close(gradient, -weights / 5)
    assert loss == pytest.approx(float(-(LOG_PROBS * weights).sum() / 5))
    assert metrics["actor/mine"] == Mean(3.0, 5)


def test_rows_that_cannot_move_the_policy() -> None:
    plain = AlgorithmConfig()
    batch = batch_of(plain, advantages=torch.tensor([0.0, 5.0, 0.0, -2.0, 0.0, 0.0], dtype=torch.float64))
    assert rows_with_gradient(loss_spec(plain), batch, LENGTHS) == [False, True, False], (
        "the 5 is not trained on"
    )
    for more in ({"entropy_coeff": 0.1}, {"use_kl_loss": True}, {"policy_loss": "kl_cov"}):
        assert rows_with_gradient(loss_spec(AlgorithmConfig(**more)), batch, LENGTHS) == [True] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy_loss", "asked", "mode"),
    [
        ("vanilla", None, "token-mean"),
        ("gspo", None, "seq-mean-token-mean"),
        ("gspo", "token-sum", "token-sum"),
    ],
)
def test_the_aggregation_is_resolved_once(policy_loss: str, asked: Any, mode: str) -> None:
    algorithm = AlgorithmConfig(policy_loss=policy_loss, loss_agg_mode=asked)
    assert aggregation_of(algorithm) == loss_spec(algorithm).aggregation == Aggregation(mode=mode)


def test_columns_that_a_loss_cannot_do_without_are_named() -> None:
    spec = loss_spec(AlgorithmConfig(old_log_probs="rollout"))
    assert spec.present(frozenset({"advantages", "rollout_log_probs", "values"})) == {
        "advantages": "advantages",
        "rollout_log_probs": "rollout_log_probs",
        "old_log_probs": "rollout_log_probs",
    }
    with pytest.raises(ValueError, match="needs the column rollout_log_probs, but the batch has advantages"):
        spec.present(frozenset({"advantages"}))
    taught = loss_spec(AlgorithmConfig(distillation=DistillationConfig(kind="forward_kl")))
    teacher = {"teacher_ids": "teacher_ids", "teacher_logprobs": "teacher_logprobs"}
    assert taught.takes_chosen_tokens
    assert not spec.takes_chosen_tokens
    assert taught.present(frozenset({*teacher, "values"})) == teacher
    with pytest.raises(ValueError, match="needs the column teacher_ids, but the batch has teacher_logprobs"):
        taught.present(frozenset({"teacher_logprobs"}))
