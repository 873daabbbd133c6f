"""What the native engine generates: the model's own continuation, whoever runs beside."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rollout_cases import Ask, answers, generate_all, run, token_ids, tokens, turns

from references.language_models import SUPPORTED, load_plain, plain_greedy
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
from strop.rollout.native import prefill
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

pytestmark = pytest.mark.usefixtures("float64_models")

Tiny = Callable[..., CausalLM]
LENGTHS = [1, 3, 4, 9, 17]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(key=0, temperature=0.0, max_tokens=max_tokens)


def sampled(*parts: int, max_tokens: int, **options: float) -> Sampling:
    return Sampling(key=random_key(0, "test", *parts), max_tokens=max_tokens, **options)  # type: ignore[arg-type]


def groups(*, num_prompts: int = 4, samples: int = 3, **options: float) -> list[Ask]:
    """Samples of prompts of several lengths, each with a token limit of its own."""
    return [
        (tokens(LENGTHS[p], p), sampled(p, s, max_tokens=2 + 5 * s + p, **options))
        for p in range(num_prompts)
        for s in range(samples)
    ]


@pytest.mark.parametrize("kind", SUPPORTED)
def test_greedy_equals_transformers_generate(
    tiny: Tiny, tiny_folder: Callable[[str], Path], kind: str
) -> None:
    # Longer than the window of the models that have one; several lengths side by side.
    prompts = [tokens(length, 50 + length) for length in LENGTHS]
    plain = load_plain(tiny_folder(kind), dtype=torch.float64)
    wanted = [plain_greedy(plain, prompt, 12) for prompt in prompts]
    outputs = answers(tiny(kind), [(prompt, greedy(12)) for prompt in prompts])
    assert [list(output.token_ids) for output in outputs] == wanted
    assert {output.stop_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_log_probs_agree_with_the_trainer(tiny: Tiny, kind: str, temperature: float) -> None:
    model = tiny(kind, dtype="float32")
    asks = groups(temperature=temperature, top_p=0.9)
    outputs = answers(model, asks, max_running=5)
    rows = make_rows(
        [torch.tensor(prompt) for prompt, _ in asks], [torch.tensor(o.token_ids) for o in outputs]
    )
    trained, _ = log_probs_of(model, rows, temperature=temperature, max_tokens=60)
    rolled = torch.tensor([value for output in outputs for value in output.log_probs])
    assert float((trained - rolled).abs().max()) <= 1e-4


def test_bfloat16_rollout_and_trainer_agree_within_its_rounding(tiny: Tiny) -> None:
    # Rounding to 8 bits in other places: attention of one query against attention of all. Log-probs are of
    # size 4.
    model = tiny("qwen3", dtype="bfloat16")
    asks = groups()
    outputs = answers(model, asks)
    rows = make_rows(
        [torch.tensor(prompt) for prompt, _ in asks], [torch.tensor(o.token_ids) for o in outputs]
    )
    trained, _ = log_probs_of(model, rows, temperature=1.0, max_tokens=60)
    rolled = torch.tensor([value for output in outputs for value in output.log_probs])
    assert float((trained - rolled).abs().mean()) < 0.05
    assert float((trained - rolled).abs().max()) < 0.3


@pytest.mark.parametrize(
    "kind",
    ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("mistral", marks=pytest.mark.slow)],
)
def test_tokens_depend_on_key_and_position_alone(tiny: Tiny, kind: str) -> None:
    model = tiny(kind, dtype="float32")
    asks = groups()
    alone = [answers(model, [ask])[0] for ask in asks]
    assert len(set(token_ids(alone))) == len(asks)
    backwards, shuffled = (
        range(len(asks))[::-1],
        torch.randperm(len(asks), generator=torch.Generator().manual_seed(0)),
    )
    for max_running in (1, 3, 256):
        for order in (None, backwards, shuffled.tolist()):
            outputs = answers(model, asks, max_running=max_running, order=order)
            assert token_ids(outputs) == token_ids(alone), (max_running, order)
            for output, wanted in zip(outputs, alone, strict=True):
                assert output.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)
                assert output.stop_reason == wanted.stop_reason


def test_requests_that_come_while_others_run_change_nothing(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    asks = groups()
    alone = token_ids(answers(model, asks))

    async def late() -> list[tuple[int, ...]]:
        engine = NativeEngine(model, max_running=5)

        async def one(index: int) -> tuple[int, ...]:
            await turns(2 * index)
            return (await engine.generate(f"{index}", *asks[index])).token_ids

        return await asyncio.gather(*(one(index) for index in range(len(asks))))

    assert run(late()) == alone


@pytest.mark.parametrize("max_running", [1, 3, 256])
def test_the_prompt_of_a_group_is_computed_once(tiny: Tiny, max_running: int) -> None:
    engine = NativeEngine(tiny("qwen3"), max_running=max_running)
    asks = [(tokens(11, p), sampled(p, s, max_tokens=4)) for p in range(2) for s in range(7)]
    run(generate_all(engine, asks))
    numbers = run(engine.health())
    assert numbers["prefilled_tokens"] == 2 * 11 + 1  # and the health check's own
    assert numbers["decoded_tokens"] == 14 * 4 + 1


def test_many_prompts_are_computed_in_bounded_pieces(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3")
    asks = groups(num_prompts=5, samples=1)
    wanted = token_ids(answers(model, asks))
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 8)
    sizes = []
    hidden = model.hidden

    def watched(ids: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        sizes.append(ids.shape[1])
        return hidden(ids, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "hidden", watched)
    assert token_ids(answers(model, asks)) == wanted
    # 1 + 3 + 4; 8 of 9; the last one and 7 of 17; 8; 2. Those that are ready decode in between.
    assert [size for size in sizes if size > 3] == [8, 8, 8, 8]
    assert sum(sizes[1:]) > 26


def test_stop_tokens_end_a_response_and_belong_to_it(tiny: Tiny) -> None:
    model = tiny("qwen3")
    prompt = tokens(4, 3)
    free = answers(model, [(prompt, sampled(1, max_tokens=20))])[0].token_ids
    for position in (0, 1, 7):
        stop = free[position]
        end = free.index(stop)  # the first time it comes
        sampling = sampled(1, max_tokens=20, stop_token_ids=(stop, 10**6))  # type: ignore[arg-type]
        output = answers(model, [(prompt, sampling)])[0]
        assert output.token_ids == free[: end + 1]
        assert output.stop_reason == "stop"


def test_a_stop_token_at_the_last_place_counts_as_stop(tiny: Tiny) -> None:
    model = tiny("qwen3")
    prompt = tokens(4, 3)
    free = answers(model, [(prompt, sampled(1, max_tokens=20))])[0].token_ids
    end = free.index(free[5])
    sampling = sampled(1, max_tokens=end + 1, stop_token_ids=(free[5],))  # type: ignore[arg-type]
    assert answers(model, [(prompt, sampling)])[0].stop_reason == "stop"


def test_max_tokens_is_exact(tiny: Tiny) -> None:
    model = tiny("qwen3")
    for max_tokens in (1, 2, 9):
        output = answers(model, [(tokens(3, 0), sampled(1, max_tokens=max_tokens))])[0]
        assert len(output.token_ids) == len(output.log_probs) == len(output.versions) == max_tokens
        assert output.stop_reason == "length"


def test_a_response_goes_on_where_another_request_stopped(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="float32")
    prompt, whole = tokens(6, 5), sampled(3, max_tokens=20)
    wanted = answers(model, [(prompt, whole)])[0]
    first = answers(model, [(prompt, dataclasses.replace(whole, max_tokens=8))])[0]
    rest = answers(
        model, [([*prompt, *first.token_ids], dataclasses.replace(whole, max_tokens=12, position=8))]
    )[0]
    assert first.token_ids + rest.token_ids == wanted.token_ids
    assert first.log_probs + rest.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)


def test_a_model_with_gradient_checkpointing_generates_and_prepares_no_backward_pass(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = groups(num_prompts=2)
    wanted = token_ids(answers(tiny("qwen3"), asks))
    model = tiny("qwen3", gradient_checkpointing=True)
    # What torch calls for each layer, and a GPU refuses while a step is captured; and what it makes beside.
    for name in ("get_device_states", "_CheckpointFrame"):
        monkeypatch.setattr(torch.utils.checkpoint, name, None)
    assert token_ids(answers(model, asks)) == wanted


def test_training_after_generation_works_on_the_same_model(tiny: Tiny) -> None:
    # Generation runs in inference mode; nothing that it made may enter a backward pass.
    model = tiny("gemma3", dtype="float32")
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(lr=0.01), total_steps=None)
    rollout = NativeEngine(model, max_running=4)
    asks = [(tokens(5, 1), greedy(8))]
    before = run(generate_all(rollout, asks))[0]
    rows = make_rows([torch.tensor(tokens(5, 1))], [torch.tensor(tokens(8, 2))])
    for _ in range(8):
        engine.accumulate(rows, of_log_probs(lambda log_probs, _, __: -log_probs.sum(), temperature=1.0))
        assert engine.step().skipped == ""
    run(rollout.set_version(1))
    after = run(generate_all(rollout, asks))[0]
    assert after.token_ids != before.token_ids  # the engine reads the trainer's parameters
    assert (set(before.versions), set(after.versions)) == ({0}, {1})
    assert after.token_ids == answers(model, asks)[0].token_ids
