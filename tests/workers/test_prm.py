"""The process reward model: rewards and updates against plain transformers, and the same for every cut of a batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from actor_batches import totals_of
from prm_batches import BETA, LR, RIGHT, make_prm, outcome_batch, plain_log_probs, prm_ref
from transformers import AutoModelForCausalLM

from strop.protocol import DataProto, columns
from strop.utils.metrics import merge_metrics, metric_values

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def trained_batch(model: Path) -> DataProto:
    batch = outcome_batch()
    return batch.union(prm_ref(batch, model))


@pytest.mark.usefixtures("float64_norms")
def test_loss_gradient_and_metrics_are_those_of_plain_transformers(tiny_model: Path) -> None:
    batch = trained_batch(tiny_model)
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    before, masks = (columns.rows(batch.tensors()[name]) for name in ("prm_ref_log_prob", "response_mask"))
    scores = [
        BETA * ((now - then) * mask).sum()
        for now, then, mask in zip(plain_log_probs(module, batch), before, masks, strict=True)
    ]
    counted = [(score, right) for score, right, mask in zip(scores, RIGHT, masks, strict=True) if mask.any()]
    loss = -sum(torch.log(torch.sigmoid(score if right else -score)) for score, right in counted) / len(
        counted
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    prm = make_prm(tiny_model, max_tokens=20)
    metrics = metric_values(prm.update_prm(batch, totals_of(batch)).metrics)
    assert metrics["prm/loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert metrics["prm/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
    hits = [(score.item() > 0) == bool(right) for score, right in counted]
    assert metrics["prm/acc"] == pytest.approx(sum(hits) / len(hits))
    assert 0 < metrics["prm/acc"] < 1, "the batch should have both"
    assert metrics["prm/score_mean"] == pytest.approx(
        math.fsum(score.item() for score, _ in counted) / len(counted), rel=1e-10
    )
    assert metrics["prm/lr"] == LR


@pytest.mark.usefixtures("float64_norms")
def test_a_batch_cut_in_two_has_the_gradient_of_the_whole(tiny_model: Path) -> None:
    batch = trained_batch(tiny_model)
    whole, parts = make_prm(tiny_model), make_prm(tiny_model, max_tokens=20)
    alone = metric_values(whole.update_prm(batch, totals_of(batch)).metrics)
    together = metric_values(parts.update_prm(batch, totals_of(batch)).metrics)
    assert together == pytest.approx(alone, rel=1e-9)
    # Losses of the rows of two ranks, each divided by the sequences of both, add up.
    shares = [
        make_prm(tiny_model).update_prm(batch.select_idxs(rows), totals_of(batch)).metrics
        for rows in ([0, 1, 4], [2, 3, 5, 6])
    ]
    assert sum(share["prm/loss"].total for share in shares) == pytest.approx(alone["prm/loss"], rel=1e-10)  # type: ignore[union-attr]
    merged = metric_values(merge_metrics(shares))
    assert merged["prm/acc"] == pytest.approx(alone["prm/acc"])


def test_rewards_start_at_zero_and_move_with_the_weights_alone(tiny_model: Path) -> None:
    batch = outcome_batch()
    prm = make_prm(tiny_model, max_tokens=20)
    first = prm.compute_prm_ref_log_prob(batch)
    batch = batch.union(first)
    rewards = columns.flat(prm.compute_process_rewards(batch).tensors()["process_rewards"])
    assert rewards.abs().max().item() < 1e-12
    for _ in range(5):
        prm.update_prm(batch, totals_of(batch))
    again = prm.compute_prm_ref_log_prob(batch)
    assert torch.equal(*(columns.flat(one.tensors()["prm_ref_log_prob"]) for one in (first, again)))
    rewards_now = columns.rows(prm.compute_process_rewards(batch).tensors()["process_rewards"])
    masks = columns.rows(batch.tensors()["response_mask"])
    scores = [(row * mask).sum().item() for row, mask in zip(rewards_now, masks, strict=True)]
    for score, right, mask in zip(scores, RIGHT, masks, strict=True):
        if mask.any():
            assert (score > 0) == bool(right)


@pytest.mark.usefixtures("float64_norms")
def test_it_starts_from_a_folder_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.5)
    module.save_pretrained(tmp_path)
    batch = outcome_batch()
    prm = make_prm(tiny_model, path=str(tmp_path))
    got = columns.rows(prm.compute_prm_ref_log_prob(batch).tensors()["prm_ref_log_prob"])
    with torch.no_grad():
        expected = plain_log_probs(module.double(), batch)
    torch.testing.assert_close(got, expected, **EXACT)


def test_a_checkpoint_has_its_weights_and_optimizer_and_not_its_beginning(
    tiny_model: Path, tmp_path: Path
) -> None:
    batch = trained_batch(tiny_model)
    prm = make_prm(tiny_model)
    prm.update_prm(batch, totals_of(batch))
    prm.save_checkpoint(tmp_path)
    again = make_prm(tiny_model, checkpoint=tmp_path)
    assert again.checksum() == prm.checksum()
    columns_of = [one.compute_prm_ref_log_prob(batch).tensors()["prm_ref_log_prob"] for one in (prm, again)]
    assert torch.equal(*map(columns.flat, columns_of))
    for one in (prm, again):
        one.update_prm(batch, totals_of(batch))
    assert again.checksum() == prm.checksum()
