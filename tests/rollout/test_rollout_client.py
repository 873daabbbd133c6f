"""The client's deadline, and the checks of options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import pytest
from rollout_cases import run, tokens

from strop.engines.causal_lm import CausalLM
from strop.rollout.client import RolloutClient, RolloutTimeout
from strop.rollout.config import RolloutConfig
from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Ability, OnToken, RolloutEngine, Sampling, TokenOutput

SAMPLING = Sampling(key=0, max_tokens=7)


class ScriptedEngine:
    """An engine that answers what the test says, and notes what it was asked."""

    def __init__(self, answer: Callable[[], TokenOutput] | None) -> None:
        self.answer = answer
        self.aborted: list[Sequence[str] | None] = []

    abilities: frozenset[Ability] = frozenset()
    version = 0

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        if self.answer is None:
            await asyncio.Event().wait()
        assert self.answer is not None
        return self.answer()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.aborted.append(request_ids)

    async def set_version(self, version: int) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def flush_cache(self) -> None: ...
    async def sleep(self, level: Literal[1, 2] = 1) -> None: ...
    async def wake_up(self) -> None: ...
    async def close(self) -> None: ...
    async def health(self) -> Mapping[str, float]:
        return {}


def test_an_answer_passes_through() -> None:
    output = TokenOutput(token_ids=(1,), log_probs=(-0.5,), versions=(3,), stop_reason="stop")
    engine: RolloutEngine = ScriptedEngine(lambda: output)
    assert run(RolloutClient(engine, timeout_s=5).generate("a", [1, 2], SAMPLING)) is output


def test_a_slow_request_is_aborted_with_what_to_do() -> None:
    engine = ScriptedEngine(None)
    with pytest.raises(
        RolloutTimeout,
        match=r"generation of a took longer than rollout.timeout_s = 0.01 s \(2 prompt tokens, up to 7 new ones\); "
        r"raise the limit or lower data.max_response_tokens",
    ):
        run(RolloutClient(engine, timeout_s=0.01).generate("a", [1, 2], SAMPLING))
    assert engine.aborted == [["a"]]


def test_an_engines_own_timeout_is_not_taken_for_the_deadline() -> None:
    def late() -> TokenOutput:
        raise TimeoutError("the engine's own sentence")

    with pytest.raises(TimeoutError, match="the engine's own sentence"):
        run(RolloutClient(ScriptedEngine(late), timeout_s=5).generate("a", [1], SAMPLING))


def test_the_deadline_frees_the_native_engines_slot(tiny: Callable[..., CausalLM]) -> None:
    engine = NativeEngine(tiny("qwen3", dtype="float32"), max_running=1)

    async def body() -> None:
        await engine.pause()
        with pytest.raises(RolloutTimeout, match="generation of a took longer"):
            await RolloutClient(engine, timeout_s=0.02).generate("a", tokens(4, 0), SAMPLING)
        await engine.resume()
        numbers = await engine.health()
        assert (numbers["running"], numbers["waiting"], numbers["decoded_tokens"]) == (0, 0, 1)

    run(body())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; a request generates at least 1 token"),
        ({"temperature": -0.1}, "temperature is -0.1; use 0 for greedy"),
        ({"top_p": 0.0}, "top_p is 0.0; use a probability"),
        ({"top_p": 1.5}, "top_p is 1.5; use a probability"),
        ({"top_k": -1}, "top_k is -1; use 0 for off"),
        ({"key": -1}, "key is -1; use a 64-bit number"),
        ({"key": 1 << 64}, "key is 18446744073709551616; use a 64-bit number"),
        ({"position": -1}, "position is -1"),
    ],
)
def test_sampling_options_are_checked(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**{"key": 0, "max_tokens": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"samples_per_prompt": 0},
            "rollout.samples_per_prompt is 0, but it needs a whole number of at least 1",
        ),
        (
            {"temperature": 0.0},
            "rollout.temperature is 0.0, but it needs a number above 0: greedy decoding has no",
        ),
        ({"top_p": 0.0}, "rollout.top_p is 0.0, but it needs a number above 0 and at most 1"),
        ({"top_k": -1}, "rollout.top_k is -1, but it needs a whole number of at least 0"),
        ({"max_running": 0}, "rollout.max_running is 0, but it needs a whole number"),
        ({"timeout_s": 0}, "rollout.timeout_s is 0, but it needs a number above 0"),
    ],
)
def test_configuration_is_checked(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RolloutConfig(**options)  # type: ignore[arg-type]
