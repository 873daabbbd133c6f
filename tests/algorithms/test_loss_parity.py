"""Every registered loss against a slow reference, in both layouts, in terms and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import policy_losses as reference
from references.policy_losses import Result, Row
from strop.algorithms.losses import POLICY_LOSS_REGISTRY, policy_loss_terms, prepare_columns

LOW, HIGH, CAP = 0.2, 0.3, 3.0
CLIP = {"clip_low": LOW, "clip_high": HIGH, "clip_c": CAP}
COV = {
    "clip_cov_ratio": 0.4,
    "clip_cov_lb": -0.5,
    "clip_cov_ub": 2.0,
    "kl_cov_ratio": 0.4,
    "ppo_kl_coef": 0.3,
}

EACH_TOKEN: dict[str, Callable[[reference.Token], tuple[float, float]]] = {
    "vanilla": partial(reference.vanilla, low=LOW, high=HIGH, c=CAP),
    "cispo": partial(reference.cispo, low=LOW, high=HIGH),
    "dppo_tv": partial(reference.dppo_tv, low=LOW, high=HIGH, truncation=20.0),
    "dppo_kl": partial(reference.dppo_kl, low=LOW, high=HIGH, truncation=20.0),
    "sapo": partial(reference.sapo, tau_pos=1.0, tau_neg=1.05),
    "dro": partial(reference.dro, beta=1.0),
    "gpg": reference.policy_gradient,
}
EACH_ROW: dict[str, Callable[[list[Row]], Result]] = {
    "gspo": partial(reference.gspo, low=LOW, high=HIGH),
    "gmpo": partial(reference.gmpo, low=LOW, high=HIGH),
}
WHOLE_BATCH = ("clip_cov", "kl_cov")
ALIASES = {"gspo_token": "gspo", "geo_mean": "gmpo", "reinforce": "gpg"}

Batches = st.lists(
    st.lists(
        st.tuples(
            st.floats(-8, -0.05),
            # Most tokens move a little, some beyond every bound.
            st.one_of(st.floats(-0.6, 0.6), st.sampled_from([0.0, -30.0, 30.0, 5.0])),
            st.sampled_from([-2.5, -1.0, 0.0, 0.5, 3.0]),
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)


def rows_of(drawn: list[list[tuple[float, float, float]]]) -> list[Row]:
    """(old, move, A) to (log_prob, old, A), with log-probs of at most 0."""
    return [[(min(old, old - move) + move, min(old, old - move), a) for old, move, a in row] for row in drawn]


def padded(rows: list[Row], *, gap: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Columns [B, R] with `gap` masked positions before each row's tokens, and garbage outside the mask."""
    width = gap + max((len(row) for row in rows), default=0) + 1
    columns = {key: torch.full((len(rows), width), math.nan, dtype=torch.float64) for key in range(3)}
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, token in enumerate(row):
            mask[i, gap + t] = True
            for key, value in enumerate(token):
                columns[key][i, gap + t] = value
    names = ("log_probs", "old_log_probs", "advantages")
    return {name: columns[key] for key, name in enumerate(names)}, mask


