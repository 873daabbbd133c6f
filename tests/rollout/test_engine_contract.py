"""The native engine keeps the contract, on several families of models; and the rules fail for engines that do not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.engine_contract.case import EngineCase, Rule
from rollout.engine_contract.generation import (
    distribution,
    greedy_decoding,
    length_limit,
    log_probs,
    ragged_batch,
    stop_tokens,
    token_ids,
)
from rollout.engine_contract.native import native
from rollout.engine_contract.requests import abort, damage, liveness, pause
from rollout.engine_contract.rules import RULES
from rollout.engine_contract.weights import sleep, update

from strop.rollout.native.engine import NativeEngine
from strop.rollout.types import Sampling, TokenOutput

FAMILIES = (
    "qwen3",
    pytest.param("llama", marks=pytest.mark.slow),
    pytest.param("gpt2", marks=pytest.mark.slow),
    "gemma3",
)
"""A tied head; a head of its own; learned positions and tied; layers with and without a window. What the engine samples
with each family is in tests/engines/test_families.py too."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[EngineCase]:
    with EngineCase(native(), tiny_folder(request.param)) as case:
        yield case


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_native_engine(case: EngineCase, rule: Rule) -> None:
    case.check(rule)


class Altered(NativeEngine):
    """An engine whose requests or answers are altered."""

    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return prompt, sampling

    def answer(self, output: TokenOutput) -> TokenOutput:
        return output

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, **options: Any
    ) -> TokenOutput:
        asked = self.ask(prompt_ids, sampling)
        return self.answer(await super().generate(request_id, *asked, **options))


class EchoesThePrompt(Altered):
    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return prompt, dataclasses.replace(sampling, max_tokens=sampling.max_tokens + 1)


class ForgetsTheTemperature(Altered):
    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return prompt, dataclasses.replace(sampling, temperature=min(sampling.temperature, 1.0))


class ForgetsTopK(Altered):
    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return prompt, dataclasses.replace(sampling, top_k=0)


class DropsTheFirstToken(Altered):
    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return tuple(prompt)[1:] or prompt, sampling


class StartsAgain(Altered):
    def ask(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Sequence[int], Sampling]:
        return prompt, dataclasses.replace(sampling, position=0)


class KeepsTheStopToken(Altered):
    def answer(self, output: TokenOutput) -> TokenOutput:
        if output.stop_reason != "stop":
            return output
        return dataclasses.replace(output, token_ids=output.token_ids[:-1], log_probs=output.log_probs[:-1])


class SaysOneVersion(Altered):
    def answer(self, output: TokenOutput) -> TokenOutput:
        return dataclasses.replace(output, versions=(0,) * len(output.token_ids))


class RoundsLogProbs(Altered):
    def answer(self, output: TokenOutput) -> TokenOutput:
        return dataclasses.replace(output, log_probs=tuple(round(one, 3) for one in output.log_probs))


class IgnoresPause(NativeEngine):
    async def pause(self) -> None: ...


class LosesTheAborted(Altered):
    def answer(self, output: TokenOutput) -> TokenOutput:
        if output.stop_reason != "aborted":
            return output
        return TokenOutput(token_ids=(), log_probs=(), versions=(), stop_reason="aborted")


class NeverSleeps(NativeEngine):
    async def sleep(self, level: int = 1) -> None: ...  # type: ignore[override]


class HidesTheReason(NativeEngine):
    async def health(self) -> Mapping[str, float]:
        try:
            return await super().health()
        except RuntimeError:
            raise RuntimeError("something went wrong") from None


class IsAlwaysWell(NativeEngine):
    async def health(self) -> Mapping[str, float]:
        return {"decoded_tokens": 7.0}


@pytest.mark.parametrize(
    ("engine", "rule", "sentence"),
    [
        (EchoesThePrompt, token_ids, "12 tokens were asked for without a stop token, 13 came"),
        (EchoesThePrompt, length_limit, "max_tokens=1: 2 tokens"),
        (DropsTheFirstToken, greedy_decoding, "less likely than"),
        (DropsTheFirstToken, ragged_batch, "log-probs are up to"),
        (RoundsLogProbs, log_probs, "float32 allows 0.0001"),
        (ForgetsTheTemperature, distribution, "chi-square"),
        (ForgetsTopK, distribution, "which are cut off"),
        (KeepsTheStopToken, stop_tokens, "the response has"),
        (StartsAgain, abort, "are not those of an undisturbed"),
        (LosesTheAborted, abort, "it returns 0"),
        (SaysOneVersion, update, "tokens carry [0]"),
        (IgnoresPause, pause, "during the pause"),
        (NeverSleeps, sleep, "sleep while a request runs is not refused"),
        (IsAlwaysWell, liveness, "tokens were sampled"),
        (IsAlwaysWell, damage, "health of a damaged engine succeeds"),
        (HidesTheReason, damage, "health of a damaged engine does not say 'the device is lost'"),
    ],
)  # fmt: skip
def test_a_breach_is_seen(
    tiny_folder: Callable[[str], Path], engine: type[NativeEngine], rule: Rule, sentence: str
) -> None:
    with (
        EngineCase(native(engine=engine), tiny_folder("qwen3")) as case,
        pytest.raises(AssertionError) as breach,
    ):
        case.check(rule)
    assert sentence in str(breach.value)


def test_a_rule_that_hangs_is_ended(tiny_folder: Callable[[str], Path]) -> None:
    async def hangs(case: EngineCase) -> None:
        await asyncio.Event().wait()

    case = EngineCase(native(), tiny_folder("qwen3"))
    with case, pytest.raises(AssertionError, match="did not end within 0.05 s"):
        case.check(hangs, limit_s=0.05)


def test_a_head_that_is_not_updated_is_seen(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine keeps a copy of a tied head: the embedding is new, the head is not."""
    start = native()

    async def untied(folder: Path) -> Any:
        started = await start(folder)
        metadata = [dataclasses.replace(weight, aliases=()) for weight in started.target.weights_metadata()]
        head = started.target._module.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        monkeypatch.setattr(started.target, "weights_metadata", lambda: metadata)
        return started

    case = EngineCase(untied, tiny_folder("qwen3"))
    with case, pytest.raises(AssertionError, match="log-probs are up to"):
        case.check(update)
