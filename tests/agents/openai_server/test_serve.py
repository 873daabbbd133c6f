"""`strop serve`: a model in a process of its own, and what it records of a real engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from strop.agents.openai_server.server import Gateway
from strop.cli.commands import serve
from strop.config import load_config
from strop.protocol.trajectory import Trajectory
from strop.rollout.engine_group import EngineContext
from strop.rollout.types import RolloutEngine, Sampling
from strop.trainer.config import Config
from strop.trainer.standalone import load_generation
from strop.utils.rng import random_key

QUESTION: Any = {"role": "user", "content": "1 + 2"}


def config_of(model: Path) -> Config:
    return load_config(Config, overrides=[f"model.path={model}", "data.max_response_tokens=8"])


def loaded(config: Config) -> tuple[serve.AnySession, RolloutEngine]:
    place = EngineContext(
        model=config.model, rollout=config.rollout, device="cpu", version=0, trained=None, max_tokens=0,
        logs=None, rank=0,
    )  # fmt: skip
    made = asyncio.run(load_generation(place))
    return serve.any_session(config, made), made.engine


@pytest.mark.timeout(60)
def test_tokens_and_log_probs_are_those_of_the_engine(tiny_model: Path) -> None:
    sessions, engine = loaded(config_of(tiny_model))

    def work(address: str, token: str) -> Any:
        client = openai.OpenAI(base_url=f"{address}/s/one/v1", api_key=token, max_retries=0)
        extra = {"return_token_ids": True}
        return client.chat.completions.create(
            model="any", messages=[QUESTION], seed=5, n=2, logprobs=True, extra_body=extra
        )

    async def whole() -> tuple[Any, list[Trajectory], list[Any]]:
        gateway = Gateway(sessions)
        async with gateway.serving() as address:
            made = await asyncio.to_thread(work, address, gateway.token)
        found = list(sessions.find("one")[0].sequences())
        again = []
        for choice in range(2):
            key, stops = random_key(5, "serve", choice), sessions.find("one")[0].model.stop_token_ids
            sampling = Sampling(key=key, max_tokens=8, stop_token_ids=stops)
            again.append(await engine.generate(f"again {choice}", found[0].prompt_ids, sampling))
        return made, found, again

    made, found, again = asyncio.run(whole())
    by_tokens = {one.response_ids: one for one in found}
    assert len(found) == 2
    for choice, output in zip(made.choices, again, strict=True):
        trajectory = by_tokens[tuple(choice.model_dump()["token_ids"])]
        assert trajectory.response_ids == output.token_ids
        assert trajectory.log_probs == pytest.approx(output.log_probs, abs=1e-5)
        assert trajectory.versions == output.versions
        assert [one.logprob for one in choice.logprobs.content] == list(trajectory.log_probs)
    assert made.model_dump()["prompt_token_ids"] == list(found[0].prompt_ids)


PARSER = """
from strop.agents.tools.formats import ToolParser

@ToolParser.register("of_a_file")
class OfAFile(ToolParser):
    pass
"""


@pytest.mark.timeout(60)
def test_a_served_model_has_the_tool_format_of_the_settings(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own_format.py").write_text(PARSER)
    with_file = f"agent.files=[{tmp_path / 'own_format.py'}]"
    for overrides, expected in (
        (["agent.tool_format=hermes"], "FormatParser"),
        (["agent.tool_format=of_a_file", with_file], "OfAFile"),
    ):
        config = load_config(Config, overrides=[f"model.path={tiny_model}", *overrides])
        sessions, _ = loaded(config)
        assert type(sessions.find("one")[0].model.parser()).__name__ == expected
    with pytest.raises(ValueError, match="unknown tool format 'harmes'"):
        loaded(load_config(Config, overrides=[f"model.path={tiny_model}", "agent.tool_format=harmes"]))


@pytest.mark.timeout(60)
def test_a_stop_text_ends_a_request_of_the_engine(tiny_model: Path) -> None:
    config = load_config(Config, overrides=[f"model.path={tiny_model}", "data.max_response_tokens=40"])
    sessions, engine = loaded(config)

    def work(address: str, token: str, **options: Any) -> str:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=token, max_retries=0)
        return client.completions.create(model="any", prompt="1 + 2", seed=1, **options).choices[0].text

    async def whole() -> tuple[str, str, float, float]:
        gateway = Gateway(sessions)
        async with gateway.serving() as address:
            free = await asyncio.to_thread(work, address, gateway.token)
            before = (await engine.health())["decoded_tokens"]
            cut = await asyncio.to_thread(work, address, gateway.token, stop=free[3:5])
            return free, cut, before, (await engine.health())["decoded_tokens"] - before

    free, cut, before, decoded = asyncio.run(whole())
    assert len(free) > 20, "else choose another seed"
    assert cut == free[: free.index(free[3:5])]
    assert decoded < before - 5


def test_a_prompt_too_long_for_the_model_is_refused(tiny_model: Path) -> None:
    sessions, _ = loaded(config_of(tiny_model))

    async def whole() -> None:
        gateway = Gateway(sessions)
        async with gateway.serving() as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=gateway.token, max_retries=0)
            with pytest.raises(openai.BadRequestError, match="64 positions") as refused:
                await asyncio.to_thread(client.completions.create, model="any", prompt="a" * 70)
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(whole())


def test_only_so_many_sessions_are_kept(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_SESSIONS", 2)
    sessions, _ = loaded(config_of(tiny_model))
    first, _ = sessions.find("a")
    sessions.find("b")
    assert sessions.find("a")[0] is first
    sessions.find("c")
    assert sessions.find("a")[0] is first
    assert list(sessions._sessions) == ["c", "a"]


def test_a_port_that_is_none_is_refused() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(ValueError, match="--port is 70000"):
        serve.run(parser.parse_args(["model", "--port", "70000"]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_asked_to_end(tiny_model: Path, number: signal.Signals) -> None:
    words = ["serve", str(tiny_model), "--json", "data.max_response_tokens=8", "resources.num_threads=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "strop", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with openai.OpenAI(base_url=said["base_url"], api_key=said["api_key"]) as client:
            made = client.chat.completions.create(model="any", messages=[QUESTION])
        assert made.usage is not None
        assert 1 <= made.usage.completion_tokens <= 8
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
