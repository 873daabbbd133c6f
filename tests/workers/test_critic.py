"""The critic: values and value updates against plain transformers, and the same for every way of cutting a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from actor_batches import random_batch, totals_of
from critic_batches import make_critic, value_batch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from references import critics as reference
from references.losses import reduce_terms
from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.names import AGGREGATION_MODES
from strop.protocol import DataProto, columns
from strop.utils.metrics import merge_metrics, metric_values
from strop.workers.critic import CriticWorker

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SCALE = 6.0


def settings(mode: str = "token-mean") -> AlgorithmConfig:
    scale = SCALE if mode.endswith("-norm") else None
    return AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=scale, cliprange_value=0.2)  # type: ignore[arg-type]


def update(critic: CriticWorker, batch: DataProto, totals: BatchTotals | None = None) -> dict[str, float]:
    """One update, of the whole batch where no totals are given."""
    result = critic.update_critic(batch, totals or totals_of(batch))
    return metric_values(result.metrics)


def weights_of(critic: CriticWorker) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in critic.engine.model.named_parameters()}


@pytest.fixture(scope="session")
def classifier(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a random head of one label: a sequence-classification folder."""
    folder = tmp_path_factory.mktemp("classifier")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.score.weight.normal_(generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def plain_values(folder: Path, batch: DataProto) -> tuple[Any, list[Tensor]]:
    """Values [R] before each response token, each row by itself through transformers: score(h) at the token before."""
    module = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    values = []
    for prompt, response in zip(
        columns.rows(batch.tensors()["prompts"]), columns.rows(batch.tensors()["responses"]), strict=True
    ):
        hidden = module.model(torch.cat([prompt, response])[None]).last_hidden_state[0]
        values.append(module.score(hidden[len(prompt) - 1 : -1])[:, 0])
    return module, values


@pytest.mark.usefixtures("float64_norms")
def test_values_are_those_of_the_states_before_each_token(classifier: Path, tiny_model: Path) -> None:
    batch = random_batch()
    _, expected = plain_values(classifier, batch)
    critic = make_critic(tiny_model, settings(), path=str(classifier), max_tokens=20)
    got = columns.rows(critic.compute_values(batch).tensors()["values"])
    torch.testing.assert_close(got, [row.detach() for row in expected], **EXACT)
    assert min(float(row.abs().max()) for row in got) > 0.01


def test_a_language_model_starts_with_values_of_exactly_zero(tiny_model: Path) -> None:
    critic = make_critic(tiny_model, settings())
    values = columns.flat(critic.compute_values(random_batch()).tensors()["values"])
    assert values.abs().max().item() == 0.0
    before = critic.checksum()
    update(critic, value_batch())
    assert critic.checksum() != before
    assert columns.flat(critic.compute_values(random_batch()).tensors()["values"]).abs().min().item() > 0.0


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_loss_gradient_and_metrics_are_those_of_an_independent_reference(
    classifier: Path, tiny_model: Path, mode: str
) -> None:
    batch = value_batch()
    module, current = plain_values(classifier, batch)
    tensors = batch.tensors()
    old, returns, masks = (columns.rows(tensors[name]) for name in ("values", "returns", "response_mask"))
    terms, clipped, valid = [], [], []
    loss = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(int(mask.sum()) for mask in masks)
    for row, mask in enumerate(masks):
        rows = zip(current[row].tolist(), old[row].tolist(), returns[row].tolist(), strict=True)
        seen = [reference.value_term(*token, 0.2) for token in rows]
        terms.append([term for term, _ in seen])
        clipped += [won for (_, won), m in zip(seen, mask.tolist(), strict=True) if m]
        valid += [
            (o, g)
            for o, g, m in zip(old[row].tolist(), returns[row].tolist(), mask.tolist(), strict=True)
            if m
        ]
        bounded = torch.minimum(torch.maximum(current[row], old[row] - 0.2), old[row] + 0.2)
        errors = torch.maximum((current[row] - returns[row]) ** 2, (bounded - returns[row]) ** 2) / 2
        share = {
            "token-mean": 1 / num_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / 7,
            "seq-mean-token-sum-norm": 1 / (7 * SCALE),
            "seq-mean-token-mean": 1 / (7 * int(mask.sum())),
        }[mode]
        loss = loss + share * (errors * mask).sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    metrics = update(make_critic(tiny_model, settings(mode), path=str(classifier), max_tokens=20), batch)
    expected = reduce_terms(terms, [mask.int().tolist() for mask in masks], mode, SCALE)
    assert metrics["critic/vf_loss"] == pytest.approx(expected, rel=1e-10)
    assert metrics["critic/loss"] == metrics["critic/vf_loss"]
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(sum(clipped) / num_tokens, rel=1e-12)
    assert 0 < metrics["critic/vf_clipfrac"] < 1, "the batch should have clipped tokens and others"
    predicted = [v for row, mask in zip(current, masks, strict=True) for v in row[mask].tolist()]
    assert metrics["critic/vpred_mean"] == pytest.approx(sum(predicted) / num_tokens, rel=1e-10)
    explained = reference.explained_variance(*(list(column) for column in zip(*valid, strict=True)))
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-10)
    assert metrics["critic/lr"] == 1e-2


