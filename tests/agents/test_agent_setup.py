"""What a run names is loaded and checked before anything is played."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from agent_cases import ScriptedModel, play, prompt_of, sampling_of, setup_with, tool_plugin
from template_family import family_tokenizer

from strop.agents import AgentConfig, AgentSetup, agents
from strop.agents.envs.config import EnvironmentConfig
from strop.agents.tools import FUNCTION_TOOL_REGISTRY, BaseTool, ToolResponse
from strop.agents.tools.calculator import CalculatorTool
from strop.agents.tools.gsm8k import Gsm8kTool
from strop.agents.tools.plugin import tools_kwargs_of
from strop.utils import registry

TOKENIZER = family_tokenizer("qwen25")
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """The registries, as they were before at the end."""
    before: Any = dict(agents), dict(FUNCTION_TOOL_REGISTRY)
    yield
    for names, names_before in zip((agents, FUNCTION_TOOL_REGISTRY), before, strict=True):
        names.clear()
        names.update(names_before)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"default_agent": "tool_agent"}, "agent.default_agent is tool_agent, but there are no tools"),
        (
            {"max_parallel_calls": 2},
            "agent.max_parallel_calls is 2, but the run has no tools, so nothing has a use for it: name some",
        ),
        ({"max_user_turns": 2}, "agent.max_user_turns is 2, but single_turn_agent, .* has no use for it"),
        (
            {"environment": EnvironmentConfig(name="gymnasium"), "max_tool_response_tokens": 9},
            "agent.max_tool_response_tokens is 9, but the run has no tools",
        ),
        (
            {
                "default_agent": "interaction_agent",
                "interactions": "i.yaml",
                "tool_response_truncation": "left",
            },
            "agent.tool_response_truncation is left, but the run has no tools",
        ),
        (
            {"max_assistant_turns": 0, "tools": "t.yaml"},
            "agent.max_assistant_turns is 0, but it needs a whole number of at least 1",
        ),
        (
            {"max_user_turns": 0, "tools": "t.yaml"},
            "agent.max_user_turns is 0, but it needs a whole number of at least 1",
        ),
        (
            {"tool_timeout_s": 0.0, "tools": "t.yaml"},
            "agent.tool_timeout_s is 0.0, but it needs a finite number above 0",
        ),
        ({"timeout_s": float("inf")}, "agent.timeout_s is inf"),
        ({"tool_response_truncation": "end", "tools": "t.yaml"}, "but it needs one of left, right, middle"),
    ],
)
def test_settings_that_cannot_apply_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AgentConfig(**settings)


@pytest.mark.parametrize("agent", ["single_turn_agent", "env_agent"])
def test_a_tool_format_is_for_tools_and_the_gateway(agent: str) -> None:
    plugin = AgentSetup(AgentConfig(default_agent=agent, tool_format="hermes"), TOKENIZER).plugins["tools"]
    with pytest.raises(ValueError, match="agent.tool_format is hermes, but the run has no tools, so nothing"):
        plugin.check_agents({agent}, "train")
    plugin.check_agents({agent, "openai_agent"}, "train")
    plugin.check_agents({agent}, "val")


@pytest.mark.parametrize("source", [{"tools": "t.yaml"}, {"files": ("mine.py",)}, {"loops": "l.yaml"}])
def test_settings_of_tools_stay_where_rows_may_choose_an_agent_with_tools(source: dict[str, Any]) -> None:
    settings = {"tool_format": "hermes", "max_parallel_calls": 2, "max_tool_response_tokens": 9}
    made = AgentConfig(
        default_agent="env_agent", environment=EnvironmentConfig(name="gymnasium"), **settings, **source
    )
    assert made.max_parallel_calls == 2


def test_files_register_agents_and_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from strop.agents import function_tool, register\n\n"
        '@register("mine")\n'
        "async def mine(prompt, trajectory, generate, context):\n"
        "    assert sorted(context.tools) == ['add']\n"
        "    output = await generate(prompt.token_ids)\n"
        "    return trajectory.with_sampled(output.token_ids, output.log_probs, output.versions).finish('mine')\n\n"
        "@function_tool\n"
        "def add(a: int, b: int) -> int:\n"
        '    """Add.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n'
        "    return a + b\n"
    )
    setup = AgentSetup(AgentConfig(default_agent="mine", files=(str(file),)), TOKENIZER)
    (one,) = play(
        prompt_of(TOKENIZER, agent_name="mine"),
        ScriptedModel([[5, END]]),
        setup,
        sampling=sampling_of(TOKENIZER),
    )
    assert (one.response_ids, one.stop_reason) == ((5, END), "mine")
    AgentSetup(
        AgentConfig(default_agent="mine", files=(str(file),)), TOKENIZER
    )  # a second time changes nothing
    with pytest.raises(
        ValueError,
        match="agent.default_agent is 'yours', but no agent has that name; known: .*env_agent, .*mine",
    ):
        AgentSetup(AgentConfig(default_agent="yours", files=(str(file),)), TOKENIZER)
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match=r"agent.files: .*broken.py cannot be imported: ModuleNotFoundError"):
        AgentSetup(AgentConfig(files=(str(file),)), TOKENIZER)
    file.write_text("from openrlhf.utils.agent import AgentInstanceBase")
    with pytest.raises(
        ValueError, match=r"'openrlhf'; .* comes from strop.agents here \(docs/moving-in.md\)"
    ):
        AgentSetup(AgentConfig(files=(str(file),)), TOKENIZER)


