"""Generation by the model's own forward pass on a CPU, as over ranks: log-probs are the same whatever runs beside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from strop.data.tiny_model import make_tiny_model
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.cpu import library
from strop.engines.cpu.attention import KEY_BLOCK
from strop.engines.lora.adapters import add_lora
from strop.engines.model import load_model
from strop.rollout.native import prefill
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling
from strop.utils.rng import random_key

HEADER = [9, 30, 12, 71, 15, 33, 8, 50, 21, 44]
PROMPTS = [[*HEADER, *range(20, 24 + 9 * number)] for number in range(4)]
"""Of four lengths, with one beginning."""


class Whole(nn.Module):
    """A root as FSDP's, of a model that is whole."""

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@pytest.fixture(scope="module", params=["", "an adapter"])
def model(tiny_model: Path, request: pytest.FixtureRequest) -> CausalLM:
    model = load_model(ModelConfig(path=str(tiny_model)))
    if request.param:
        add_lora(model, LoraConfig(rank=4))
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:  # which begin as zeros
                nn.init.normal_(parameter)
    model.root = Whole()
    return model


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("long") / "model"
    make_tiny_model(
        folder, seed=0, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
        max_position_embeddings=1024,
    )  # fmt: skip
    model = load_model(ModelConfig(path=str(folder)))
    model.root = Whole()
    return model


def log_probs(
    model: CausalLM, turns: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]] = PROMPTS
) -> dict[int, list[float]]:
    """Of two samples of each prompt; those of a turn are asked for together, one turn after the other."""

    async def play() -> dict[int, list[float]]:
        engine, found = NativeEngine(model, max_running=16), dict[int, list[float]]()
        for turn in turns:
            asked = {sample: Sampling(key=random_key(0, "beside", sample), max_tokens=6) for sample in turn}
            generated = await asyncio.gather(
                *(
                    engine.generate(str(sample), prompts[sample // 2], sampling)
                    for sample, sampling in asked.items()
                )
            )
            found |= {sample: list(one.log_probs) for sample, one in zip(asked, generated, strict=True)}
        await engine.close()
        return found

    return asyncio.run(play())


@pytest.mark.parametrize(
    "turns",
    [
        [[sample] for sample in range(8)],
        pytest.param([[0, 1], [2, 3], [4, 5], [6, 7]], marks=pytest.mark.slow),
        [[7, 0], [1, 2, 3, 4, 5, 6]],
        pytest.param([[6, 4, 2, 0], [1, 3, 5], [7]], marks=pytest.mark.slow),
    ],
)
def test_log_probs_are_the_same_beside_any_others(model: CausalLM, turns: list[list[int]]) -> None:
    together = log_probs(model, [range(8)])
    assert log_probs(model, turns) == together


LONG_PROMPTS = [
    [*(7 + 11 * at % 90 for at in range(300)), *range(20, 24 + 9 * number)] for number in range(4)
]


@pytest.mark.parametrize("room", [4096, 700])
@pytest.mark.parametrize(
    "turns",
    [pytest.param([[0, 1], [2, 3], [4, 5], [6, 7]], marks=pytest.mark.slow), [[7, 0], [1, 2, 3, 4, 5, 6]]],
)
def test_so_they_are_where_long_prompts_begin_alike_or_are_cut(
    long_model: CausalLM, turns: list[list[int]], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = log_probs(long_model, [[sample] for sample in range(8)], LONG_PROMPTS)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", room)
    assert log_probs(long_model, turns, LONG_PROMPTS) == alone
    assert log_probs(long_model, [range(8)], LONG_PROMPTS) == alone


def test_a_sequence_that_is_too_short_to_begin_with_is_not_kept(long_model: CausalLM) -> None:
    async def play() -> None:
        engine, sampling = NativeEngine(long_model, max_running=4), Sampling(key=1, max_tokens=6)
        first = await engine.generate("first", LONG_PROMPTS[0], sampling)
        await engine.generate("second", [*LONG_PROMPTS[0], *first.token_ids, 9, 30], sampling)
        kept = engine._batch.prefill.num_bytes
        await engine.generate("short", PROMPTS[0], sampling)
        assert engine._batch.prefill.num_bytes == kept
        await engine.generate("long", LONG_PROMPTS[3], sampling)
        assert engine._batch.prefill.num_bytes > kept
        await engine.close()

    asyncio.run(play())


def test_a_prompt_begins_with_a_multiple_of_the_keys_that_are_summed_together() -> None:
    source = Path(library.SOURCE).read_text(encoding="utf-8")
    assert f"#define KEYS {KEY_BLOCK} " in source
