"""Passes that run out of memory: what a role has done afterwards is what smaller micro-batches do, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch
from prm_batches import make_prm, outcome_batch, prm_ref
from shortage import TOO_MANY_BYTES, fail_once, set_limit

from strop.algorithms.config import AlgorithmConfig
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.micro_batch import pack
from strop.engines.token_budget import OutOfMemory
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto, columns
from strop.utils.metrics import metric_values
from strop.workers.actor import ActorWorker
from strop.workers.config import ActorConfig
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.preference import PreferenceWorker
from strop.workers.rehearsal import process_peak, rehearsed
from strop.workers.rows import Update, merged_update
from strop.workers.sft import SupervisedWorker

WHOLE, HALF = 40, 20
"""Tokens of a micro-batch; rows of the batch have 8 to 14."""
FULL = AlgorithmConfig(use_kl_loss=True, entropy_coeff=0.02)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A role, and an update of it."""

    make: Callable[[Path, int], Any]
    batch: Callable[[Path], DataProto]
    update: Callable[[Any, DataProto], Update]


def _actor_update(actor: Any, batch: DataProto) -> Update:
    return merged_update(actor.update_policy(batch, totals_of(batch)).metrics)


def _sft(model: Path, max_tokens: int) -> SupervisedWorker:
    return SupervisedWorker(
        ModelConfig(path=str(model), dtype="float32"),
        EngineConfig(max_tokens_per_device=max_tokens),
        OptimizerConfig(lr=1e-3),
        TrainingInit(device="cpu", num_updates=10),
    )


def _preferences(model: Path, max_tokens: int) -> PreferenceWorker:
    return PreferenceWorker(
        ModelConfig(path=str(model), dtype="float32"),
        EngineConfig(max_tokens_per_device=max_tokens),
        OptimizerConfig(lr=1e-3),
        TrainingInit(device="cpu", num_updates=10),
        scores=False,
    )


def _masked(_: Path) -> DataProto:
    batch = random_batch(torch.float32)
    weights = torch.linspace(-1, 1, len(batch))
    return batch.union(
        DataProto.from_dict({"loss_mask": batch.tensors()["response_mask"], "weights": weights})
    )


CASES = {
    "policy": Case(
        make=lambda model, n: make_actor(model, FULL, max_tokens=n, dtype="float32"),
        batch=lambda _: random_batch(torch.float32),
        update=_actor_update,
    ),
    "policy, all rows have a gradient": Case(
        make=lambda model, n: make_actor(model, AlgorithmConfig(), max_tokens=n, dtype="float32"),
        batch=lambda _: random_batch(torch.float32, zero_rows=()),
        update=_actor_update,
    ),
    "critic": Case(
        make=lambda model, n: make_critic(model, AlgorithmConfig(), max_tokens=n, dtype="float32"),
        batch=lambda _: value_batch(torch.float32),
        update=lambda critic, batch: critic.update_critic(batch, totals_of(batch)),
    ),
    "process rewards": Case(
        make=lambda model, n: make_prm(model, max_tokens=n),
        batch=lambda model: (batch := outcome_batch()).union(prm_ref(batch, model)),
        update=lambda prm, batch: prm.update_prm(batch, totals_of(batch)),
    ),
    "fine-tuning": Case(
        make=_sft, batch=_masked, update=lambda sft, batch: sft.update(batch, totals_of(batch))
    ),
    "preferences": Case(make=_preferences, batch=_masked, update=lambda worker, batch: worker.update(batch)),
}


def weights_of(worker: TrainedWorker) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in worker.engine.model.named_parameters()}