def test_an_agent_of_a_package_is_imported_when_its_name_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("far", "no_such_agents", "strop.agents")
    monkeypatch.setattr(
        registry, "packaged", lambda group: {"far": (entry,)} if group == "strop.agents" else {}
    )
    with pytest.raises(
        ValueError,
        match=r"agent 'far' comes from the installed package no_such_agents .* ModuleNotFoundError",
    ):
        AgentSetup(AgentConfig(default_agent="far"), TOKENIZER)
    with pytest.raises(ValueError, match="agent 'far' comes from the installed package no_such_agents"):
        setup(default_agent="tool_agent").with_agent_and_tools([row(agent_name="far")], "train")


def setup(**settings: Any) -> AgentSetup:
    return setup_with(TOKENIZER, [CalculatorTool(), Gsm8kTool()], **settings)


def row(**columns: Any) -> dict[str, Any]:
    return {"prompt": "x", "extra_info": {}, **columns}


def test_rows_show_the_tools_that_they_may_use() -> None:
    chosen = {"tool_selection": ["calculator"]}
    rows = [row(), row(extra_info=chosen), row(agent_name="single_turn_agent")]
    shown = setup(default_agent="tool_agent").with_agent_and_tools(rows, "train")
    assert [one["agent_name"] for one in shown] == ["tool_agent", "tool_agent", "single_turn_agent"]
    names = [[tool["function"]["name"] for tool in one.get("tools", ())] for one in shown]
    assert names == [["calculator", "calc_gsm8k_reward"], ["calculator"], []]
    assert rows[0] == row(), "the rows stay as they are"


def test_arguments_of_a_row_for_its_tools_are_those_that_it_has() -> None:
    # As a table has them, in which another row has the rest.
    row = {
        "witness": {
            "create_kwargs": {"truth": 0, "mode": None, "facts": {"a": None}},
            "execute_kwargs": None,
        },
        "other": None,
    }
    expected = {"witness": {"create_kwargs": {"truth": 0, "facts": {"a": None}}}}
    assert tools_kwargs_of({"extra_info": {"tools_kwargs": row}}) == expected
    assert tools_kwargs_of({"tools_kwargs": row}) == expected
    assert tools_kwargs_of({"extra_info": None}) == {}


