"""The policy update: right against an independent reference, and the same for every way of cutting a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from actor_batches import LR, MASKED, SCALE, make_actor, random_batch, totals_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from references.losses import clipped_term, kl, reduce_terms
from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses import POLICY_LOSS_REGISTRY, PolicyLossTerms, loss_spec, register_policy_loss
from strop.algorithms.names import AGGREGATION_MODES
from strop.controller import BatchAndMetrics, Mesh, Placement
from strop.engines.optimizer import StepReport
from strop.protocol import DataProto, columns
from strop.utils.metrics import merge_metrics, metric_values
from strop.workers import rows as role_rows
from strop.workers.actor import ActorWorker
from strop.workers.rows import merged_update

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def settings(mode: str, **kwargs: object) -> AlgorithmConfig:
    scale = SCALE if mode.endswith("-norm") else None
    return AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=scale, **kwargs)  # type: ignore[arg-type]


FULL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coeff": 0.02}


@dataclass(frozen=True)
class Update:
    """What one call of update_policy did."""

    metrics: Mapping[str, float]
    weights: Mapping[str, Tensor]
    log_probs: list[Tensor]


def weights_of(actor: ActorWorker) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in actor.engine.model.named_parameters()}


def update(actor: ActorWorker, batch: DataProto, totals: BatchTotals | None = None) -> Update:
    """One update, of the whole batch where no totals are given."""
    result = actor.update_policy(batch, totals or totals_of(batch))
    assert len(result.batch) == len(batch)
    return Update(
        metric_values(update_of(result).metrics),
        weights_of(actor),
        columns.rows(result.batch.tensors()["log_probs"]),
    )


def update_of(result: BatchAndMetrics[role_rows.Update]) -> role_rows.Update:
    """The optimizer step of a worker's call."""
    (only,) = result.metrics
    return only


def assert_same(a: Update, b: Update, *, order: list[int] | None = None, tolerance: float = 1e-10) -> None:
    assert a.metrics == pytest.approx(dict(b.metrics), rel=tolerance, abs=tolerance)
    torch.testing.assert_close(a.weights, dict(b.weights), rtol=tolerance, atol=tolerance)
    rows = b.log_probs if order is None else [b.log_probs[order.index(i)] for i in range(len(order))]
    torch.testing.assert_close(a.log_probs, rows, rtol=tolerance, atol=tolerance)