def assert_equal(worker: TrainedWorker, other: TrainedWorker) -> None:
    ours, theirs = weights_of(worker), weights_of(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_half_the_budget_to_the_bit(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    case = CASES[name]
    batch = case.batch(tiny_model)
    half, whole = case.make(tiny_model, HALF), case.make(tiny_model, WHOLE)
    failed = set_limit(monkeypatch, whole.engine.model, HALF, where)
    expected = [case.update(half, batch) for _ in range(2)]
    updates = [case.update(whole, batch) for _ in range(2)]
    assert len(failed) == 1, "the second update begins with what held"
    assert HALF < failed[0] <= WHOLE
    for update, of_half in zip(updates, expected, strict=True):
        assert metric_values(update.metrics) == metric_values(of_half.metrics)
    assert_equal(whole, half)
    (halving,) = whole.take_halvings()
    assert (halving.tokens, halving.before, halving.after) == (failed[0], WHOLE, HALF)
    assert whole.take_halvings() == ()


@pytest.mark.parametrize("nth", range(3))
def test_a_failure_in_any_pass_leaves_no_gradient_and_no_number_of_the_others(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The last pass is of rows that are only measured, when all gradients are there."""
    batch = random_batch(torch.float32)
    whole = make_actor(tiny_model, AlgorithmConfig(), max_tokens=25, dtype="float32")
    had_gradient = fail_once(monkeypatch, whole.engine.model, nth)
    update = _actor_update(whole, batch)
    (halving,) = whole.take_halvings()
    assert had_gradient[nth] == (nth < 2)
    smaller = make_actor(tiny_model, AlgorithmConfig(), max_tokens=25, dtype="float32")
    smaller.hold_budget(halving.after)
    expected = _actor_update(smaller, batch)
    assert metric_values(update.metrics) == metric_values(expected.metrics)
    assert_equal(whole, smaller)


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "lora"])
def test_a_failure_while_layers_are_computed_again_leaves_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    batch = random_batch(torch.float32)
    settings = {"gradient_checkpointing": True, "lora": LoraConfig(rank=rank)}
    half, whole = (
        ActorWorker(
            ModelConfig(path=str(tiny_model), dtype="float32", **settings),  # type: ignore[arg-type]
            ActorConfig(optim=OptimizerConfig(lr=1e-3), engine=EngineConfig(max_tokens_per_device=tokens)),
            FULL,
            TrainingInit(device="cpu", num_updates=10),
        )
        for tokens in (HALF, WHOLE)
    )
    mlp: Any = whole.engine.model.layers[0].mlp
    forward, calls = mlp.forward, list[int]()

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden.shape[1])
        if len(calls) == 2:  # of the first micro-batch, in its backward pass
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
        result: torch.Tensor = forward(hidden)
        return result

    monkeypatch.setattr(mlp, "forward", failing)
    updates = [_actor_update(actor, batch) for actor in (half, whole)]
    assert calls[0] == calls[1] > HALF
    assert metric_values(updates[1].metrics) == metric_values(updates[0].metrics)
    assert_equal(whole, half)


def test_log_probs_are_those_of_half_the_budget(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(torch.float32)
    half = make_actor(tiny_model, FULL, max_tokens=HALF, dtype="float32")
    whole = make_actor(tiny_model, FULL, max_tokens=WHOLE, dtype="float32")
    failed = set_limit(monkeypatch, whole.engine.model, HALF, "forward")
    expected, found = (actor.compute_log_prob(batch).tensors()["old_log_probs"] for actor in (half, whole))
    assert torch.equal(columns.flat(found), columns.flat(expected))
    assert len(failed) == 1


def test_a_row_alone_that_does_not_fit_ends_with_the_settings(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(torch.float32)
    actor = make_actor(tiny_model, FULL, max_tokens=WHOLE, dtype="float32")
    set_limit(monkeypatch, actor.engine.model, 5, "backward")
    with pytest.raises(OutOfMemory, match=r"which is one row and is not cut, .*it was 10 by then"):
        actor.update_policy(batch, totals_of(batch))


@pytest.mark.parametrize("nth", [0, 2])
def test_memory_that_runs_out_while_packing_is_not_charged_to_the_micro_batch_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The first micro-batch of all, and one of several rows behind one of a single row."""
    batch = random_batch(torch.float32)
    num_rows: list[int] = []

    def packing(*args: Any, **kwargs: Any) -> Tokens:
        num_rows.append(len(kwargs["rows"]))
        if len(num_rows) == nth + 1:
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
        return pack(*args, **kwargs)

    whole, half = (make_actor(tiny_model, FULL, max_tokens=WHOLE, dtype="float32") for _ in range(2))
    half.hold_budget(HALF)
    cut = half.engine._parts
    parts = whole.engine._parts(batch, None)
    parts = [parts[0][:1], parts[0][1:2], parts[0][2:] + [row for part in parts[1:] for row in part]]
    if nth:
        monkeypatch.setattr(
            whole.engine, "_parts", lambda *_: parts if len(num_rows) <= nth else cut(batch, None)
        )
    monkeypatch.setattr("strop.engines.training.pack", packing)
    found = columns.flat(whole.compute_log_prob(batch).tensors()["old_log_probs"])
    assert num_rows[nth] > 1
    assert nth == 0 or num_rows[nth - 1] == 1
    (halving,) = whole.take_halvings()
    assert (halving.tokens, halving.before, halving.after) == (None, WHOLE, HALF)
    assert torch.equal(found, columns.flat(half.compute_log_prob(batch).tensors()["old_log_probs"]))


def test_other_errors_stay_what_they_are(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = make_actor(tiny_model, FULL, dtype="float32")

    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(actor.engine.model, "backbone", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        actor.compute_log_prob(random_batch(torch.float32))
    assert actor.take_halvings() == ()


# ---------------------------------------------------------------- rehearsal

GROUPS = [(9, (6,) * 4)] * 2
"""Of rows of 14 tokens."""


def state_of(engine: TrainEngine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, numbers = engine.optimizer.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, dict(numbers)


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_leaves_nothing_behind(tiny_model: Path, name: str) -> None:
    """Weights, optimizer, gradients, counts and random numbers, before the first update and between two."""
    case = CASES[name]
    batch = case.batch(tiny_model)
    plain, other = case.make(tiny_model, WHOLE), case.make(tiny_model, WHOLE)
    random = torch.get_rng_state()
    for _ in range(2):
        before, state = other.checksum(), state_of(other.engine)
        counts = other.engine.counts.operations, other.engine.counts.tokens
        other.make_optimizer_state()
        found = other.rehearse(GROUPS)
        assert found.num_micro_batches == 2
        assert found.tokens <= WHOLE
        assert found.seconds > 0
        assert other.checksum() == before
        after = state_of(other.engine)
        assert after[1] == state[1]
        assert all(torch.equal(after[0][key], tensor) for key, tensor in state[0].items())
        assert all(p.grad is None for _, p in other.engine.model.named_parameters())
        assert (other.engine.counts.operations, other.engine.counts.tokens) == counts
        updates = [case.update(worker, batch) for worker in (plain, other)]
        assert metric_values(updates[0].metrics) == metric_values(updates[1].metrics)
        assert_equal(other, plain)
    assert torch.equal(torch.get_rng_state(), random)


def test_an_optimizer_that_rests_on_the_host_rehearses_too(tiny_model: Path) -> None:
    case = CASES["policy"]
    plain, other = case.make(tiny_model, WHOLE), case.make(tiny_model, WHOLE)
    for worker in (plain, other):
        worker.engine._config = replace(worker.engine._config, offload="optimizer")
    other.make_optimizer_state()
    other.rehearse(GROUPS)
    for worker in (plain, other):
        case.update(worker, case.batch(tiny_model))
    assert_equal(other, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rehearsal_that_does_not_fit_lowers_the_budget(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    batch = random_batch(torch.float32)
    half = make_actor(tiny_model, FULL, max_tokens=HALF, dtype="float32")
    whole = make_actor(tiny_model, FULL, max_tokens=WHOLE, dtype="float32")
    failed = set_limit(monkeypatch, whole.engine.model, HALF, where)
    found = whole.rehearse(GROUPS)
    assert found.tokens <= HALF < failed[0]
    assert [halving.after for halving in whole.take_halvings()] == [HALF]
    updates = [_actor_update(actor, batch) for actor in (half, whole)]
    assert metric_values(updates[0].metrics) == metric_values(updates[1].metrics)
    assert_equal(whole, half)


def test_rows_of_a_rehearsal_share_their_prompt_and_have_ordinary_tokens(tiny_model: Path) -> None:
    actor = make_actor(tiny_model, FULL, max_tokens=WHOLE, dtype="float32")
    actor.engine.model.unused_tokens = tuple(range(3, 90))
    seen: list[torch.Tensor] = []

    def loss(tokens: Tokens) -> torch.Tensor:
        seen.append(tokens.input_ids[0])
        return tokens.log_probs(temperature=1.0)[0].sum()

    rehearsed(actor.engine, GROUPS, loss)
    assert [len(ids) for ids in seen] == [9 + 4 * 5] * 2, (
        "a prompt once, and four answers but for their last tokens"
    )
    assert not torch.isin(torch.cat(seen), torch.arange(3, 90)).any()


def test_a_system_that_does_not_say_the_most_memory_is_no_error(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert process_peak(status) is None
    status.write_text("Name:\tpython\nVmRSS:\t 12 kB\n")
    assert process_peak(status) is None
    status.write_text("Name:\tpython\nVmHWM:\t 12 kB\n")
    assert process_peak(status) == 12 * 1024
