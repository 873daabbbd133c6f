"""The native engine keeps the contract, on several families of models; and the checks see who does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.native_subject import native

from strop.rollout.conformance.suite import CHECKS
from strop.rollout.conformance.trial import Check, Conformance
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
def conformance(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[Conformance]:
    with Conformance(native(), tiny_folder(request.param)) as one:
        yield one


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_native_engine(conformance: Conformance, check: Check) -> None:
    finding = conformance.run(check)
    assert finding.outcome != "failed", finding.text
    if finding.outcome == "absent":
        pytest.skip(finding.text)


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


class IsAlwaysWell(NativeEngine):
    async def health(self) -> Mapping[str, float]:
        return {"decoded_tokens": 7.0}


@pytest.mark.parametrize(
    ("engine", "check", "sentence"),
    [
        (EchoesThePrompt, "token ids in, token ids out", "12 tokens were asked for without a stop token, 13 came"),
        (EchoesThePrompt, "max_tokens is exact", "max_tokens=1: 2 tokens"),
        (DropsTheFirstToken, "greedy decoding equals generate of transformers", "less likely than"),
        (DropsTheFirstToken, "prompts and responses of very different lengths side by side", "log-probs are up to"),
        (RoundsLogProbs, "log-probs equal a full forward pass", "float32 allows 0.0001"),
        (ForgetsTheTemperature, "samples follow the distribution", "chi-square"),
        (ForgetsTopK, "samples follow the distribution", "which are cut off"),
        (KeepsTheStopToken, "stop tokens end a response and belong to it", "the response has"),
        (StartsAgain, "an aborted request returns what it has and can be continued", "are not those of an undisturbed"),
        (LosesTheAborted, "an aborted request returns what it has and can be continued", "it returns 0"),
        (SaysOneVersion, "new weights are really used, and their version stands on every token", "tokens carry [0]"),
        (IgnoresPause, "pause holds requests and resume lets them go on", "during the pause"),
        (NeverSleeps, "sleep gives the cache's memory back", "sleep while a request runs is not refused"),
        (IsAlwaysWell, "health generates a token", "tokens were sampled"),
        (IsAlwaysWell, "an engine that cannot work says so", "health of a damaged engine succeeds"),
    ],
)  # fmt: skip
def test_a_breach_is_seen(
    tiny_folder: Callable[[str], Path], engine: type[NativeEngine], check: str, sentence: str
) -> None:
    (one,) = [one for one in CHECKS if one.name == check]
    with Conformance(native(engine=engine), tiny_folder("qwen3")) as conformance:
        finding = conformance.run(one)
    assert finding.outcome == "failed"
    assert sentence in finding.text


def test_a_head_that_is_not_updated_is_seen(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine keeps a copy of a tied head: the embedding is new, the head is not."""
    start = native()

    async def untied(folder: Path) -> Any:
        subject = await start(folder)
        held = subject.target.weights_metadata()
        own = [dataclasses.replace(one, aliases=()) for one in held]
        head = subject.target._module.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        monkeypatch.setattr(subject.target, "weights_metadata", lambda: own)
        return subject

    (check,) = [one for one in CHECKS if one.name.startswith("new weights")]
    with Conformance(untied, tiny_folder("qwen3")) as conformance:
        finding = conformance.run(check)
    assert finding.outcome == "failed"
    assert "log-probs are up to" in finding.text
