"""Supervised updates against an independent reference, for every cut of the batch, and of conversations packed end to
end, of which none sees, or trains, a token of another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.algorithms.aggregation import BatchTotals
from strop.data.sft.config import SftDistillationConfig
from strop.data.sft.stored_conversation import SftExample, TeacherTop
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.packing import micro_batches, token_rows
from strop.engines.parallel.ranks import Parallel
from strop.evaluation.top_log_probs import TopLogProbs
from strop.protocol import DataProto, columns
from strop.trainer.sft.trainer import make_sft_batch, sft_totals
from strop.utils.metrics import merge_metrics, metric_values
from strop.workers.models import TrainingInit
from strop.workers.sft import SupervisedWorker

BUDGET = 40


def example(row: int, length: int, trained: set[int], *, seed: int | None = None) -> SftExample:
    generator = torch.Generator().manual_seed(row if seed is None else seed)
    tokens = torch.randint(10, 90, (length,), generator=generator).tolist()
    return SftExample(row=row, token_ids=tokens, loss_mask=[index in trained for index in range(length)])


EXAMPLES = [example(0, 9, {5, 6, 8}), example(1, 4, {3}), example(2, 12, {2, 3, 4, 5, 9, 11})]


def worker(
    model: Path, *, max_tokens: int = 100, distillation: SftDistillationConfig | None = None
) -> SupervisedWorker:
    return SupervisedWorker(
        ModelConfig(path=str(model), dtype="float64"),
        EngineConfig(max_tokens_per_device=max_tokens),
        OptimizerConfig(lr=1e-3),
        TrainingInit(device="cpu", num_updates=10),
        distillation,
    )


@pytest.mark.usefixtures("float64_norms")
def test_the_loss_and_its_gradient_are_those_of_an_independent_reference(tiny_model: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    terms = []
    for one in EXAMPLES:
        logits = module(torch.tensor([one.token_ids])).logits[0]
        for position, is_trained in enumerate(one.loss_mask):
            if is_trained:
                terms.append(-torch.log_softmax(logits[position - 1], dim=-1)[one.token_ids[position]])
    assert len(terms) == 10
    loss = torch.stack(terms).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    batch = make_sft_batch(EXAMPLES)
    assert sft_totals(batch) == BatchTotals(num_tokens=10, num_samples=3)
    result = worker(tiny_model).update(batch, sft_totals(batch))
    metrics = metric_values(result.metrics)
    # The weights of the batch are in float32: 1/10 is off by 1.5e-8 of itself.
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=2e-8)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=2e-8)


def test_an_update_does_not_depend_on_token_budget_and_row_order(tiny_model: Path) -> None:
    results = []
    for max_tokens, examples in ((100, EXAMPLES), (11, EXAMPLES), (16, EXAMPLES[::-1])):
        one = worker(tiny_model, max_tokens=max_tokens)
        batch = make_sft_batch(examples)
        metrics = metric_values(one.update(batch, sft_totals(batch)).metrics)
        results.append((metrics, dict(one.engine.model.named_parameters())))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-10)
        torch.testing.assert_close(weights, results[0][1], rtol=1e-10, atol=1e-10)


def test_parts_with_the_totals_of_all_add_up_to_the_whole_loss(tiny_model: Path) -> None:
    batch = make_sft_batch(EXAMPLES)
    totals = sft_totals(batch)
    whole = metric_values(worker(tiny_model).update(batch, totals).metrics)
    parts = [
        worker(tiny_model).update(batch[rows], totals).metrics
        for rows in (slice(0, 1), slice(1, 3), slice(0, 0))
    ]
    losses = [metric_values(part)["train/loss"] for part in parts]
    assert sum(losses) == pytest.approx(whole["train/loss"], rel=1e-7)
    assert losses[2] == 0.0
    assert merge_metrics(parts).keys() == parts[2].keys(), "every rank reports the same metrics"


def test_the_prompt_of_a_row_ends_where_training_begins() -> None:
    batch = make_sft_batch(EXAMPLES[:2]).tensors()
    prompts, responses, masks = (
        [row.tolist() for row in batch[name].unbind()] for name in ("prompts", "responses", "loss_mask")
    )
    assert prompts == [EXAMPLES[0].token_ids[:5], EXAMPLES[1].token_ids[:3]]
    assert responses == [EXAMPLES[0].token_ids[5:], EXAMPLES[1].token_ids[3:]]
    assert masks == [[True, True, False, True], [True]]


def test_a_row_trained_from_its_first_token_is_named() -> None:
    with pytest.raises(ValueError, match="sft row 7 is trained from its first token"):
        make_sft_batch([example(7, 3, {0, 1})])


def second_half(row: int, length: int, *, seed: int | None = None) -> SftExample:
    return example(row, length, set(range(length // 2, length)), seed=seed)


def log_probs(one: SupervisedWorker, examples: Sequence[SftExample]) -> list[torch.Tensor]:
    """Of the responses, one tensor per conversation."""
    return columns.rows(one.compute_log_prob(make_sft_batch(examples)).tensors()["log_probs"])


def parts(batch: DataProto) -> list[list[int]]:
    """The micro-batches of one process."""
    return micro_batches(batch, max_tokens=BUDGET, parallel=Parallel(device=torch.device("cpu")))


def test_conversations_share_forward_passes_up_to_the_budget() -> None:
    lengths = [21, 20, 11, 11, 11, 9, 2]
    examples = [second_half(row, length) for row, length in enumerate(lengths)]
    for row, one in enumerate(examples):
        one.token_ids[0] = row  # they have nothing in common
    batch = make_sft_batch(examples)
    # The last token of a conversation predicts nothing and is not computed: 20, 19, 10, 10, 10, 8 and 1 tokens. First
    # fit, largest first, in bins of 40: 20 + 19 + 1 and 10 + 10 + 10 + 8.
    sizes = [len(row) for row in token_rows(batch)]
    assert [sum(sizes[row] for row in part) for part in parts(batch)] == [40, 38]
    assert sum(len(part) for part in parts(batch)) == len(lengths)


def test_no_token_of_a_conversation_reaches_another(tiny_model: Path) -> None:
    one = worker(tiny_model, max_tokens=BUDGET)
    before = [second_half(0, 9), second_half(1, 12), second_half(2, 7)]
    after = [before[0], second_half(1, 12, seed=99), before[2]]
    assert len(parts(make_sft_batch(before))) == 1, "one forward pass"
    first, second = log_probs(one, before), log_probs(one, after)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert not torch.allclose(first[1], second[1])
    for number, alone in enumerate(before):
        torch.testing.assert_close(log_probs(one, [alone])[0], first[number], rtol=1e-12, atol=1e-12)


def test_no_mask_bit_of_a_conversation_reaches_the_one_before(tiny_model: Path) -> None:
    # The second conversation is trained from its first token that can be: a mask rolled over the boundary would add a
    # term for the last token of the first, or lose one.
    examples = [example(0, 9, {7, 8}), example(1, 6, {1, 2, 3, 4, 5})]
    one = worker(tiny_model, max_tokens=BUDGET)
    batch = make_sft_batch(examples)
    terms = torch.cat(log_probs(one, examples))
    assert sft_totals(batch).num_tokens == 2 + 5 == len(terms)
    loss = one.update(batch, sft_totals(batch)).metrics["train/loss"].value
    assert abs(loss + float(terms.mean())) < 1e-6


# -------------------------------------------------------------------------------------------------- teacher


def taught(one: SftExample, k: int) -> SftExample:
    """With a teacher that finds k tokens likely, among them the right one."""
    start = one.loss_mask.index(True)
    generator = torch.Generator().manual_seed(one.row + 100)
    ids = torch.stack([torch.randperm(80, generator=generator)[:k] + 10 for _ in one.token_ids[start:]])
    log_probs = torch.randn(ids.shape, generator=generator).log_softmax(1) + math.log(0.9)
    top = TeacherTop(start, ids.to(torch.int32).numpy(), log_probs.numpy())
    return dataclasses.replace(one, teacher=top)


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("with_tail", [True, False])
def test_the_distance_to_a_teacher_is_that_of_an_independent_reference(
    tiny_model: Path, with_tail: bool
) -> None:
    examples = [taught(one, 5) for one in EXAMPLES]
    module = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    distances, nlls = [], []
    for one in examples:
        assert one.teacher is not None
        log_probs = torch.log_softmax(module(torch.tensor([one.token_ids])).logits[0], dim=-1)
        for position, is_trained in enumerate(one.loss_mask):
            if not is_trained:
                continue
            here = log_probs[position - 1]
            ids = torch.tensor(one.teacher.ids[position - one.teacher.start]).long()
            q = torch.tensor(one.teacher.log_probs[position - one.teacher.start]).double().exp()
            term = (q * (q.log() - here[ids])).sum()
            if with_tail:
                rest, own = 1 - q.sum(), 1 - here[ids].exp().sum()
                term = term + rest * (rest.log() - own.log())
            distances.append(term)
            nlls.append(-here[one.token_ids[position]])
    distance, nll = torch.stack(distances).mean(), torch.stack(nlls).mean()
    loss = 2.0 * distance + 0.5 * nll
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    seen = []
    for max_tokens in (100, 16):
        settings = SftDistillationConfig(coef=2.0, nll_coef=0.5, with_tail=with_tail)
        batch = make_sft_batch(examples, with_teacher=True)
        one_worker = worker(tiny_model, max_tokens=max_tokens, distillation=settings)
        metrics = metric_values(one_worker.update(batch, sft_totals(batch)).metrics)
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert metrics["distillation/loss"] == pytest.approx(distance.item(), rel=1e-6)
        assert metrics["distillation/teacher_mass"] == pytest.approx(0.9, rel=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        seen.append(metrics)
    assert seen[0] == pytest.approx(seen[1], rel=1e-9)
    assert not with_tail or seen[0]["distillation/loss"] > 0


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(tiny_model: Path) -> None:
    model = ModelConfig(path=str(tiny_model))
    whole = AutoModelForCausalLM.from_pretrained(tiny_model)
    logits = whole(torch.tensor([[5, 6, 8, 9, 10]])).logits[0, 1:4].float()
    for num_ids in (60, logits.shape[1]):  # beyond the tokenizer a head has no tokens
        teacher = TopLogProbs(model, EngineConfig(), k=6, num_ids=num_ids, device="cpu")
        top, nothing = teacher.score([[5, 6], [7]], [[8, 9, 10], []])
        expected = torch.log_softmax(logits[:, :num_ids], dim=-1).topk(6)
        assert nothing[0].shape == (0, 6)
        assert top[0].tolist() == expected.indices.tolist()
        torch.testing.assert_close(torch.from_numpy(top[1]), expected.values, rtol=1e-5, atol=1e-5)
    mask = (False, False, True, True, True)
    one = SftExample(row=0, token_ids=(5, 6, 8, 9, 10), loss_mask=mask, teacher=TeacherTop(2, *top))
    batch = make_sft_batch([one], with_teacher=True)
    settings = SftDistillationConfig(coef=1.0)
    student = SupervisedWorker(
        model, EngineConfig(), OptimizerConfig(), TrainingInit(device="cpu", num_updates=1), settings
    )
    metrics = metric_values(student.update(batch, sft_totals(batch)).metrics)
    assert metrics["distillation/loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(0.0, abs=1e-5)
