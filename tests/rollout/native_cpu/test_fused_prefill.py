"""Prefill in C beside the model's own forward pass: same numbers, however a sequence is cut, and the weights of now."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.data.tiny_model import make_tiny_model
from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.segments import Segment
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import SlotCache
from strop.rollout.native.cpu import steps
from strop.rollout.native.cpu.steps import FusedStep, fused_step
from strop.rollout.native.prefill import Prefill, PrefillAttention
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the prefill is compiled by gcc")
SIZES = [1, 37, 2, 60]
"""Tokens of some prompts; the models with a window have one of 8."""


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    return load_model(ModelConfig(path=str(folder), dtype=dtype), device="cpu")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 30, (size,), generator=generator).tolist() for size in SIZES]


@torch.inference_mode()
def own(model: CausalLM, ids: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Logits [V] behind the tokens, and their keys and values, by the model's own forward pass."""
    ids = torch.as_tensor(ids)
    attention = PrefillAttention(PackedAttention([Segment(start=0, length=len(ids))], device=model.device))
    hidden = model.hidden(ids[None], torch.arange(len(ids))[None], attention)
    return model.head.logits(hidden[-1:])[0], attention.key_values(model.compute_dtype)


@torch.inference_mode()
def fused(
    model: CausalLM, pieces: Sequence[tuple[Sequence[int], Tensor | None]], step: FusedStep | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits [P, V] and keys and values by the compiled prefill."""
    computed = (step or checked(model)).prefill(pieces, partial(own, model))
    assert computed is not None, "it agrees with the model"
    return computed


def step_of(model: CausalLM) -> FusedStep:
    step = fused_step(model)
    assert step is not None, "the model has a joined step"
    return step


@torch.inference_mode()
def checked(model: CausalLM) -> FusedStep:
    """A step whose prefill was compared with the model's own."""
    step = step_of(model)
    assert step.prefill([([5, 6], None)], partial(own, model)) is not None
    return step


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "wide"])
def test_a_prefill_is_the_forward_pass_of_the_model(
    folder: Callable[[str], Path], kind: str, dtype: str, tolerance: float
) -> None:
    model = load(folder(kind), dtype)
    logits, tables = fused(model, [(ids, None) for ids in prompts()])
    for ids, ours, table in zip(prompts(), logits, tables, strict=True):
        expected, key_values = own(model, ids)
        for found, wanted in ((ours, expected), (table, key_values)):
            assert found.shape == wanted.shape
            assert float((found - wanted).abs().max()) < tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [pytest.param("mistral", marks=pytest.mark.slow), "qwen3", "wide"])
