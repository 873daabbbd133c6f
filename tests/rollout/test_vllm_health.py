"""Health of vLLM's engine while a token takes long, with a stand-in for the process beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from strop.rollout.vllm import engine as engine_module
from strop.rollout.vllm.engine import VllmEngine
from strop.rollout.vllm.process import ServerProcess

FACTS = {"vocab_size": 100, "max_model_len": 64, "device": "cuda", "gives_memory_back": False}


class Busy:
    """A process that answers at once and makes no token; its prompts go on, or not."""

    log = Path("vllm.log")

    def __init__(self, *, goes_on: bool) -> None:
        self.goes_on, self.share = goes_on, 0.5
        self.aborted: list[Any] = []

    async def ask(self, what: str, **_: Any) -> Any:
        if what == "generate":
            await asyncio.sleep(60)
        self.share += 0.01 * self.goes_on
        return {"waiting": 1.0, "prefilled_tokens": 3.0, "decoded_tokens": 0.0, "cache_share": self.share}

    def tell(self, what: str, **arguments: Any) -> None:
        self.aborted.append((what, arguments))


def health_of(process: Busy, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engine_module, "HEALTH_TIMEOUT_S", 0.05)
    engine = VllmEngine(cast(ServerProcess, process), FACTS, cast(Any, {}), version=3)
    return asyncio.run(cast(Any, engine.health()))


def test_an_engine_that_computes_a_long_prompt_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Busy(goes_on=True)
    numbers = health_of(process, monkeypatch)
    assert (numbers["version"], numbers["decoded_tokens"]) == (3.0, 0.0)
    assert process.aborted == [("abort", {"ids": ["health check 1"]})], "its own request is given up"


def test_an_engine_that_does_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match=r"no token within 0.05 s .*vllm.log"):
        health_of(Busy(goes_on=False), monkeypatch)
