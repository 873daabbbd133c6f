"""The life of tools in an episode: created once, released whatever happens, never a crash."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from template_family import family_tokenizer

from strop.agents.tools import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolLimits,
    ToolResponse,
    ToolSession,
    threads,
)
from strop.agents.tools.formats import FunctionCall, MalformedCall
from strop.agents.tools.functions import FunctionTool
from strop.agents.tools.session import truncated

FAILED = "Error executing tool 'witness': "


def schema(name: str) -> OpenAIFunctionToolSchema:
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": name}})


class Witness(BaseTool):
    """Writes down what is done with it."""

    def __init__(self, name: str = "witness") -> None:
        super().__init__({}, schema(name))
        self.seen: list[tuple[Any, ...]] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.seen.append(("create", kwargs["create_kwargs"]))
        await asyncio.sleep(0)
        return "i1", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        agent_data = kwargs.pop("agent_data")
        self.seen.append(("execute", instance_id, parameters, kwargs, agent_data.request_id))
        match parameters.get("do"):
            case "raise":
                raise ZeroDivisionError("by zero")
            case "hang":
                await asyncio.sleep(3600)
            case "nan":
                return ToolResponse(text="x"), float("nan"), {}
            case "wrong":
                return 3  # type: ignore[return-value]
        return ToolResponse(text=f"did {parameters}"), 0.25, {"n": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.seen.append(("calc_reward", instance_id, kwargs))
        return 2.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(("release", instance_id, kwargs))


def session(*tools: BaseTool, kwargs: dict[str, Any] | None = None, **limits: Any) -> ToolSession:
    settings = {"max_parallel_calls": 4, "max_response_tokens": 100, "truncation": "middle", "timeout_s": 5.0}
    return ToolSession(
        {tool.name: tool for tool in tools},
        tools_kwargs=kwargs or {},
        tokenizer=family_tokenizer("qwen25"),
        limits=ToolLimits(**settings | limits),  # type: ignore[arg-type]
        facts={"request_id": "e0/1"},
    )


def test_a_tool_is_created_once_and_its_arguments_are_those_of_the_row() -> None:
    tool = Witness()
    kwargs = {
        "witness": {
            "create_kwargs": {"truth": 3}, "execute_kwargs": {"limit": 1}, "calc_reward_kwargs": {"scale": 2},
            "release_kwargs": {"fast": True},
        }
    }  # fmt: skip

    async def episode() -> dict[str, float]:
        async with session(tool, kwargs=kwargs) as tools:
            assert tool.seen == [("create", {"truth": 3})]
            await tools.call_all([FunctionCall("witness", '{"a": 1}'), FunctionCall("witness", '{"a": 2}')])
            await tools.call("witness", {"a": 3})
            assert [result.reward for result in tools.results] == [0.25] * 3
            return await tools.calc_rewards()

    assert asyncio.run(episode()) == {"witness": 2.0}
    assert [entry[0] for entry in tool.seen] == ["create", *["execute"] * 3, "calc_reward", "release"]
    assert tool.seen[1] == ("execute", "i1", {"a": 1}, {"limit": 1}, "e0/1")
    assert tool.seen[-2:] == [("calc_reward", "i1", {"scale": 2}), ("release", "i1", {"fast": True})]


def test_a_tool_of_mid_2025_is_created_with_the_rows_arguments_by_name() -> None:
    class Old(Witness):
        async def create(self, instance_id: str, ground_truth: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
            self.seen.append(("create", ground_truth))
            self.given = instance_id
            return instance_id

    class Strict(Witness):
        async def create(self, instance_id: str | None = None, truth: int = 0) -> str:  # type: ignore[override]
            self.seen.append(("create", truth))
            return "i2"

    async def created(tool: BaseTool, **create_kwargs: Any) -> None:
        async with session(tool, kwargs={"witness": {"create_kwargs": create_kwargs}}) as tools:
            await tools.call("witness", "{}")

    old, strict = Old(), Strict()
    asyncio.run(created(old, ground_truth="72"))
    assert old.seen[0] == ("create", "72")
    assert old.seen[1][1] == old.given
    asyncio.run(created(strict, truth=3))
    assert strict.seen[0] == ("create", 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'truht'"):
        asyncio.run(created(strict, truht=3))


def test_a_tool_that_is_not_called_is_not_created() -> None:
    used, unused = Witness("used"), Witness("unused")

    async def episode() -> None:
        async with session(used, unused) as tools:
            await tools.call("used", "{}")

    asyncio.run(episode())
    assert unused.seen == []
    assert [entry[0] for entry in used.seen] == ["create", "execute", "release"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (FunctionCall("nobody", "{}"), "unknown_tool", "Unknown tool 'nobody'. Available tools: witness"),
        (FunctionCall("witness", "{"), "bad_arguments", "Invalid JSON in arguments for 'witness': "),
        (FunctionCall("witness", "[1]"), "bad_arguments", "Invalid JSON in arguments for 'witness': they must be"),
        (FunctionCall("witness", '{"do": "raise"}'), "failed", f"{FAILED}ZeroDivisionError: by zero"),
        (FunctionCall("witness", '{"do": "nan"}'), "failed", f"{FAILED}ValueError: execute returned"),
        (FunctionCall("witness", '{"do": "wrong"}'), "failed", f"{FAILED}TypeError: execute returned 3"),
        (FunctionCall("witness", '{"do": "hang"}'), "timeout", f"{FAILED}no answer within 0.05 s"),
        (MalformedCall("<tool_call>{", "It is not closed."), "malformed", "It is not closed."),
    ],
)  # fmt: skip
def test_what_goes_wrong_becomes_a_sentence_for_the_model(
    call: FunctionCall | MalformedCall, error: str, text: str
) -> None:
    tool = Witness()

    async def episode() -> Any:
        async with session(tool, timeout_s=0.05) as tools:
            (result,) = await tools.call_all([call])
            return result

    result = asyncio.run(episode())
    assert (result.error, result.reward) == (error, 0.0)
    assert result.text.startswith(text)
    if tool.seen:
        assert tool.seen[-1][0] == "release"


def test_calls_over_the_limit_are_answered_too() -> None:
    async def episode() -> list[Any]:
        async with session(Witness(), max_parallel_calls=1) as tools:
            return await tools.call_all([FunctionCall("witness", "{}"), FunctionCall("witness", "{}")])

    done, refused = asyncio.run(episode())
    assert (done.error, refused.error) == ("", "too_many")
    assert "at most 1 tool call per turn is allowed" in refused.text


@pytest.mark.parametrize("how", ["cancel", "error", "timeout"])
def test_tools_are_released_when_the_episode_ends_badly(how: str) -> None:
    tool = Witness()

    async def episode() -> None:
        async with session(tool) as tools:
            await tools.call("witness", "{}")
            if how == "error":
                raise RuntimeError("the agent has a mistake")
            await tools.call("witness", '{"do": "hang"}')

    async def main() -> None:
        task = asyncio.create_task(episode())
        if how == "timeout":
            async with asyncio.timeout(0.05):
                await task
        await asyncio.sleep(0.02)
        task.cancel()
        await task

    with pytest.raises((asyncio.CancelledError, RuntimeError, TimeoutError)):
        asyncio.run(main())
    assert tool.seen[-1][0] == "release"
    assert [entry[0] for entry in tool.seen].count("release") == 1


def test_a_tool_that_cannot_be_created_is_told_and_the_others_are_released() -> None:
    class Broken(Witness):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            raise OSError("no place")

    good, broken = Witness("good"), Broken("broken")

    async def at_once() -> None:
        async with session(
            good, broken, kwargs={"good": {"create_kwargs": {"a": 1}}, "broken": {"create_kwargs": {}}}
        ):
            pytest.fail("it was not created")

    with pytest.raises(OSError, match="no place"):
        asyncio.run(at_once())
    assert good.seen[-1][0] == "release"

    async def later() -> str:
        async with session(broken) as tools:
            return (await tools.call("broken", "{}")).text

    assert asyncio.run(later()) == "Error executing tool 'broken': OSError: no place"


def test_a_reward_that_fails_is_left_out() -> None:
    class Unpaid(Witness):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            raise ValueError("no")

    async def episode() -> dict[str, float]:
        async with session(Unpaid("unpaid"), Witness("paid")) as tools:
            await tools.call("unpaid", "{}")
            await tools.call("paid", "{}")
            return await tools.calc_rewards()

    assert asyncio.run(episode()) == {"paid": 2.0}


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ("left", "(truncated)...43210"),
        ("right", "98765...(truncated)"),
        ("middle", "987...(truncated)...10"),
    ],
)
def test_long_results_are_cut_in_tokens(truncation: Any, expected: str) -> None:
    tokenizer = family_tokenizer("qwen25")
    ids = tokenizer("9876543210")["input_ids"]
    assert len(ids) == 10, "one token per digit"
    assert truncated(ids, 5, truncation, tokenizer) == expected


def test_a_long_result_is_shown_cut_and_a_short_one_whole() -> None:
    class Long(Witness):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text="7" * parameters["n"]), 0.0, {}

    async def episode() -> list[str]:
        async with session(Long(), max_response_tokens=8, truncation="right") as tools:
            return [(await tools.call("witness", {"n": n})).text for n in (8, 9)]

    assert asyncio.run(episode()) == ["7" * 8, "7" * 8 + "...(truncated)"]


def test_a_function_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_stuck", set())
    monkeypatch.setattr(threads, "MAX_STUCK", 1)
    go_on = threading.Event()

    def hang() -> str:
        go_on.wait(60)
        return "late"

    async def episode() -> list[str]:
        tool = FunctionTool(hang, schema("hang"))
        async with session(tool, timeout_s=0.05) as tools:
            return [(await tools.call("hang", "{}")).text for _ in range(2)]

    start = time.monotonic()
    first, second = asyncio.run(episode())
    assert time.monotonic() - start < 30
    go_on.set()
    assert "no answer within 0.05 s" in first
    assert "1 earlier calls still run after their deadline" in second


class Plain(BaseTool):
    """A tool whose methods are not async; one gives something to await."""

    def __init__(self) -> None:
        super().__init__({}, schema("plain"))
        self.threads: list[tuple[str, bool]] = []

    def note(self, method: str) -> None:
        self.threads.append((method, threading.current_thread() is threading.main_thread()))

    def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.note("create")
        return "i1", ToolResponse()

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.note("execute")
        if parameters:
            time.sleep(3600)
        return ToolResponse(text=instance_id), 0.25, {}

    def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        async def later() -> float:
            return 0.5

        return later()

    def release(self, instance_id: str, **kwargs: Any) -> Any:
        self.note("release")


def test_methods_that_are_not_async_run_in_threads() -> None:
    tool = Plain()

    async def episode() -> tuple[Any, ...]:
        async with session(tool, timeout_s=0.2) as tools:
            first, late = await tools.call("plain", "{}"), await tools.call("plain", '{"a": 1}')
            return first.text, first.reward, late.error, await tools.calc_rewards()

    assert asyncio.run(episode()) == ("i1", 0.25, "timeout", {"plain": 0.5})
    assert tool.threads == [(name, False) for name in ("create", "execute", "execute", "release")]


@pytest.mark.parametrize("how", ["returns", "raises", "awaits", "cancels"])
def test_a_method_that_holds_every_episode_up_is_named_once(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "_named", set())
    monkeypatch.setattr(threads, "HELD_UP_S", 0.2)

    class Blocks(Witness):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            try:
                await asyncio.sleep(3600 if how == "cancels" else 0)
            except asyncio.CancelledError:
                time.sleep(0.25)
                raise
            if how == "awaits":
                return ToolResponse(text=str(await asyncio.to_thread(time.sleep, 0.3))), 0.0, {}
            time.sleep(0.25)
            if how == "raises":
                raise ZeroDivisionError("by zero")
            return ToolResponse(text="done"), 0.0, {}

    async def episode() -> list[str]:
        async with session(Blocks(), timeout_s=0.1 if how == "cancels" else 5.0) as tools:
            return [(await tools.call("witness", "{}")).text for _ in range(2)]

    texts = {
        "returns": "done", "raises": f"{FAILED}ZeroDivisionError: by zero", "awaits": "None",
        "cancels": f"{FAILED}no answer within 0.1 s",
    }  # fmt: skip
    assert asyncio.run(episode()) == [texts[how]] * 2
    warnings = [one.message for one in caplog.records if "without an await" in one.message]
    assert len(warnings) == (how != "awaits")
    assert all(one.startswith("tool witness took 0.") for one in warnings)


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_a_function_cannot_end_the_run(error: BaseException) -> None:
    def leave() -> str:
        raise error

    async def episode() -> str:
        async with session(FunctionTool(leave, schema("leave"))) as tools:
            return (await tools.call("leave", "{}")).text

    assert asyncio.run(episode()).startswith("Error executing tool 'leave': ")