def reference_log_probs(model: Path, batch: DataProto) -> tuple[torch.nn.Module, list[Tensor], list[Tensor]]:
    """Log-probs and entropies [R] of each row by itself, through the library's own forward pass."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    log_probs, entropies = [], []
    for prompt, response in zip(
        columns.rows(batch.tensors()["prompts"]), columns.rows(batch.tensors()["responses"]), strict=True
    ):
        logits = module(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        full = torch.log_softmax(logits / batch.meta_info["temperature"], dim=-1)  # [R, V]
        log_probs.append(full.gather(1, response[:, None])[:, 0])
        entropies.append(-(full.exp() * full).sum(dim=1))
    return module, log_probs, entropies


def reference_loss(log_probs: list[Tensor], batch: DataProto, mode: str) -> float:
    """The clipped surrogate of the whole batch as loops over numbers."""
    tensors = batch.tensors()
    rows = [
        [clipped_term(*token, 0.2, 0.2, 3.0)[0] for token in zip(*row, strict=True)]
        for row in zip(
            [row.tolist() for row in log_probs],
            [row.tolist() for row in columns.rows(tensors["old_log_probs"])],
            [row.tolist() for row in columns.rows(tensors["advantages"])],
            strict=True,
        )
    ]
    mask = [row.int().tolist() for row in columns.rows(tensors["response_mask"])]
    return reduce_terms(rows, mask, mode, SCALE)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.usefixtures("float64_norms")
def test_the_loss_is_that_of_an_independent_reference(tiny_model: Path, mode: str) -> None:
    batch = random_batch()
    _, log_probs, _ = reference_log_probs(tiny_model, batch)
    done = update(make_actor(tiny_model, settings(mode)), batch)
    torch.testing.assert_close(done.log_probs, [row.detach() for row in log_probs], **EXACT)
    expected = reference_loss([row.detach() for row in log_probs], batch, mode)
    assert done.metrics["actor/loss"] == pytest.approx(expected, rel=1e-10)
    assert done.metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-10)
    assert 0 < done.metrics["actor/pg_clipfrac"] < 1, "the batch should have clipped tokens and others"


@pytest.mark.usefixtures("float64_norms")
def test_the_gradient_with_kl_and_entropy_terms_is_that_of_an_independent_reference(tiny_model: Path) -> None:
    algorithm = settings("seq-mean-token-mean", **FULL)
    batch = random_batch()
    module, log_probs, entropies = reference_log_probs(tiny_model, batch)
    tensors = batch.tensors()
    masks = [mask.double() for mask in columns.rows(tensors["response_mask"])]
    loss = torch.zeros((), dtype=torch.float64)
    kl_total = 0.0
    for row, (new, entropy, mask) in enumerate(zip(log_probs, entropies, masks, strict=True)):
        old, ref, advantage = (
            columns.rows(tensors[name])[row] for name in ("old_log_probs", "ref_log_prob", "advantages")
        )
        ratio = (new - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        term = -torch.where(advantage < 0, torch.maximum(surrogate, 3.0 * advantage), surrogate)
        penalty = (ref - new).exp() - 1 - (ref - new)
        whole = term + 0.3 * penalty - 0.02 * entropy
        loss = loss + (whole * mask).sum() / mask.sum() / len(masks)
        values = zip(new.tolist(), ref.tolist(), mask.tolist(), strict=True)
        kl_total += sum(kl(n, r, "k3") for n, r, m in values if m)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    done = update(make_actor(tiny_model, algorithm), batch)
    num_tokens = sum(int(mask.sum()) for mask in masks)
    assert done.metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert done.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
    assert done.metrics["actor/kl_loss"] == pytest.approx(kl_total / num_tokens, rel=1e-10)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize(
    "terms", [pytest.param({}, marks=pytest.mark.slow), FULL], ids=["policy", "kl-entropy"]
)
def test_an_update_does_not_depend_on_token_budget_and_row_order(
    tiny_model: Path, mode: str, terms: dict[str, object]
) -> None:
    algorithm = settings(mode, **terms)
    batch = random_batch()
    whole = update(make_actor(tiny_model, algorithm), batch)
    # 15 = the longest row alone: 9 prompt tokens and all but the last of 7 response tokens.
    for budget in (15, 27):
        actor = make_actor(tiny_model, algorithm, max_tokens=budget)
        assert_same(whole, update(actor, batch))
    order = [5, 2, 0, 6, 3, 1, 4]
    shuffled = batch[torch.tensor(order)]
    done = update(make_actor(tiny_model, algorithm, max_tokens=20), shuffled)
    assert_same(whole, done, order=order)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_chunks_with_the_totals_of_all_add_up_to_the_whole_update(
    tiny_model: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What two data-parallel ranks do, one after another: gradients add up, then one step is taken.
    algorithm = settings(mode, **FULL)
    batch = random_batch()
    totals = totals_of(batch)
    whole = update(make_actor(tiny_model, algorithm), batch)
    actor = make_actor(tiny_model, algorithm, max_tokens=20)
    parts = []
    with monkeypatch.context() as patch:
        patch.setattr(actor.engine, "step", lambda: StepReport(grad_norm=0.0, lr=LR))
        parts.append(actor.update_policy(batch[:3], totals))
    actor.placement = Placement(rank=1, mesh=Mesh(dp=2))
    parts.append(actor.update_policy(batch[3:], totals))
    rows = [row for part in parts for row in columns.rows(part.batch.tensors()["log_probs"])]
    metrics = metric_values(merge_metrics(update_of(part).metrics for part in parts))
    # The norm is known only after the sum: the first part's placeholder of 0 enters the mean.
    metrics["actor/grad_norm"] *= 2
    assert_same(whole, Update(metrics, weights_of(actor), rows))


def test_float32_updates_agree_to_five_digits(tiny_model: Path) -> None:
    algorithm = settings("token-mean", **FULL)
    batch = random_batch(torch.float32)
    whole = update(make_actor(tiny_model, algorithm, dtype="float32"), batch)
    cut = update(make_actor(tiny_model, algorithm, dtype="float32", max_tokens=15), batch)
    assert cut.metrics == pytest.approx(dict(whole.metrics), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(cut.log_probs, whole.log_probs, rtol=1e-5, atol=1e-5)


def test_rows_without_advantage_change_nothing_but_are_measured(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = settings("token-mean")
    batch = random_batch(zero_rows=(0, 2, 4))
    rows_with_gradient: list[int] = []
    actor = make_actor(tiny_model, algorithm)
    accumulate = actor.engine.accumulate
    monkeypatch.setattr(
        actor.engine,
        "accumulate",
        lambda data, loss, rows, **more: (
            rows_with_gradient.append(len(rows)) or accumulate(data, loss, rows=rows)
        ),
    )
    left_out = update(actor, batch)
    assert rows_with_gradient == [4]
    monkeypatch.setattr(
        "strop.workers.actor.rows_with_gradient", lambda spec, batch, row_lengths: [True] * len(row_lengths)
    )
    assert_same(update(make_actor(tiny_model, algorithm), batch), left_out)


def test_a_batch_without_any_advantage_leaves_the_policy_alone(tiny_model: Path) -> None:
    algorithm = settings("token-mean")
    actor = make_actor(tiny_model, algorithm, weight_decay=0.0)
    before = actor.checksum()
    done = update(actor, random_batch(zero_rows=tuple(range(7))))
    assert actor.checksum() == before
    assert (done.metrics["actor/loss"], done.metrics["actor/grad_norm"]) == (0.0, 0.0)
    assert done.metrics["actor/skipped_updates"] == 0.0


def test_masked_tokens_get_no_gradient_and_no_place_in_the_metrics(tiny_model: Path) -> None:
    algorithm = settings("token-mean", **FULL)
    batch = random_batch()
    clean = update(make_actor(tiny_model, algorithm), batch)
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        rows = [row.clone() for row in columns.rows(batch.tensors()[name])]
        for row, token in MASKED:
            rows[row][token] = 5.0
        batch = batch.select([n for n in batch.tensors() if n != name]).union(
            DataProto.from_dict({name: columns.jagged(rows)})
        )
    assert_same(clean, update(make_actor(tiny_model, algorithm), batch))


def test_without_old_log_probs_the_ratio_is_exactly_one(tiny_model: Path) -> None:
    algorithm = settings("token-mean")
    batch = random_batch(torch.float32)
    on_policy = batch.select([name for name in batch.tensors() if name != "old_log_probs"])
    metrics = update(make_actor(tiny_model, algorithm, dtype="float32", max_tokens=20), on_policy).metrics
    assert metrics["actor/ratio"] == 1.0
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0
    # The mean of -A over the sampled tokens (A is 0 on others): the loss at ratio 1, while its gradient is not 0.
    expected = -columns.flat(batch.tensors()["advantages"]).sum() / totals_of(batch).num_tokens
    assert metrics["actor/loss"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["actor/grad_norm"] > 0.01


@pytest.mark.usefixtures("float64_norms")
def test_compute_log_prob_gives_what_the_update_sees(tiny_model: Path) -> None:
    algorithm = settings("token-mean")
    batch = random_batch()
    actor = make_actor(tiny_model, algorithm, max_tokens=20)
    seen = actor.compute_log_prob(batch).tensors()
    result = actor.update_policy(batch, totals_of(batch)).batch.tensors()
    torch.testing.assert_close(
        columns.rows(seen["old_log_probs"]), columns.rows(result["log_probs"]), **EXACT
    )
    torch.testing.assert_close(columns.rows(seen["entropys"]), columns.rows(result["entropys"]), **EXACT)
    _, _, entropies = reference_log_probs(tiny_model, batch)
    torch.testing.assert_close(columns.rows(seen["entropys"]), [row.detach() for row in entropies], **EXACT)


def test_the_sums_of_the_token_baselines_come_with_the_old_log_probs_in_one_pass(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch()
    actor = make_actor(tiny_model, settings("token-mean", adv_estimator="optimal_token_baseline"))
    passes, run = [], actor.engine.model.run
    monkeypatch.setattr(actor.engine.model, "run", lambda *args: passes.append(1) or run(*args))
    seen = actor.compute_log_prob(batch).tensors()
    assert len(passes) == 1, "all rows fit into one micro-batch"
    probs = columns.flat(seen["old_log_probs"]).exp()
    squares = columns.flat(seen["sum_pi_squared"])
    # At least the square of the token's own probability and, by Jensen's inequality, exp(-entropy); at most 1.
    assert bool((squares >= probs.square()).all())
    assert bool((squares >= (-columns.flat(seen["entropys"])).exp() * (1 - 1e-12)).all())
    assert bool((squares <= 1).all())
    plain = make_actor(tiny_model, settings("token-mean")).compute_log_prob(batch).tensors()
    assert "sum_pi_squared" not in plain
    assert torch.equal(columns.flat(plain["old_log_probs"]), columns.flat(seen["old_log_probs"]))


@pytest.fixture
def poisoned_loss() -> Iterator[None]:
    """A policy loss that gives NaN for one token, as a division by zero would."""

    @register_policy_loss("poisoned", needs=["log_probs", "old_log_probs", "advantages"])
    def poisoned(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
        terms = (log_probs - old_log_probs).exp() * advantages
        return PolicyLossTerms(terms=torch.where(terms == terms.max(), torch.nan, 1.0) * terms, statistics={})

    yield
    del POLICY_LOSS_REGISTRY["poisoned"]


@pytest.mark.usefixtures("poisoned_loss")
def test_a_gradient_that_is_not_finite_is_skipped_and_named(tiny_model: Path) -> None:
    algorithm = settings("token-mean", policy_loss="poisoned")
    actor = make_actor(tiny_model, algorithm)
    before = actor.checksum()
    batch = random_batch()
    result = update_of(actor.update_policy(batch, totals_of(batch)))
    assert actor.checksum() == before
    assert result.skipped.startswith("gradient norm is nan (non-finite in model.embed_tokens.weight")
    assert metric_values(result.metrics)["actor/skipped_updates"] == 1.0
    # The next step is not poisoned by what the skipped one left.
    healthy = settings("token-mean")
    actor._loss = loss_spec(healthy)
    assert not update_of(actor.update_policy(batch, totals_of(batch))).skipped
    assert actor.checksum() != before


def test_a_saved_actor_continues_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    algorithm = settings("token-mean", **FULL)
    batch = random_batch(torch.float32)
    actor = make_actor(tiny_model, algorithm, dtype="float32")
    actor.update_policy(batch, totals_of(batch))
    actor.save_checkpoint(tmp_path)
    other = make_actor(tiny_model, algorithm, dtype="float32", checkpoint=tmp_path)
    assert other.checksum() == actor.checksum()
    assert update(other, batch).metrics == update(actor, batch).metrics
    assert other.checksum() == actor.checksum()


def test_a_batch_without_rows_is_legal(tiny_model: Path) -> None:
    # A rank may get no rows of an optimizer batch that has some elsewhere.
    actor = make_actor(tiny_model, settings("token-mean", **FULL), weight_decay=0.0)
    batch = random_batch()
    empty = batch[:0]
    assert len(actor.compute_log_prob(empty)) == 0
    before = actor.checksum()
    done = update(actor, empty, totals_of(batch))
    assert actor.checksum() == before
    assert done.metrics["actor/loss"] == 0.0
    assert done.log_probs == []
    ranks = [actor.update_policy(rows, totals_of(batch)) for rows in (empty, batch)]
    joined = merged_update([update_of(rank) for rank in ranks]).metrics
    seen = update_of(ranks[1]).metrics
    assert joined.keys() == seen.keys()
    assert joined["actor/ratio"] == seen["actor/ratio"], "a rank without rows adds nothing"


def test_the_ratio_can_be_that_to_the_policy_that_sampled(tiny_model: Path) -> None:
    # With old_log_probs=rollout the log-probs recorded while sampling are the old ones, whatever else there is.
    batch = random_batch()
    expected = update(make_actor(tiny_model, settings("token-mean")), batch)
    recorded = batch.tensors()["old_log_probs"]
    rest = batch.select([name for name in batch.tensors() if name != "old_log_probs"])
    moved = columns.jagged([row + 1.0 for row in columns.rows(recorded)])
    both = rest.union(DataProto.from_dict({"rollout_log_probs": recorded, "old_log_probs": moved}))
    actor = make_actor(tiny_model, settings("token-mean", old_log_probs="rollout"))
    assert_same(update(actor, both), expected)
    with pytest.raises(ValueError, match="old_log_probs=rollout needs the column rollout_log_probs, but the"):
        actor.update_policy(batch, totals_of(batch))