@pytest.mark.parametrize("policy_loss", ["vanilla", "gspo", "sapo"])
def test_without_a_mode_the_critic_aggregates_as_the_policy_loss_does(
    tiny_model: Path, policy_loss: str
) -> None:
    # A new critic says 0 everywhere, so with old values of 0 each token's term is its return squared, halved.
    batch = value_batch()
    values = batch.tensors()["values"]
    zeros = columns.jagged_like(values, torch.zeros_like(columns.flat(values)))
    batch = batch.pop(["values"]) and batch.union(DataProto.from_dict({"values": zeros}))
    tensors = batch.tensors()
    rows = zip(columns.rows(tensors["returns"]), columns.rows(tensors["response_mask"]), strict=True)
    terms = [returns[mask] ** 2 / 2 for returns, mask in rows]
    over_tokens = float(torch.cat(terms).mean())
    over_samples = sum(float(row.mean()) for row in terms) / len(terms)
    assert abs(over_tokens - over_samples) > 1e-3, "the modes should differ on this batch"
    seen = update(make_critic(tiny_model, AlgorithmConfig(policy_loss=policy_loss)), batch)
    expected = over_tokens if policy_loss == "vanilla" else over_samples
    assert seen["critic/vf_loss"] == pytest.approx(expected, rel=1e-10)


def test_an_update_does_not_depend_on_token_budget_and_row_order(tiny_model: Path) -> None:
    batch = value_batch()
    seen = []
    for max_tokens, order in ((1000, range(7)), (15, range(7)), (20, [5, 2, 0, 6, 3, 1, 4])):
        critic = make_critic(tiny_model, settings("seq-mean-token-mean"), max_tokens=max_tokens)
        rows = batch[torch.tensor(list(order))]
        update(critic, rows)  # the second one has values that differ from token to token
        seen.append((update(critic, rows), weights_of(critic)))
    for metrics, weights in seen[1:]:
        assert metrics == pytest.approx(seen[0][0], rel=1e-10)
        torch.testing.assert_close(weights, seen[0][1], **EXACT)


def test_parts_with_the_totals_of_all_add_up_to_the_whole_update(tiny_model: Path) -> None:
    # The loss of parts under the whole batch's totals; gradients of ranks are added up in test_roles_on_ranks.
    batch = value_batch()
    totals = totals_of(batch)
    whole = update(make_critic(tiny_model, settings()), batch)
    parts = [
        make_critic(tiny_model, settings()).update_critic(batch[rows], totals).metrics
        for rows in (slice(0, 3), slice(3, 7))
    ]
    losses = [metric_values(part)["critic/vf_loss"] for part in parts]
    assert sum(losses) == pytest.approx(whole["critic/vf_loss"], rel=1e-12)
    merged = metric_values(merge_metrics(parts))
    for name in ("critic/vf_explained_var", "critic/vf_clipfrac", "critic/vpred_mean"):
        assert merged[name] == pytest.approx(whole[name], rel=1e-12)


def test_masked_tokens_change_nothing(tiny_model: Path) -> None:
    batch = value_batch()
    clean = make_critic(tiny_model, settings())
    expected = update(clean, batch)
    mask = columns.flat(batch.tensors()["response_mask"])
    for name in ("values", "returns"):
        column = batch.tensors()[name]
        poisoned = torch.where(mask, columns.flat(column), torch.nan)
        batch = batch.select([n for n in batch.tensors() if n != name]).union(
            DataProto.from_dict({name: columns.jagged_like(column, poisoned)})
        )
    critic = make_critic(tiny_model, settings())
    assert update(critic, batch) == expected
    torch.testing.assert_close(weights_of(critic), weights_of(clean), rtol=0, atol=0)


def test_a_critic_learns_the_returns(tiny_model: Path) -> None:
    critic, batch = (
        make_critic(tiny_model, AlgorithmConfig(cliprange_value=1e9), dtype="float32"),
        value_batch(),
    )
    losses = [update(critic, batch)["critic/vf_loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_a_batch_without_rows_is_legal(tiny_model: Path) -> None:
    critic, batch = make_critic(tiny_model, settings()), value_batch()
    assert len(critic.compute_values(batch[:0])) == 0
    metrics = update(critic, batch[:0], totals_of(batch))
    assert metrics["critic/loss"] == 0.0
    assert "critic/vf_explained_var" not in metrics


def test_a_saved_critic_continues_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    batch = value_batch(torch.float32)
    critic = make_critic(tiny_model, settings(), dtype="float32")
    update(critic, batch)
    critic.save_checkpoint(tmp_path)
    other = make_critic(tiny_model, settings(), dtype="float32", checkpoint=tmp_path)
    assert other.checksum() == critic.checksum()
    assert update(other, batch) == update(critic, batch)
    assert other.checksum() == critic.checksum()


def test_a_saved_value_model_is_an_ordinary_classifier(tiny_model: Path, tmp_path: Path) -> None:
    critic = make_critic(tiny_model, settings(), dtype="float32")
    update(critic, value_batch(torch.float32))
    critic.save_model(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.num_labels == 1
    own = weights_of(critic)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.detach(), own[name], rtol=0, atol=0)


def test_a_folder_that_cannot_give_values_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        make_critic(tiny_model, settings(), path=str(tmp_path / "nothing"))
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a classifier with 3 labels; a value or reward model has one"):
        make_critic(tiny_model, settings(), path=str(tmp_path))