def test_rows_of_single_turns_are_left_as_they_are() -> None:
    rows = [row()]
    assert AgentSetup(AgentConfig(), None).with_agent_and_tools(rows, "train") is rows


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"agent_name": "nobody"}, "train row 1 has agent_name 'nobody', but no agent has that name; known: "),
        ({"extra_info": {"tool_selection": ["saw"]}}, "train row 1 names the tool 'saw', but the run has no such tool"),
        ({"extra_info": {"tools_kwargs": {"saw": {}}}}, "names the tool 'saw'"),
        ({"extra_info": {"tools_kwargs": {"calculator": {"kwargs": 1}}}}, "of 'calculator' have the key 'kwargs'"),
        (
            {"extra_info": {"tools_kwargs": {"calculator": {"execute_kwargs": {"agent_data": 1}}}}},
            "execute_kwargs of 'calculator' have 'agent_data', which strop itself gives a tool",
        ),
        ({"extra_info": {"need_tools_kwargs": True}}, "has need_tools_kwargs, but no tools_kwargs"),
        ({"tools": [{"type": "function"}]}, "has a column 'tools' with schemas"),
    ],
)  # fmt: skip
def test_rows_that_name_what_there_is_not_are_refused(columns: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        setup(default_agent="tool_agent").with_agent_and_tools([row(), row(**columns)], "train")


def test_tools_that_only_environments_could_use_are_refused_for_training_rows() -> None:
    made = setup(default_agent="env_agent", environment=EnvironmentConfig(name="gymnasium"))
    with pytest.raises(ValueError, match="every train row is played by env_agent, which uses none"):
        made.with_agent_and_tools([row(), row()], "train")
    both = made.with_agent_and_tools([row(), row(agent_name="tool_agent")], "train")
    assert [len(one.get("tools", ())) for one in both] == [0, 2]
    assert len(made.with_agent_and_tools([row()], "val")) == 1, "validation may leave the tools alone"


def test_tools_that_no_row_uses_are_refused() -> None:
    with pytest.raises(
        ValueError, match="the run has tools .*, but every train row is played by single_turn_agent"
    ):
        setup().with_agent_and_tools([row()], "train")
    with pytest.raises(ValueError, match="train row 0 is for tool_agent, but the run has no tools"):
        AgentSetup(AgentConfig(), None).with_agent_and_tools([row(agent_name="tool_agent")], "train")


def test_a_template_that_writes_no_calls_needs_a_format_by_name() -> None:
    tokenizer = family_tokenizer("gemma")
    with pytest.raises(
        ValueError, match="the chat template writes no tool calls, .* set agent.tool_format to one of"
    ):
        setup_with(tokenizer, [CalculatorTool()])
    assert tool_plugin(setup_with(tokenizer, [CalculatorTool()], tool_format="hermes")).parser


# ---------------------------------------------------------------------- the limits of an episode


def call(expression: str, name: str = "calculator") -> list[int]:
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
    return [*TOKENIZER(text)["input_ids"], END]


def answer(text: str) -> list[int]:
    return [*TOKENIZER(text)["input_ids"], END]


def episode(
    *answers: Any, max_tokens: int = 1000, extra_info: Any = None, tools: Any = None, **settings: Any
) -> Any:
    model = ScriptedModel(answers)
    made = setup_with(TOKENIZER, tools or [CalculatorTool(), Gsm8kTool()], **settings)
    prompt = prompt_of(TOKENIZER, extra_info=extra_info or {})
    (one,) = play(prompt, model, made, sampling=sampling_of(TOKENIZER, max_tokens=max_tokens))
    return one, model


def test_an_episode_with_tools_by_hand() -> None:
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}}
    check = TOKENIZER('<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "3"}}</tool_call>')[
        "input_ids"
    ]
    one, _ = episode(call("1+2"), [*check, END], answer("It is 3."), extra_info={"tools_kwargs": kwargs})
    assert (one.stop_reason, one.num_turns) == ("stop", 6)
    assert one.extra["tool_rewards"] == [0.0, 0.0]
    assert one.extra["rollout_reward_scores"] == {"calc_gsm8k_reward": 1.0, "calculator": 0.0}
    assert one.numbers["tool_call_counts"] == 2
    roles = [(message["role"], message.get("name"), message["content"]) for message in one.messages]
    assert roles == [
        ("assistant", None, ""),
        ("tool", "calculator", "3"),
        ("assistant", None, ""),
        ("tool", "calc_gsm8k_reward", "Current parsed answer: '3', reward: 1.0"),
        ("assistant", None, "It is 3."),
    ]
    assert one.messages[0]["tool_calls"] == [{"name": "calculator", "arguments": '{"expression": "1+2"}'}]
    for message in one.messages:
        start, stop = message["tokens"]
        assert set(one.sampled[start:stop]) == {message["role"] == "assistant"}
    assert [message["tokens"][1] for message in one.messages][-1] == len(one.response_ids)


