"""The native engine on a GPU: the model's own continuation, the trainer's log-probs, and memory given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_cases import Ask, answers, generate_all, run, tokens

from references.language_models import load_plain, plain_greedy
from references.token_passes import log_probs_of
from strop.engines.attention_form import AttentionForm
from strop.engines.causal_lm import CausalLM
from strop.engines.packing import make_rows
from strop.rollout.native import decode_kernel
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import DecodeAttention
from strop.rollout.native.cuda_graph import StaticStep, cuda_graphs
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("float64_models")]

DEVICE = "cuda"
Tiny = Callable[..., CausalLM]
KINDS = ("qwen3", "llama", "mistral")
LENGTHS = (1, 3, 4, 9, 17)


def asks(max_tokens: int = 20) -> list[Ask]:
    """Three samples of each of four prompts."""
    return [
        (tokens(LENGTHS[p], p), Sampling(key=random_key(0, "test", p, s), max_tokens=max_tokens))
        for p in range(4)
        for s in range(3)
    ]


def differences(model: CausalLM, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of sampled tokens [N]: those of generation less those of the trainer's forward pass."""
    given = asks()
    outputs = answers(model, given)
    rows = make_rows(
        [torch.tensor(prompt) for prompt, _ in given], [torch.tensor(o.token_ids) for o in outputs]
    )
    trained, _ = log_probs_of(model, rows, temperature=temperature, max_tokens=60)
    rolled = torch.tensor([value for output in outputs for value in output.log_probs])
    return rolled - trained.cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_on_a_gpu_equals_transformers_generate(
    tiny: Tiny, tiny_folder: Callable[[str], Path], kind: str
) -> None:
    prompts = [tokens(length, 50 + length) for length in LENGTHS]
    plain = load_plain(tiny_folder(kind), dtype=torch.float64).to(DEVICE)
    wanted = [plain_greedy(plain, prompt, 12) for prompt in prompts]
    model = tiny(kind, device=DEVICE)
    assert model.device.type == DEVICE
    greedy = Sampling(key=0, temperature=0.0, max_tokens=12)
    assert [list(output.token_ids) for output in answers(model, [(p, greedy) for p in prompts])] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_and_trainer_agree_on_a_gpu(tiny: Tiny, kind: str) -> None:
    seen = differences(tiny(kind, dtype="float32", device=DEVICE))
    assert len(seen) == 12 * 20
    assert float(seen.abs().max()) <= 1e-4


def test_bfloat16_on_a_gpu_agrees_within_its_rounding(tiny: Tiny) -> None:
    # As on a CPU: rounding to 8 bits in other places, log-probs of size 4.
    seen = differences(tiny("qwen3", dtype="bfloat16", device=DEVICE))
    assert float(seen.abs().mean()) < 0.05
    assert float(seen.abs().max()) < 0.3


def test_the_tokens_of_a_gpu_are_those_of_a_cpu(tiny: Tiny) -> None:
    on_cpu, on_gpu = (answers(tiny("qwen3", device=device), asks()) for device in ("cpu", DEVICE))
    assert [output.token_ids for output in on_gpu] == [output.token_ids for output in on_cpu]


