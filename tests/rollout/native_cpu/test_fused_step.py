"""The joined decode step beside the model's own forward pass: same numbers, the weights of now, and who has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strop.data.tiny_model import make_tiny_model
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import DecodeAttention, SlotCache
from strop.rollout.native.cpu import kernel, steps
from strop.rollout.native.cpu.steps import FusedStep, fused_step
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the step is compiled by gcc")
LENGTHS = [1, 13, 30, 2, 7]
EVERY, FEW = (*range(1, 14), 48, 97), (1, 5, 13)
"""Counts of sequences."""
KINDS = ["llama", "mistral", "qwen2", "qwen3"]


def load(folder: Path, dtype: str = "float32", **changes: object) -> CausalLM:
    return load_model(ModelConfig(path=str(folder), dtype=dtype, **changes), device="cpu")  # type: ignore[arg-type]


def step_of(model: CausalLM) -> FusedStep:
    step = fused_step(model)
    assert step is not None, "the model has a joined step"
    return step


def caches(model: CausalLM, count: int = len(LENGTHS)) -> tuple[SlotCache, SlotCache]:
    """Two with the same random keys and values."""
    text = model.config
    dim = model.layers[0].self_attn.head_dim  # type: ignore[union-attr]
    made = SlotCache(count), SlotCache(count)
    generator = torch.Generator().manual_seed(0)
    for slot in range(count):
        shape = (2, text.num_hidden_layers, text.num_key_value_heads, 40, dim)
        given = torch.randn(shape, generator=generator).to(model.compute_dtype)
        for one in made:
            one.write([slot], given)
    return made


@torch.inference_mode()
def both(
    model: CausalLM, step: FusedStep, given: Sequence[int] = LENGTHS
) -> tuple[Tensor, Tensor, SlotCache, SlotCache]:
    """Logits of the step and of the model's own forward pass, and what each left in its cache."""
    ours, own = caches(model, len(given))
    ids, lengths = torch.arange(3, 3 + len(given)) % 30, torch.tensor(given)
    logits = step.computed(ids, lengths, ours, num_tokens=max(given) + 1)
    attention = DecodeAttention(own, lengths, num_tokens=max(given) + 1)
    expected = model.head.logits(model.hidden(ids[None], lengths[None], attention))
    return logits, expected, ours, own


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_forward_pass_of_the_model(
    tiny_folder: Callable[[str], Path], kind: str, dtype: str, tolerance: float
) -> None:
    model = load(tiny_folder(kind), dtype)
    logits, expected, ours, own = both(model, step_of(model))
    size = float(expected.abs().max())
    assert float((logits - expected).abs().max()) < tolerance * size
    for layer in range(model.config.num_hidden_layers):
        for left, right in zip(ours.layer(layer, 5, 40), own.layer(layer, 5, 40), strict=True):
            assert float((left - right).abs().max()) < tolerance * float(right.abs().max())


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("how", "lanes", "head_dim", "group", "counts"),
    [
        ("float32", 8, 10, 2, EVERY),
        pytest.param("float32", 16, 32, 2, EVERY, marks=pytest.mark.slow),
        ("float32", 8, 64, 7, FEW),
        ("float32", 16, 96, 2, FEW),
        pytest.param("bfloat16", 8, 32, 2, EVERY, marks=pytest.mark.slow),
        pytest.param("bfloat16", 16, 10, 2, EVERY, marks=pytest.mark.slow),
        pytest.param("bfloat16", 16, 32, 2, FEW, marks=pytest.mark.slow),
        ("bfloat16", 16, 128, 4, FEW),
        ("bfloat16 without instructions for it", 8, 10, 2, EVERY),
        pytest.param("bfloat16 without instructions for it", 16, 32, 2, EVERY, marks=pytest.mark.slow),
    ],
)
def test_every_count_of_sequences_and_sizes_that_fill_no_panel(
    how: str,
    lanes: int,
    head_dim: int,
    group: int,
    counts: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two threads, and the tiles of processors of either width, which a compiler can make for any: each width in a
    register with each size of heads, and each precision with each of both; values are gathered a part of a head and of
    the heads that share it at a time, where these are wide or many."""
    dtype, *without = how.split(maxsplit=1)
    flags = [f"-DLANES={lanes}", "-Wno-psabi", "-O1", *(["-mno-avx512bf16"] if without else [])]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, *flags))
    monkeypatch.setattr(steps, "compiled", kernel.compiled.__wrapped__)
    monkeypatch.setattr(kernel, "attend", lambda *given: None)  # the model's own is by torch
    sizes = {"hidden_size": 40, "intermediate_size": 50, "num_heads": 2 * group, "num_kv_heads": 2}
    make_tiny_model(tmp_path / "model", seed=0, num_layers=2, head_dim=head_dim, **sizes)
    model = load(tmp_path / "model", dtype)
    step = step_of(model)
    assert step._kernel.panel_width == 2 * lanes
    tolerance = 2e-5 if dtype == "float32" else 0.02
    for count in counts:
        logits, expected, ours, own = both(model, step, [(7 * slot) % 39 for slot in range(count)])
        for ours_of, own_of in ((logits, expected), (ours.table, own.table)):
            assert float((ours_of - own_of).abs().max()) < tolerance * float(own_of.abs().max()), count


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_nothing(tmp_path: Path, dtype: str) -> None:
    """To the bit, also where there are more of them than cores."""
    make_tiny_model(tmp_path / "model", seed=0, num_layers=4)
    model = load(tmp_path / "model", dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 7):
            torch.set_num_threads(threads)
            ours, step = caches(model, 13)[0], step_of(model)
            lengths = torch.arange(13)
            results += [step.computed(torch.arange(3, 16), lengths, ours, num_tokens=40) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_does_not_depend_on_the_others(tmp_path: Path, dtype: str) -> None:
    """To the bit, whatever runs beside it: how many, how long, and in which slot."""
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    make_tiny_model(tmp_path / "model", seed=0, num_layers=2, **sizes)
    model = load(tmp_path / "model", dtype)
    step = step_of(model)
    given = [(7 * slot) % 39 for slot in range(13)]
    table = caches(model, 13)[0].table
    ids, lengths = torch.arange(3, 16), torch.tensor(given)

    def result(slots: list[int], num_tokens: int) -> Tensor:
        cache = SlotCache(len(slots))
        for place, slot in enumerate(slots):
            cache.write([place], table[:, :, slot].clone())
        chosen = torch.tensor(slots)
        return step.computed(ids[chosen], lengths[chosen], cache, num_tokens=num_tokens)

    together = result(list(range(13)), 40)
    for slots, num_tokens in (
        ([5], given[5] + 1),
        ([12, 5], 40),
        ([0, 5, 1, 2, 3, 4, 6], 37),
        ([5, *range(5)], 33),
    ):
        assert torch.equal(result(slots, num_tokens), together[torch.tensor(slots)]), slots


@torch.inference_mode()
def test_eager_attention_takes_no_compiled_step_and_no_compiled_attention(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, eager = (
        load(tiny_folder("mistral"), attn_implementation=name) for name in ("sdpa", "eager")
    )  # with a window
    assert fused_step(eager) is None
    ids, lengths = torch.tensor([3, 5, 8, 13, 21]), torch.tensor(LENGTHS)

    def logits(model: CausalLM) -> Tensor:
        attention = DecodeAttention(caches(model)[0], lengths, num_tokens=max(LENGTHS) + 1)
        return model.head.logits(model.hidden(ids[None], lengths[None], attention))

    wanted = logits(plain)

    def no_kernel(*arguments: object) -> None:
        raise AssertionError("a compiled kernel was asked for")

    monkeypatch.setattr(kernel, "attend", no_kernel)
    torch.testing.assert_close(logits(eager), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="compiled kernel"):
        logits(plain)


def test_a_step_takes_the_weights_of_now(tiny_folder: Callable[[str], Path]) -> None:
    model = load(tiny_folder("qwen3"))
    step = step_of(model)
    before, *_ = both(model, step)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.mul_(1.1)
    step.weights_changed()
    after, expected, *_ = both(model, step)
    assert float((after - before).abs().max()) > 1e-2 * float(before.abs().max())
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    step.free()
    again, *_ = both(model, step)
    assert torch.equal(again, after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gate_that_is_shut_gives_nothing(tmp_path: Path, dtype: str) -> None:
    """Silu of -1e5 is 0, though e^1e5 is infinite and its quotient an estimate."""
    make_tiny_model(tmp_path, seed=0, num_layers=2)
    model = load(tmp_path, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_proj" in name:
                parameter.mul_(1e5)
    logits, expected, *_ = both(model, step_of(model))
    assert bool(logits.isfinite().all())
    assert float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_a_feed_forward_part_with_biases(tmp_path: Path) -> None:
    """Those of the gate and of what it is for lie in turn, as their weights, behind which a panel is empty."""
    make_tiny_model(tmp_path, seed=0, num_layers=2, intermediate_size=50)
    model, generator = load(tmp_path), torch.Generator().manual_seed(0)
    for name, part in list(model.module.named_modules()):
        if name.endswith(("gate_proj", "up_proj", "down_proj")):
            part.bias = nn.Parameter(torch.randn(part.out_features, generator=generator))
    logits, expected, *_ = both(model, step_of(model))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_models_of_another_form_go_through_their_own_forward_pass(tiny_folder: Callable[[str], Path]) -> None:
    assert fused_step(load(tiny_folder("gemma3"))) is None
    assert fused_step(load(tiny_folder("qwen3"), "float64")) is None
    assert fused_step(load(tiny_folder("qwen3"), lora=LoraConfig(rank=2))) is None


@pytest.mark.parametrize("sizes", [{"hidden_size": 35}, {"intermediate_size": 51}], ids=str)
def test_sizes_that_have_no_pairs(tmp_path: Path, sizes: dict[str, int]) -> None:
    """bfloat16 is multiplied in pairs; a rotary embedding makes heads even."""
    make_tiny_model(
        tmp_path / "model", seed=0, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, **sizes
    )
    assert fused_step(load(tmp_path / "model", "bfloat16")) is None
    model = load(tmp_path / "model")
    logits, expected, *_ = both(model, step_of(model))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def played(model: CausalLM, *, max_tokens: int = 12) -> list[list[int]]:
    batch = DecodeBatch(model, max_running=4)
    requests = [Request(f"{i}", (1, 2, 3 + i), Sampling(key=i, max_tokens=max_tokens)) for i in range(4)]
    batch.waiting.extend(requests)
    while not batch.is_idle:
        batch.step(0)
    return [request.token_ids for request in requests]


def test_a_batch_that_begins_takes_the_weights_of_now(tiny_folder: Callable[[str], Path]) -> None:
    model = load(tiny_folder("qwen3"))
    batch = DecodeBatch(model, max_running=4)

    def greedy(batch: DecodeBatch) -> list[int]:
        request = Request("one", (1, 2, 3), Sampling(key=0, max_tokens=12, temperature=0.0))
        batch.waiting.append(request)
        while not batch.is_idle:
            batch.step(0)
        batch.prefill.forget()
        return request.token_ids

    before = greedy(batch)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 8)
    after = greedy(batch)
    assert after != before
    assert after == greedy(DecodeBatch(model, max_running=4))


def test_a_step_that_differs_is_not_used(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(tiny_folder("qwen3"))
    wanted = played(model)
    assert not caplog.records
    monkeypatch.setattr(steps, "_vector", lambda weight: torch.zeros(weight.shape))
    assert played(model) == wanted
    assert "generation goes through the model's own forward pass, which is slower" in caplog.text


def test_a_cache_on_a_cpu_has_its_room_at_once() -> None:
    slots = SlotCache(64)
    slots.expect([Request(str(slot), (1, 2), Sampling(key=0, max_tokens=4094)) for slot in range(64)])
    slots.write([0], torch.ones(2, 1, 1, 5, 8))
    start = slots.layer(0, 1, 1)[0].data_ptr()
    slots.make_room(4096, num_slots=64)
    assert slots.layer(0, 64, 4096)[0].data_ptr() == start, "nothing was copied"
    assert float(slots.layer(0, 64, 4096)[0].sum()) == 5 * 8, "what was not written is 0"
    slots.make_room(5000, num_slots=64)
    assert float(slots.layer(0, 64, 5000)[0].sum()) == 5 * 8, "it grows beyond what was expected"
    assert slots.num_bytes == 2 * 64 * 5056 * 8 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_lie_in_any_order(dtype: torch.dtype) -> None:
    parts = [nn.Linear(8, 24, dtype=dtype) for _ in range(2)]
    before = steps.packed_in_turn(parts, dtype, width=32)
    for part in parts:
        part.weight.data = part.weight.data.t().contiguous().t()
    assert torch.equal(steps.packed_in_turn(parts, dtype, width=32).panels, before.panels)