@pytest.mark.parametrize(
    ("limits", "reason", "num_answers"),
    [
        ({"max_assistant_turns": 2}, "max_assistant_turns", 2),
        ({"max_user_turns": 2}, "max_user_turns", 3),
        ({"max_assistant_turns": 3, "max_user_turns": 1}, "max_user_turns", 2),
    ],
)
def test_turns_are_limited(limits: dict[str, int], reason: str, num_answers: int) -> None:
    one, model = episode(call("1+2"), **limits)
    assert one.stop_reason == reason
    assert len(model.requests) == num_answers
    assert all(one.sampled[-len(call("1+2")) :]), "it ends with an answer"


def test_a_result_that_leaves_no_room_is_not_appended() -> None:
    length = len(call("1+2"))
    one, model = episode(call("1+2"), answer("3"), max_tokens=length + 5)
    assert (one.stop_reason, len(one.response_ids), len(model.requests)) == ("length", length, 1)
    left_out = one.messages[-1]
    assert (left_out["role"], left_out["content"], left_out["tokens"]) == ("tool", "3", [length, length])
    assert left_out["left_out"] == "no room for it and another answer"
    (whole, model) = episode(call("1+2"), answer("3"))
    given = whole.sampled.count(False)
    one, model = episode(call("1+2"), answer("3"), max_tokens=length + given + 1)
    assert (one.stop_reason, len(one.response_ids)) == ("length", length + given + 1), (
        "one more token has room"
    )
    assert [sampling.max_tokens for _, sampling in model.requests] == [length + given + 1, 1]


def test_an_answer_cut_by_the_budget_calls_nothing() -> None:
    one, model = episode(call("1+2"), max_tokens=len(call("1+2")) - 1)
    assert (one.stop_reason, len(model.requests), one.numbers["tool_call_counts"]) == ("length", 1, 0)


def test_an_episode_that_takes_too_long_ends_with_what_it_has() -> None:
    import asyncio

    class Slow(BaseTool):
        released = 0

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            await asyncio.sleep(3600)
            return ToolResponse(text="late"), 0.0, {}

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            await asyncio.sleep(0.2)
            return 0.5

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            await asyncio.sleep(0.2)
            Slow.released += 1

    tool = Slow({}, CalculatorTool().tool_schema)
    one, _ = episode(call("1+2"), tools=[tool], timeout_s=0.2)
    assert (one.stop_reason, one.response_ids) == ("timeout", tuple(call("1+2")))
    assert one.extra["rollout_reward_scores"] == {"calculator": 0.5}, "its end has time of its own"
    assert Slow.released == 1


def test_calls_over_the_limit_and_malformed_ones_are_answered() -> None:
    two = [*call("1+2")[:-1], *TOKENIZER("\n")["input_ids"], *call("3+4")]
    one, _ = episode(two, answer("3"), max_parallel_calls=1)
    assert [message["content"] for message in one.messages if message["role"] == "tool"] == [
        "3",
        "Tool call not executed: at most 1 tool call per turn is allowed. Send it again in a later turn.",
    ]
    one, _ = episode(answer("<tool_call>{</tool_call>"), answer("3"))
    assert one.messages[0]["tool_calls"][0]["malformed"] == "{"
    assert one.messages[1]["content"].startswith("Invalid JSON in tool call: ")
    assert one.numbers["tool_errors"] == 1


def test_calls_are_counted_by_the_name_of_the_tool() -> None:
    one, _ = episode(call("1+2"), call('1", "x": "2'), call("1+2", name="made_up"), answer("3"))
    assert one.numbers["tool_call_counts"] == 3
    assert one.numbers["tool_errors"] == 2
    counted = {name: value for name, value in one.numbers.items() if name.startswith("tools/")}
    shown = [message["content"] for message in one.messages if message.get("name") == "calculator"]
    assert 0 < counted.pop("tools/calculator/seconds") < 10
    assert counted == {
        "tools/calculator/calls": 2.0,
        "tools/calculator/errors": 1.0,
        "tools/calculator/result_tokens": sum(len(TOKENIZER(text)["input_ids"]) for text in shown),
    }