def test_sleep_gives_the_memory_of_the_cache_back_and_the_engine_wakes(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32", device=DEVICE)
    engine = NativeEngine(model, max_running=12)
    run(generate_all(engine, asks()))  # libraries take what they keep
    run(engine.sleep())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first = run(generate_all(engine, asks()))
    awake = torch.cuda.memory_allocated()
    cache_bytes = run(engine.health())["cache_bytes"]
    assert cache_bytes > 0
    run(engine.sleep())
    torch.cuda.synchronize()
    assert awake - torch.cuda.memory_allocated() >= cache_bytes
    assert torch.cuda.memory_allocated() - before < cache_bytes, "nothing of the cache's size stays"
    again = run(generate_all(engine, asks()))
    assert [output.token_ids for output in again] == [output.token_ids for output in first]


def test_tokens_that_are_read_behind_are_those_that_are_read_at_once(tiny: Tiny) -> None:
    model = tiny("qwen3", device=DEVICE)
    stop = tuple(range(5))
    given = [(ids, dataclasses.replace(how, stop_token_ids=stop)) for ids, how in asks(max_tokens=40)]
    found = []
    for reads_behind in (False, True):
        engine = NativeEngine(model, max_running=5)
        assert engine._batch._reads_behind
        engine._batch._reads_behind = reads_behind
        found.append([output.token_ids for output in run(generate_all(engine, given))])
    assert found[0] == found[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_captured_steps_give_what_the_forward_pass_gives(tiny: Tiny, checkpointing: bool) -> None:
    model = tiny("qwen3", device=DEVICE, gradient_checkpointing=checkpointing)
    given = asks(max_tokens=40)
    with_graphs = DecodeBatch(model, max_running=12)
    without = DecodeBatch(model, max_running=12)
    without._steps = None
    found = []
    for batch in (with_graphs, without):
        made = [Request(f"r{n}", tuple(prompt), how) for n, (prompt, how) in enumerate(given)]
        batch.waiting.extend(made)
        while not batch.is_idle:
            batch.step(0)
        found.append(made)
    assert isinstance(with_graphs._steps, StaticStep)
    assert with_graphs._steps.num_captured > 0
    assert not with_graphs._steps.is_disabled
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_in_bfloat16_follow_the_weights_and_the_table(tiny: Tiny, kind: str) -> None:
    """Steps over rounded weights, which change between calls, and over a table that grows."""
    model = tiny(kind, dtype="bfloat16", device=DEVICE)
    batch = DecodeBatch(model, max_running=12)

    def made(max_tokens: int) -> list[Request]:
        requests = [
            Request(f"r{n}", tuple(prompt), how)
            for n, (prompt, how) in enumerate(asks(max_tokens=max_tokens))
        ]
        batch.waiting.extend(requests)
        while not batch.is_idle:
            batch.step(0)
        return requests

    before = made(20)
    assert isinstance(batch._steps, StaticStep)
    captured = batch._steps.num_captured
    assert captured > 0
    assert batch._steps.has_fused_layers
    again = made(100)  # the table grows, and what was captured over the old one is of no use
    assert batch._steps.num_captured > captured
    assert not batch._steps.is_disabled
    weight = model.module.get_output_embeddings().weight
    kept = weight.data.clone()
    try:
        weight.data.mul_(-1.0)
        after = made(20)
    finally:
        weight.data.copy_(kept)
    assert [one.token_ids for one in after] != [one.token_ids for one in before]
    rows = make_rows(
        [torch.tensor(prompt) for prompt, _ in asks()], [torch.tensor(one.token_ids) for one in again]
    )
    trained, _ = log_probs_of(model, rows, temperature=1.0, max_tokens=400)
    rolled = torch.tensor([value for one in again for value in one.log_probs])
    assert float((rolled - trained.cpu()).abs().mean()) < 0.05


@torch.inference_mode()  # as all captures of a process, which share tensors of torch
def test_a_capture_that_fails_leaves_memory_and_random_numbers_as_they_were() -> None:
    one, capture = torch.ones((), device=DEVICE), cuda_graphs()
    with pytest.raises(RuntimeError):
        capture(lambda: one * one.item())
    torch.randn(4, device=DEVICE)  # torch's generator draws again
    # Segments that grow are given back in pieces of 20 MiB, and the block may begin and end within one.
    block, stream = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream()
    block.record_stream(stream)
    held = torch.cuda.memory_reserved()
    del block
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert held - torch.cuda.memory_reserved() >= 1 << 27
    replay, result = capture(lambda: one + 1)
    replay()
    assert float(result) == 2


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (16, 8, 128), (6, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_decode_step_gives_what_torch_gives(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    lengths = torch.tensor([0, 130, 67, 150], device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(4, count, dim, device=DEVICE, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    )
    before = torch.randn(2, 1, 4, kv_heads, 150, dim, device=DEVICE, generator=generator).to(dtype)
    found = []
    for has_kernel in (True, False):
        cache = PagedCache(4, torch.device(DEVICE))
        for slot, length in enumerate(lengths.tolist()):
            computed = cache.put(before[:, :, slot, :, :length], before=None, state_bytes=0)
            assert computed is not None
            assert cache.enter(range(slot, slot + 1), computed, longest=150) == 1
        assert cache.reserve(lengths.cpu().numpy())
        if not has_kernel:
            monkeypatch.setattr(decode_kernel, "has_kernels", lambda device: False)
        attention = DecodeAttention(cache, lengths, num_tokens=151)
        out = attention.attend(0, query, key, value, AttentionForm(scaling=0.3, window=window))
        assert cache.reads_padding != has_kernel
        found.append((out, torch.stack(cache.layer(0, 4, 151))))
    exact = dtype == torch.float32
    torch.testing.assert_close(
        found[0][0], found[1][0], atol=1e-5 if exact else 0.06, rtol=1e-5 if exact else 0.06
    )
    assert torch.equal(found[0][1], found[1][1])
