"""Decode steps of fixed shapes beside those of the batch's own: the padded step, and a repetition of what was traced.

A trace of the operators on a CPU repeats the same addresses and shapes, as a captured graph on a GPU does: whatever a
step takes from Python, and not from its own tensors, is seen. The capture itself needs a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from default_cases import by_default
from rollout_cases import tokens
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from strop.engines.causal_lm import CausalLM
from strop.rollout.native import batch as batch_module
from strop.rollout.native import running
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cuda_graph import (
    CAPTURE_AFTER,
    Capture,
    StaticStep,
    cuda_graphs,
    padded_slots,
    padded_tokens,
    static_step,
)
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

Tiny = Callable[..., CausalLM]
KINDS = ("qwen3", "llama", "gpt2", "gemma3")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, and nothing in C, whose addresses no trace follows."""
    monkeypatch.setattr(running, "new_cache", lambda device, capacity: PagedCache(capacity, device))
    monkeypatch.setattr(batch_module, "fused_step", lambda model: None)


def traced(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A capture on a CPU."""
    with torch.no_grad():
        graph = make_fx(lambda _: function())(torch.zeros(1))
        result = function().clone()

    def replay() -> None:
        with torch.no_grad():
            result.copy_(graph(torch.zeros(1)))

    return replay, result


def decoded(model: CausalLM, static: StaticStep | None, *, count: int = 7, length: int = 16) -> list[Request]:
    """What requests of different lengths become, several in a batch."""
    batch = DecodeBatch(model, max_running=5)
    batch._steps = static
    made = [
        Request(f"r{n}", tuple(tokens(3 + 5 * n, n, vocab=61)), Sampling(key=n, max_tokens=length + n))
        for n in range(count)
    ]
    batch.waiting.extend(made)
    with torch.no_grad():  # a trace does not follow tensors of inference mode
        while not batch.is_idle:
            DecodeBatch.step.__wrapped__(batch, 0)  # type: ignore[attr-defined]
    return made


def equal(found: list[Request], wanted: list[Request]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    apart = torch.tensor([one.log_probs for one in found[:1]]) - torch.tensor(
        [one.log_probs for one in wanted[:1]]
    )
    assert float(apart.abs().max()) < 1e-5
    for left, right in zip(found, wanted, strict=True):
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)


@pytest.mark.parametrize("kind", by_default(KINDS, "qwen3", "gemma3"))
def test_the_padded_step_gives_what_the_batch_gives(tiny: Tiny, kind: str) -> None:
    model = tiny(kind)
    equal(decoded(model, StaticStep(model, None)), decoded(model, None))


@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma3"))]
)
def test_a_repeated_step_follows_its_tensors_alone(tiny: Tiny, kind: str) -> None:
    model = tiny(kind)
    static = StaticStep(model, traced)
    equal(decoded(model, static, count=6, length=44), decoded(model, None, count=6, length=44))
    assert static.num_captured >= 2, "of several sizes of the batch and lengths"
    assert not static.is_disabled


def test_a_model_that_looks_at_its_tokens_in_python_is_not_captured(tiny: Tiny) -> None:
    """GPT-2 of transformers asks whether there is padding among them."""
    model = tiny("gpt2")
    static = StaticStep(model, traced)
    equal(decoded(model, static, count=2), decoded(model, None, count=2))
    assert static.is_disabled


def test_sizes_are_few() -> None:
    assert [padded_slots(count, 12) for count in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert [padded_tokens(count, 500) for count in (1, 64, 65, 128, 129, 257, 500)] == [
        64, 64, 128, 128, 256, 500, 500,
    ]  # fmt: skip


class Counted:
    """A capture that counts."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.count = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.count += 1
        return self._capture(function)


def test_a_short_run_captures_nothing(tiny: Tiny) -> None:
    model, capture = tiny("qwen3"), Counted(traced)
    decoded(model, StaticStep(model, capture), count=2, length=CAPTURE_AFTER - 1)
    assert capture.count == 0


def test_new_numbers_in_the_weights_are_used_and_other_tensors_captured_anew(tiny: Tiny) -> None:
    model, capture = tiny("qwen3"), Counted(traced)
    static = StaticStep(model, capture)
    equal(decoded(model, static, count=1, length=12), decoded(model, None, count=1, length=12))
    head = model.module.get_output_embeddings()
    kept = head.weight.data.clone()
    try:
        with torch.no_grad():
            head.weight.mul_(-1.0)
        equal(decoded(model, static, count=1, length=12), decoded(model, None, count=1, length=12))
        once = capture.count
        head.weight.data = kept.clone()  # as when weights were moved to host memory and back
        static.weights_changed()
        equal(decoded(model, static, count=1, length=12), decoded(model, None, count=1, length=12))
        assert capture.count > once
    finally:
        head.weight.data = kept


def broken(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def wrong(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    result = function() + 1.0
    return (lambda: None), result


@pytest.mark.parametrize("capture", [broken, wrong])
def test_a_step_that_cannot_be_captured_or_is_another_is_not_used(tiny: Tiny, capture: Any) -> None:
    model, counted = tiny("qwen3"), Counted(capture)
    static = StaticStep(model, counted)
    equal(decoded(model, static), decoded(model, None))
    assert counted.count == 1, "none is tried again"
    assert static.is_disabled


def test_a_step_that_is_another_is_not_used_where_some_tokens_are_never_sampled(tiny: Tiny) -> None:
    model = tiny("qwen3")
    model.unused_tokens = (3,)  # whose logit is -1e9
    static = StaticStep(model, wrong)
    equal(decoded(model, static), decoded(model, None))
    assert static.is_disabled


def test_a_cpu_captures_nothing(tiny: Tiny) -> None:
    assert static_step(tiny("qwen3")) is None


def test_a_capture_without_memory_is_tried_again_later(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    attempts = []

    def short_of_memory(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        attempts.append(1)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return traced(function)

    model = tiny("qwen3")
    static = StaticStep(model, short_of_memory)
    equal(decoded(model, static, count=1, length=20), decoded(model, None, count=1, length=20))
    assert not static.is_disabled
    assert (len(attempts), static.num_captured) == (2, 1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["of torch", "of the graph itself"],
)
def test_captures_for_which_memory_stays_short_become_rare(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: RuntimeError
) -> None:
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    attempts = []

    def short_of_memory(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        attempts.append(1)
        raise error

    model = tiny("qwen3")
    decoded(model, StaticStep(model, short_of_memory), count=1, length=50)
    # At step 5 of a shape, then after 12 and 20 more steps.
    assert len(attempts) == 3
    assert caplog.text.count("no memory to capture decode steps") == 1


class RefusedGraph:
    """A graph of torch whose capture CUDA refuses to end."""

    made: ClassVar[list[weakref.ref[RefusedGraph]]] = []
    capture_begin = pool = staticmethod(lambda **options: None)

    def __init__(self) -> None:
        self.made[:] = [weakref.ref(self)]

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("has_left", [False, True])
def test_a_capture_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch, has_left: bool) -> None:
    left: list[tuple[str, int, object]] = []

    def end(device: int, pool: object) -> None:
        if has_left:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        left.append(("end", device, pool))

    class Generator:
        clone_state = staticmethod(lambda: "fresh")
        graphsafe_set_state = staticmethod(lambda state: left.append((state, 3, None)))

    stream = mock.MagicMock()
    card = {
        "Stream": lambda: stream, "stream": contextlib.nullcontext, "current_stream": lambda: stream,
        "current_device": lambda: 3, "graph_pool_handle": lambda: (0, 7), "CUDAGraph": RefusedGraph,
        "default_generators": [None, None, None, Generator],
    }  # fmt: skip
    for name, value in card.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda device, pool: left.append(("release", device, pool))
    )
    calls: list[int] = []
    collects: list[bool] = []

    def looks_at_its_tokens() -> Tensor:
        calls.append(1)
        collects.append(gc.isenabled())
        if len(calls) == 3:  # behind the steps before a capture
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    capture = cuda_graphs()
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(looks_at_its_tokens)
    gc.collect()
    assert [graph() is not None for graph in RefusedGraph.made] == [not has_left], "torch goes on asking it"
    assert [*collects, gc.isenabled()] == [True, True, False, True], (
        "garbage may be a graph, whose end is no step"
    )
    pool = [] if has_left else [("end", 3, (0, 7)), ("release", 3, (0, 7))]
    assert left == [("fresh", 3, None), *pool]


def test_what_a_capture_without_memory_held_is_gone_before_the_step_is_made_otherwise(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """As the graph of a capture that ran out of memory, which its error holds."""

    held: list[weakref.ref[Held]] = []
    emptied: list[bool] = []

    def short_of_memory(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = Held()
        held.append(weakref.ref(graph))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(held[-1]() is None))
    model = tiny("qwen3")
    decoded(model, StaticStep(model, short_of_memory), count=1, length=10)
    assert emptied == [True]


def test_memory_of_captured_steps_is_given_back_once_the_device_repeats_none(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3")
    static = StaticStep(model, traced)
    decoded(model, static, count=1, length=12)
    waits: list[tuple[torch.device, int]] = []

    def synchronize(device: torch.device) -> None:
        waits.append((device, len(static._shapes)))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    static._model = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    static.free()  # also where the device has failed, when engines are closed
    assert waits == [(torch.device("cuda"), 1)], "before the steps are forgotten"
    assert not static._shapes
    static.free()
    assert len(waits) == 1, "for nothing"
