"""The native engine on a GPU: the model's own continuation, the trainer's log-probs, and memory given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_cases import Ask, answers, generate_all, run, tokens

from references.language_models import load_plain, plain_greedy
from references.token_passes import log_probs_of
from strop.base.randomness import random_key
from strop.engines.causal_lm import CausalLM
from strop.engines.packing import make_rows
from strop.rollout.captured.steps import StaticStep
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

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


def test_captured_steps_give_what_the_forward_pass_gives(tiny: Tiny) -> None:
    model = tiny("qwen3", device=DEVICE)
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
    assert not with_graphs._steps.is_given_up
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