def test_how_a_sequence_is_cut_changes_no_bit(
    folder: Callable[[str], Path], kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, few rows at a time, in two pieces, beside others or alone, with one thread or three, token by token as
    decode steps: all the same."""
    model = load(folder(kind), dtype)
    ids = prompts()[-1]
    (wanted,), (key_values,) = fused(model, [(ids, None)])
    before = torch.get_num_threads()
    for rows, threads in ((7, 1), (256, 3), (7, 3)):
        monkeypatch.setattr(steps, "PREFILL_ROWS", rows)
        torch.set_num_threads(threads)
        try:
            logits, tables = fused(model, [(ids, None) for ids in prompts()])
            _, (first,) = fused(model, [(ids[:23], None)])
            (rest,), (joined,) = fused(model, [(ids[23:], first)])
        finally:
            torch.set_num_threads(before)
        for found, table in ((logits[-1], tables[-1]), (rest, joined)):
            assert torch.equal(found, wanted), (rows, threads)
            assert torch.equal(table, key_values), (rows, threads)
    step, cache = fused_step(model), SlotCache(1)
    assert step is not None
    cache.write([0], fused(model, [(ids[:1], None)], checked(model))[1][0])
    cache.make_room(len(ids), num_slots=1)
    with torch.inference_mode():
        for place in range(1, len(ids)):
            token, length = torch.tensor(ids[place : place + 1]), torch.tensor([place])
            decoded = step.computed(token, length, cache, num_tokens=place + 1)
    assert torch.equal(decoded[0], wanted)
    assert torch.equal(cache.table[:, :, 0, :, : len(ids)], key_values)


def test_a_batch_prefills_in_c_and_takes_the_weights_of_now(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_folder("qwen3"))
    batch = DecodeBatch(model, max_running=4)

    def first_log_prob() -> float:
        request = Request("one", tuple(prompts()[1]), Sampling(key=0, max_tokens=2, temperature=0.0))
        batch.waiting.append(request)
        while not batch.is_idle:
            batch.step(0)
        batch.prefill.forget()
        return request.log_probs[0]

    first_log_prob()
    monkeypatch.setattr(Prefill, "_forward", None)  # called no more
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 8)
    expected = torch.log_softmax(own(model, prompts()[1])[0], -1).max()
    assert first_log_prob() == pytest.approx(float(expected), abs=1e-5)


def break_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is behind the last layer's keys and values."""
    formed = FusedStep._logits
    monkeypatch.setattr(FusedStep, "_logits", lambda self, hidden: formed(self, hidden) * 1.01)


def break_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_vector", lambda weight: torch.full(weight.shape, 0.9))
    monkeypatch.setattr(
        FusedStep, "_logits", lambda self, hidden: own(self._model, prompts()[1][:32])[0][None]
    )


@pytest.mark.parametrize(("breaks", "what"), [(break_logits, "logits"), (break_keys, "keys and values")])
def test_a_prefill_that_differs_is_not_used(
    breaks: Callable[[pytest.MonkeyPatch], None],
    what: str,
    tiny_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load(tiny_folder("llama"))
    breaks(monkeypatch)
    step = step_of(model)
    with torch.inference_mode():
        given = [(prompts()[1], None)]
        assert step.prefill(given, partial(own, model)) is None
        assert step.is_disabled
        assert step.prefill(given, partial(own, model)) is None
    assert caplog.text.count("generation goes through the model's own forward pass") == 1
    assert f"{what} of a compiled prefill differ" in caplog.text


@torch.inference_mode()
def test_what_proves_nothing_is_not_taken_for_a_proof(
    tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A single token, which no position turns, and a model that gives no numbers for now."""
    model = load(tiny_folder("llama"))
    step, ids = step_of(model), prompts()[1]
    assert step.prefill([(ids[:1], None)], partial(own, model)) is None
    before = own(model, ids[:1])[1]
    assert step.prefill([(ids[1:], before)], partial(own, model)) is None
    nothing = [part * float("nan") for part in own(model, ids[:32])]
    assert step.prefill([(ids, None)], lambda given: (nothing[0], nothing[1])) is None
    assert not step.is_disabled
    assert not caplog.records
    logits, _ = fused(model, [(ids[:1], None), (ids, None)], step)
    torch.testing.assert_close(logits[0], own(model, ids[:1])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 5])
def test_a_decode_step_that_differs_goes_on_from_no_key_of_a_compiled_prefill(
    size: int, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own forward pass computes a prompt of one token, from which a sequence goes on; another is given
    up."""
    model = load(tiny_folder("llama"))

    def played(count: int) -> list[int]:
        request = Request("one", tuple(prompts()[1][:count]), Sampling(key=0, max_tokens=5, temperature=0.0))
        batch.waiting.append(request)
        while not batch.is_idle:
            batch.step(0)
        batch.prefill.forget()
        return request.token_ids

    batch = DecodeBatch(model, max_running=2)
    wanted = played(size)
    batch = DecodeBatch(model, max_running=2)
    computed = FusedStep.computed
    monkeypatch.setattr(FusedStep, "computed", lambda *given, **named: computed(*given, **named) + 1.0)
    if size == 1:
        assert played(size) == wanted
        return
    with pytest.raises(RuntimeError, match="a compiled decode step differs"):
        played(size)
    batch.clear()
    assert played(size) == wanted, "later ones go through the model's own forward pass"


def test_a_long_prompt_is_computed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step's size, and reads what the pieces before it have left."""
    make_tiny_model(tmp_path, seed=0, num_layers=2)
    model = load(tmp_path)
    ids = torch.randint(7, 90, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setattr("strop.rollout.native.prefill.PREFILL_TOKENS", 128)
    batch = DecodeBatch(model, max_running=2)
    request = Request("long", tuple(ids), Sampling(key=0, max_tokens=1, temperature=0.0))
    batch.waiting.append(request)
    while not batch.is_idle:
        batch.step(0)
    expected = torch.log_softmax(own(model, ids)[0], -1).max()
    assert request.log_probs == pytest.approx([float(expected)], abs=1e-5)
    assert batch.prefill.num_computed == 300