def flattened(columns: Mapping[str, Tensor], mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows = torch.arange(mask.shape[0])[:, None].expand(mask.shape)
    return {**{key: c.reshape(-1) for key, c in columns.items()}, "row_ids": rows.reshape(-1)}, mask.reshape(
        -1
    )


def ours(name: str, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms and gradients of their sum at the valid tokens, and the choice of the whole batch."""
    log_probs = columns["log_probs"].clone().requires_grad_()
    given = {**columns, "log_probs": log_probs}
    numbers = {**CLIP, **COV}
    prepared = prepare_columns(name, mask=mask, columns=given, settings=numbers)
    got = policy_loss_terms(name, mask=mask, columns={**given, **prepared}, settings=numbers)
    (by_log_probs,) = torch.autograd.grad(torch.where(mask, got.terms, 0.0).sum(), log_probs)
    assert (by_log_probs[~mask] == 0).all()
    for statistic, values in got.statistics.items():
        assert not values.requires_grad
        assert torch.isfinite(values[mask]).all(), statistic
    return got.terms.detach()[mask], by_log_probs[mask], prepared.get("cov_selected", mask)[mask]


def expected(name: str, rows: list[Row], chosen: set[int]) -> Result:
    if name in EACH_TOKEN:
        return reference.each_token(EACH_TOKEN[name], rows)
    if name in EACH_ROW:
        return EACH_ROW[name](rows)
    if name == "clip_cov":
        return reference.clip_cov(rows, chosen, low=LOW, high=HIGH)
    return reference.kl_cov(rows, chosen, coef=COV["ppo_kl_coef"])


def near_a_bound(rows: list[Row]) -> bool:
    """A number so close to a clip bound that rounding decides on which side it lies."""
    for row in rows:
        logs = [log_prob - old for log_prob, old, _ in row]
        values = [math.exp(min(x, 30.0)) for x in logs]
        values += [math.exp(min(math.fsum(logs) / len(logs), 30.0))] if logs else []
        moves = [math.exp(log_prob) - math.exp(old) for log_prob, old, _ in row]
        if any(abs(v - bound) < 1e-9 for v in values for bound in (1 - LOW, 1 + HIGH, CAP, 20.0)):
            return True
        if any(abs(v - bound) < 1e-9 for v in moves for bound in (-LOW, HIGH)):
            return True
        if any(abs(v - bound) < 1e-9 for v in logs for bound in (-LOW, HIGH, 20.0, -20.0)):
            return True
    return False


@pytest.mark.parametrize("name", sorted({*EACH_TOKEN, *EACH_ROW, *WHOLE_BATCH}))
@given(drawn=Batches)
@settings(max_examples=25, deadline=None)
def test_loss_equals_the_reference_in_both_layouts(
    name: str, drawn: list[list[tuple[float, float, float]]]
) -> None:
    rows = rows_of(drawn)
    if near_a_bound(rows):
        return
    columns, mask = padded(rows)
    terms, by_log_probs, selected = ours(name, columns, mask)
    chosen = set(selected.nonzero().flatten().tolist())
    pairs = [pair for row in expected(name, rows, chosen) for pair in row]
    for seen, k in ((terms, 0), (by_log_probs, 1)):
        wanted = torch.tensor([pair[k] for pair in pairs], dtype=torch.float64)
        torch.testing.assert_close(seen, wanted, rtol=1e-10, atol=1e-10)
    for got, again in zip((terms, by_log_probs), ours(name, *flattened(columns, mask))[:2], strict=True):
        torch.testing.assert_close(got, again, rtol=1e-12, atol=1e-12)


@given(drawn=Batches)
@settings(max_examples=25, deadline=None)
def test_tokens_chosen_over_the_whole_batch_are_those_of_the_reference(
    drawn: list[list[tuple[float, float, float]]],
) -> None:
    rows = rows_of(drawn)
    total = sum(len(row) for row in rows)
    if not total or near_a_bound(rows):
        return
    values = reference.covariances(rows)
    columns, mask = padded(rows)
    ranked = sorted(values)
    if all(b - a > 1e-9 for a, b in pairwise(ranked)):
        chosen = set(ours("kl_cov", columns, mask)[2].nonzero().flatten().tolist())
        assert chosen == reference.kl_cov_choice(rows, COV["kl_cov_ratio"])
    if all(abs(v - bound) > 1e-9 for v in values for bound in (-0.5, 2.0)):
        candidates = reference.clip_cov_candidates(rows, low=LOW, high=HIGH, bounds=(-0.5, 2.0))
        chosen = set(ours("clip_cov", columns, mask)[2].nonzero().flatten().tolist())
        assert chosen <= candidates
        assert len(chosen) == min(max(int(0.4 * total), 1), len(candidates))


def test_every_registered_loss_has_a_reference() -> None:
    assert set(POLICY_LOSS_REGISTRY) == {*EACH_TOKEN, *EACH_ROW, *WHOLE_BATCH, *ALIASES}
    for alias, name in ALIASES.items():
        assert POLICY_LOSS_REGISTRY[alias] is POLICY_LOSS_REGISTRY[name]


@pytest.mark.parametrize("name", ["vanilla", "gmpo", "sapo", "dro", "gpg", "clip_cov", "kl_cov"])
def test_autograd_agrees_with_finite_differences(name: str) -> None:
    """Of the losses whose gradient is that of their value; the others stop gradients on purpose."""
    generator = torch.Generator().manual_seed(0)
    old = -1 - torch.rand(2, 4, generator=generator, dtype=torch.float64)
    moves = torch.tensor([[0.1, -0.1, 0.5, 0.0], [-0.4, 0.15, -0.05, 0.6]], dtype=torch.float64)
    moves = torch.where(moves == 0, 0.02, moves)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -2.0], [-1.0, -1.0, 0.5, 2.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    columns = {"old_log_probs": old, "advantages": advantages}
    given = {**columns, "log_probs": old + moves}
    numbers = {**CLIP, **COV}
    prepared = prepare_columns(name, mask=mask, columns=given, settings=numbers)

    def total(log_probs: Tensor) -> Tensor:
        everything = {**columns, **prepared, "log_probs": log_probs}
        return policy_loss_terms(name, mask=mask, columns=everything, settings=numbers).terms

    assert torch.autograd.gradcheck(total, ((old + moves).requires_grad_(),))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", sorted({*EACH_TOKEN, *EACH_ROW, *WHOLE_BATCH}))
def test_no_value_outside_the_mask_reaches_terms_or_gradients(name: str, junk: float) -> None:
    rows: list[Row] = [[(-1.0, -1.2, 1.0), (-2.0, -1.9, 1.0)], [], [(-0.5, -0.6, -1.0)]]
    columns, mask = padded(rows)
    clean = ours(name, {key: torch.where(mask, c, 0.0) for key, c in columns.items()}, mask)
    dirty = ours(name, {key: torch.where(mask, c, junk) for key, c in columns.items()}, mask)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
