"""A real agent framework, unmodified, drives the gateway: OpenAI's Agents SDK, over both of its APIs."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_cases import Open, ScriptedEngine, served
from template_family import BY_NAME, family_tokenizer

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_agents_sdk_plays_one_trajectory_of_the_tokens_that_were_sampled(api: str, streams: bool) -> None:
    # Here: two seconds of each process that collects tests.
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    family, tokenizer = BY_NAME["qwen25"], family_tokenizer("qwen25")
    called = family.write_calls([("look_up", {"value": "x"})]) + family.end
    engine = ScriptedEngine(tokenizer, ["Let me see.\n" + called, called, f"It is 12.{family.end}"])
    agents.set_tracing_disabled(True)
    looked_up: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def look_up(value: str) -> str:
        """Look a word up."""
        looked_up.append(value)
        return "twelve"

    def work(opened: Open) -> str:
        import asyncio

        async def whole() -> str:
            from openai import AsyncOpenAI

            client = AsyncOpenAI(
                base_url=f"{opened.address}/v1", api_key=f"{opened.token}:sdk", max_retries=0
            )
            model = getattr(agents, api)(model="any", openai_client=client)
            agent: Any = agents.Agent(
                name="helper", instructions="Use the tool.", tools=[look_up], model=model
            )
            if not streams:
                return str((await agents.Runner.run(agent, "How much?")).final_output)
            running = agents.Runner.run_streamed(agent, "How much?")
            async for _ in running.stream_events():
                pass
            return str(running.final_output)

        return asyncio.run(whole())

    said, sessions = served(engine, work, tokenizer=tokenizer)
    assert said == "It is 12."
    assert looked_up == ["x", "x"]
    (trajectory,) = sessions["sdk"].sequences()
    rows = zip(
        trajectory.response_ids, trajectory.log_probs, trajectory.versions, trajectory.sampled, strict=True
    )
    sampled = [
        row for one in engine.outputs for row in zip(one.token_ids, one.log_probs, one.versions, strict=True)
    ]
    assert [(token, log_prob, version) for token, log_prob, version, ours in rows if ours] == sampled
    assert len(engine.outputs) == 3
