"""Learning from a teacher: its columns, and an update that equals an independent reference for every way of cutting a
batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from test_actor import assert_same, reference_log_probs, update, weights_of
from test_roles_on_ranks import WHOLE, Arrays, Cut, Seen, assert_equal_to_one, flat_columns, standing
from test_roles_on_ranks import weights_of as whole_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from references.policy_losses import forward_kl
from references.rank_processes import Ranks, run_ranks
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.data.tiny_model import make_tiny_model, make_tiny_tokenizer
from strop.engines.config import EngineConfig, ModelConfig
from strop.protocol import DataProto, columns
from strop.workers.config import TeacherConfig
from strop.workers.teacher import TeacherWorker, check_teacher

K = 6
REVERSE = DistillationConfig(kind="reverse_kl", coef=0.5)
FORWARD = DistillationConfig(kind="forward_kl", top_k=K, with_tail=True)
KINDS = [REVERSE, FORWARD]


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model than the policy, with the same tokens and more confidence."""
    folder = tmp_path_factory.mktemp("teacher")
    make_tiny_model(
        folder, seed=5, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24,
        max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(5.0)
    model.save_pretrained(folder)
    return folder


def make_teacher(
    policy: Path, teacher: Path, distillation: DistillationConfig, *, max_tokens: int = 100, sp: int = 1
) -> TeacherWorker:
    return TeacherWorker(
        ModelConfig(path=str(policy)),
        TeacherConfig(
            path=str(teacher),
            dtype="float64",
            engine=EngineConfig(max_tokens_per_device=max_tokens, sequence_parallel=sp),
        ),
        distillation,
        device="cpu",
    )


def said(teacher: TeacherWorker, batch: DataProto, distillation: DistillationConfig) -> DataProto:
    """What a teacher says about a batch."""
    if distillation.kind == "reverse_kl":
        return teacher.compute_teacher_log_prob(batch)
    return teacher.compute_teacher_top_k(batch)


def taught_batch(policy: Path, teacher: Path, distillation: DistillationConfig) -> DataProto:
    batch = random_batch()
    return batch.union(said(make_teacher(policy, teacher, distillation), batch, distillation))


def full_log_probs(folder: Path, batch: DataProto) -> tuple[torch.nn.Module, list[Tensor]]:
    """All log-probs [R, V] in the place of each response token, through the library's own forward pass."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for prompt, response in zip(
        columns.rows(batch.tensors()["prompts"]), columns.rows(batch.tensors()["responses"]), strict=True
    ):
        logits = module(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits / batch.meta_info["temperature"], dim=-1))
    return module, found


@pytest.mark.usefixtures("float64_norms")
def test_the_teachers_columns_are_those_of_its_own_forward_pass(
    tiny_model: Path, teacher_folder: Path
) -> None:
    batch = random_batch()
    _, log_probs, _ = reference_log_probs(teacher_folder, batch)
    _, every = full_log_probs(teacher_folder, batch)
    for max_tokens in (100, 15):
        teacher = make_teacher(tiny_model, teacher_folder, FORWARD, max_tokens=max_tokens)
        sampled = teacher.compute_teacher_log_prob(batch).tensors()["teacher_log_prob"]
        best = teacher.compute_teacher_top_k(batch).tensors()
        for row, (one, all_of_it) in enumerate(zip(log_probs, every, strict=True)):
            wanted = all_of_it.topk(K, dim=-1)
            torch.testing.assert_close(columns.rows(sampled)[row], one.detach(), rtol=1e-10, atol=1e-10)
            assert torch.equal(columns.rows(best["teacher_ids"])[row].long(), wanted.indices)
            torch.testing.assert_close(
                columns.rows(best["teacher_logprobs"])[row], wanted.values.detach(), rtol=1e-10, atol=1e-10
            )


def reference_terms(
    student: list[Tensor], teacher: list[Tensor], batch: DataProto, distillation: DistillationConfig
) -> list[list[float]]:
    """The distance at each response token, as loops over numbers."""
    terms = []
    responses = columns.rows(batch.tensors()["responses"])
    for ours, theirs, response in zip(student, teacher, responses, strict=True):
        row = []
        for here, there, token in zip(ours.tolist(), theirs.tolist(), response.tolist(), strict=True):
            if distillation.kind == "reverse_kl":
                row.append(here[token] - there[token])
            else:
                best = sorted(range(len(there)), key=lambda i: -there[i])[:K]
                row.append(forward_kl([here[i] for i in best], [there[i] for i in best], True))
        terms.append(row)
    return terms


@pytest.mark.parametrize("distillation", KINDS, ids=lambda one: one.kind)
@pytest.mark.usefixtures("float64_norms")
def test_loss_and_metrics_are_those_of_an_independent_reference(
    tiny_model: Path, teacher_folder: Path, distillation: DistillationConfig
) -> None:
    batch = taught_batch(tiny_model, teacher_folder, distillation)
    algorithm = AlgorithmConfig(loss_agg_mode="token-mean", distillation=distillation, policy_coef=0.25)
    plain = update(make_actor(tiny_model, AlgorithmConfig(loss_agg_mode="token-mean")), batch).metrics
    seen = update(make_actor(tiny_model, algorithm), batch).metrics
    _, student = full_log_probs(tiny_model, batch)
    _, teacher = full_log_probs(teacher_folder, batch)
    masks = [mask.tolist() for mask in columns.rows(batch.tensors()["response_mask"])]
    rows = reference_terms(student, teacher, batch, distillation)
    terms = [
        term
        for row, mask in zip(rows, masks, strict=True)
        for term, counts in zip(row, mask, strict=True)
        if counts
    ]
    mean = math.fsum(terms) / len(terms)
    exact = {"rel": 1e-9, "abs": 1e-9}
    assert seen["actor/pg_loss"] == pytest.approx(plain["actor/loss"], **exact)
    assert seen["actor/loss"] == pytest.approx(0.25 * plain["actor/loss"] + distillation.coef * mean, **exact)
    assert seen["distillation/loss"] == pytest.approx(mean, **exact)
    assert seen["distillation/abs_loss"] == pytest.approx(math.fsum(map(abs, terms)) / len(terms), **exact)
    assert seen["distillation/loss_min"] == pytest.approx(min(terms), **exact)
    assert seen["distillation/loss_max"] == pytest.approx(max(terms), **exact)
    if distillation.kind == "forward_kl":
        overlap, gains, mass, teacher_mass = [], [], [], []
        for ours, theirs, mask in zip(student, teacher, masks, strict=True):
            for here, there, counts in zip(ours.tolist(), theirs.tolist(), mask, strict=True):
                if counts:
                    best, own = (sorted(range(len(p)), key=lambda i, p=p: -p[i])[:K] for p in (there, here))
                    both = [i for i in best if i in own]
                    overlap.append(len(both) / K)
                    gains.append(
                        sum(math.exp(there[i]) * (here[i] - there[i]) for i in both) / max(len(both), 1)
                    )
                    mass.append(sum(math.exp(here[i]) for i in best))
                    teacher_mass.append(sum(math.exp(there[i]) for i in best))
        for name, values in (
            ("overlap_ratio", overlap),
            ("overlap_token_advantage", gains),
            ("student_mass", mass),
            ("teacher_mass", teacher_mass),
        ):
            assert seen[f"distillation/{name}"] == pytest.approx(sum(values) / len(values), **exact), name
        assert 0 < seen["distillation/overlap_ratio"] < 1


@pytest.mark.parametrize("distillation", KINDS, ids=lambda one: one.kind)
@pytest.mark.usefixtures("float64_norms")
def test_the_gradient_is_that_of_the_divergence(
    tiny_model: Path, teacher_folder: Path, distillation: DistillationConfig
) -> None:
    batch = taught_batch(tiny_model, teacher_folder, distillation)
    module, student = full_log_probs(tiny_model, batch)
    _, teacher = full_log_probs(teacher_folder, batch)
    loss = torch.zeros((), dtype=torch.float64)
    count = 0
    for ours, theirs, response, mask in zip(
        student,
        teacher,
        *(columns.rows(batch.tensors()[name]) for name in ("responses", "response_mask")),
        strict=True,
    ):
        if distillation.kind == "reverse_kl":
            # The gradient of (x - y)^2 / 2 is the log-ratio times that of the log-prob.
            gap = (ours - theirs).gather(1, response[:, None])[:, 0]
            terms = gap.square() / 2
        else:
            best = theirs.topk(K, dim=-1).indices
            p, q = theirs.detach().exp(), ours.exp()
            inside_p, inside_q = p.gather(1, best), q.gather(1, best)
            rest_p, rest_q = 1 - inside_p.sum(-1), 1 - inside_q.sum(-1)
            terms = (inside_p * (inside_p / inside_q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()
        loss = loss + (terms * mask).sum()
        count += int(mask.sum())
    (distillation.coef * loss / count).backward()  # type: ignore[no-untyped-call]
    actor = make_actor(tiny_model, AlgorithmConfig(distillation=distillation, policy_coef=0.0))
    seen: dict[str, Tensor] = {}
    step = actor.engine.step

    def note() -> object:
        seen.update(
            {n: p.grad.clone() for n, p in actor.engine.model.named_parameters() if p.grad is not None}
        )
        return step()

    actor.engine.step = note  # type: ignore[assignment,method-assign]
    actor.update_policy(batch, totals_of(batch))
    wanted = {name: p.grad for name, p in module.named_parameters()}
    assert set(seen) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("distillation", KINDS, ids=lambda one: one.kind)
def test_an_update_does_not_depend_on_how_the_batch_is_cut(
    tiny_model: Path, teacher_folder: Path, distillation: DistillationConfig
) -> None:
    algorithm = AlgorithmConfig(distillation=distillation, loss_agg_mode="seq-mean-token-mean")
    batch = taught_batch(tiny_model, teacher_folder, distillation)
    whole = update(make_actor(tiny_model, algorithm), batch)
    for max_tokens in (25, 15):  # several rows, and about one row, in each micro-batch
        cut = update(make_actor(tiny_model, algorithm, max_tokens=max_tokens), batch)
        assert_same(cut, whole)
    order = [3, 0, 6, 1, 5, 2, 4]
    shuffled = update(make_actor(tiny_model, algorithm, max_tokens=25), batch.select_idxs(order))
    assert_same(whole, shuffled, order=order)


def test_the_teacher_alone_teaches_whatever_the_advantages(tiny_model: Path, teacher_folder: Path) -> None:
    algorithm = AlgorithmConfig(distillation=REVERSE, policy_coef=0.0)
    batch = taught_batch(tiny_model, teacher_folder, REVERSE)
    nothing = batch.union(DataProto.from_dict({}))
    nothing.batch["advantages"] = columns.jagged_like(
        batch.tensors()["responses"], torch.zeros_like(columns.flat(batch.tensors()["advantages"]))
    )
    moved, also = (update(make_actor(tiny_model, algorithm), one) for one in (batch, nothing))
    assert also.metrics["actor/grad_norm"] > 0
    assert also.metrics["actor/pg_loss"] == 0
    torch.testing.assert_close(moved.weights, dict(also.weights), rtol=0, atol=0)
    start = weights_of(make_actor(tiny_model, algorithm))
    assert any(not torch.equal(start[name], weight) for name, weight in also.weights.items())


def test_a_batch_without_the_teachers_columns_is_refused(tiny_model: Path) -> None:
    batch = random_batch()
    actor = make_actor(tiny_model, AlgorithmConfig(distillation=FORWARD))
    with pytest.raises(
        ValueError, match="kind=forward_kl needs the column teacher_ids, but the batch has adv"
    ):
        actor.update_policy(batch, totals_of(batch))


# ------------------------------------------------------------------------------------------ vocabularies


def with_more_rows(folder: Path, target: Path, rows: int) -> Path:
    """The model with rows of embeddings that its tokenizer does not use, which are its favourites."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = model.config.vocab_size
    model.resize_token_embeddings(before + rows, mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[before:] = 10.0
    model.save_pretrained(target)
    make_tiny_tokenizer().save_pretrained(target)
    return target


def test_tokens_beyond_the_policys_head_are_passed_over(
    tiny_model: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    wide = with_more_rows(teacher_folder, tmp_path, 3)
    batch = random_batch()
    narrow = make_teacher(tiny_model, teacher_folder, FORWARD).compute_teacher_top_k(batch).tensors()
    best = make_teacher(tiny_model, wide, FORWARD).compute_teacher_top_k(batch).tensors()
    for name in ("teacher_ids", "teacher_logprobs"):
        torch.testing.assert_close(columns.flat(best[name]), columns.flat(narrow[name]))
    check_teacher(ModelConfig(path=str(tiny_model)), str(wide))


def test_a_sample_with_a_token_that_the_teacher_does_not_have_is_named(
    tiny_model: Path, teacher_folder: Path
) -> None:
    batch = random_batch()
    columns.flat(batch.tensors()["responses"])[3] = 103
    teacher = make_teacher(tiny_model, teacher_folder, REVERSE)
    with pytest.raises(ValueError, match="has the token 103, but the teacher's head ends at 102"):
        teacher.compute_teacher_log_prob(batch)


def test_more_tokens_than_there_are_cannot_be_compared(tiny_model: Path, teacher_folder: Path) -> None:
    with pytest.raises(ValueError, match="top_k is 104, but policy and teacher share 103 tokens"):
        make_teacher(tiny_model, teacher_folder, DistillationConfig(kind="forward_kl", top_k=104))


def test_a_teacher_with_other_tokens_is_refused(
    tiny_model: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    policy = ModelConfig(path=str(tiny_model))
    check_teacher(policy, str(teacher_folder))
    AutoModelForCausalLM.from_pretrained(teacher_folder).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^teacher.path: model.path .* has no tokenizer files"):
        check_teacher(policy, str(tmp_path))
    make_tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    text = file.read_text("utf-8")
    file.write_text(text.replace('"A": 41,', '"B": 41,').replace('"B": 42,', '"A": 42,'), "utf-8")
    with pytest.raises(
        ValueError, match=r"2 of 103 tokens differ, for example 'A', which is number 41 in the"
    ):
        check_teacher(policy, str(tmp_path))


# ----------------------------------------------------------------------------------------------- ranks

CUT: Cut = [[6, 2, 0], [5, 1, 4, 3]]
EMPTY: Cut = [[], [3, 0, 1, 2, 6, 5, 4]]


def taught_run(
    policy: str, teacher: str, distillation: DistillationConfig, rows: list[int], sp: int = 1
) -> Seen:
    """The teacher's columns of these rows of the batch, and two updates on them."""
    batch = random_batch()
    own, totals = batch.select_idxs(rows), totals_of(batch)
    worker = make_teacher(Path(policy), Path(teacher), distillation, max_tokens=20, sp=sp)
    columns_of_teacher = said(worker, own, distillation)
    own = own.union(columns_of_teacher)
    algorithm = AlgorithmConfig(distillation=distillation, policy_coef=0.5)
    actor = make_actor(Path(policy), algorithm, max_tokens=20, sequence_parallel=sp)
    metrics = [update.metrics for _ in range(2) for update in actor.update_policy(own, totals).metrics]
    seen: Arrays = {
        name: values.astype(np.float64) for name, values in flat_columns(columns_of_teacher).items()
    }
    return Seen(metrics, whole_weights(actor.engine), seen, actor.checksum())


def on_rank(
    ranks: Ranks, policy: str, teacher: str, distillation: DistillationConfig, cuts: list[Cut], sp: int
) -> list[Seen]:
    with standing(ranks, sp) as part:
        return [taught_run(policy, teacher, distillation, cut[part], sp) for cut in cuts]


def assert_same_on_ranks(cut: Cut, alone: Seen, together: list[Seen]) -> None:
    """`assert_equal_to_one`, with the columns [n, K] of the teacher one by one."""
    parts = [replace(seen, rows=split_columns(seen.rows)) for seen in (alone, *together)]
    assert_equal_to_one(cut, parts[0], parts[1:])


def split_columns(rows: Arrays) -> Arrays:
    flat = {name: values for name, values in rows.items() if values.ndim == 1}
    wide = {f"{n} {k}": v[:, k] for n, v in rows.items() if v.ndim == 2 for k in range(v.shape[1])}
    return flat | wide


@pytest.mark.dist
@pytest.mark.parametrize("distillation", KINDS, ids=lambda one: one.kind)
def test_two_ranks_equal_one_process(
    tiny_model: Path, teacher_folder: Path, distillation: DistillationConfig
) -> None:
    paths = str(tiny_model), str(teacher_folder)
    alone = taught_run(*paths, distillation, WHOLE[0])
    first, second = run_ranks(on_rank, 2, *paths, distillation, [CUT, EMPTY], 1, timeout_s=240)
    for cut, *together in zip([CUT, EMPTY], first, second, strict=True):
        assert_same_on_ranks(cut, alone, together)
    first, second = run_ranks(on_rank, 2, *paths, distillation, [WHOLE], 2, timeout_s=240)
    for together in (first, second):
        assert_same_on_ranks(WHOLE, alone, together)
