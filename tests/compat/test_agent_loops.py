"""Agent loops in the form of verl, through the adapter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_cases import ScriptedModel, play, prompt_of, sampling_of, setup_with
from template_family import family_tokenizer

from strop.agents import (
    AgentConfig,
    AgentLoopBase,
    AgentLoopOutput,
    AgentSetup,
    BaseTool,
    agents,
    initialize_tools_from_config,
    register,
    simple_timer,
)
from strop.agents.tools.calculator import CalculatorTool
from strop.protocol.trajectory import Trajectory

TOKENIZER = family_tokenizer("qwen25")
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The registry, as it was before at the end."""
    before = dict(agents)
    yield
    agents.clear()
    agents.update(before)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def run(
    *answers: str, max_tokens: int = 200, max_prompt_tokens: int | None = None, **columns: Any
) -> tuple[tuple[Trajectory, ...], ScriptedModel]:
    """Plays the loop named "own"."""
    model = ScriptedModel([[*ids(text), END] for text in answers])
    prompt = prompt_of(TOKENIZER, agent_name="own", columns=columns, extra_info={"index": 7})
    played = play(
        prompt,
        model,
        setup_with(TOKENIZER, [CalculatorTool()], max_prompt_tokens=max_prompt_tokens),
        sampling=sampling_of(TOKENIZER, max_tokens=max_tokens),
    )
    return played, model


def test_a_loop_of_two_turns_is_trained_on_what_was_sampled() -> None:
    seen: dict[str, Any] = {}

    @register("own")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            seen.update(kwargs, params=sampling_params, tools=self.tools)
            prompt_ids = await self.ct_build_initial_tokens(kwargs["raw_prompt"])
            token_ids, mask = list(prompt_ids), []
            for _ in range(2):
                output = await self.server_manager.generate(
                    "any", prompt_ids=token_ids, sampling_params=sampling_params
                )
                assert output.stop_reason == "completed"
                before = len(token_ids)
                token_ids = await self.ct_merge_assistant_token(token_ids, output.token_ids)
                mask += [1] * (len(token_ids) - before)
                before = len(token_ids)
                token_ids = await self.ct_merge_non_assistant_msg(
                    token_ids, [{"role": "user", "content": "And?"}]
                )
                mask += [0] * (len(token_ids) - before)
            return AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=token_ids[len(prompt_ids) :],
                response_mask=mask,
                num_turns=5,
                reward_score=0.5,
                extra_fields={"mood": "good"},
            )

    (one,), model = run("Yes.", "No.", colour="red")
    trained = [
        (token, log_prob, version)
        for token, log_prob, version, sampled in zip(
            one.response_ids, one.log_probs, one.versions, one.sampled, strict=True
        )
        if sampled
    ]
    assert trained == model.said
    reply = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(one.response_ids) == f"Yes.<|im_end|>{reply}No.<|im_end|>{reply}"
    assert (one.reward_score, one.num_turns, one.extra["mood"], one.extra["tool_rewards"]) == (
        0.5,
        5,
        "good",
        [],
    )
    assert seen["raw_prompt"] == [{"role": "user", "content": "How much is it?"}]
    assert (seen["index"], seen["colour"], seen["extra_info"]) == (7, "red", {"index": 7})
    assert seen["params"]["temperature"] == 1.0
    assert list(seen["tools"]) == ["calculator"]


def make(response: Any) -> None:
    """A loop that answers once and returns what `response(prompt_ids, output)` makes of it."""
    agents.pop("own", None)

    @register("own")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
            output = await self.server_manager.generate(
                "a", prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            return response(prompt_ids, output.token_ids)


def test_reward_extra_info_has_the_parts_of_the_reward() -> None:
    make(
        lambda p, r: AgentLoopOutput(
            prompt_ids=p, response_ids=r, response_mask=[1] * len(r), reward_score=0.5,
            extra_fields={"reward_extra_info": {"acc": 1.0}},
        )
    )  # fmt: skip
    ((one,), _) = run("Y")
    assert one.extra["reward_parts"] == {"acc": 1.0}


@pytest.mark.parametrize("rewards", [(1.0, None), (1.0, 0.0)])
def test_sequences_of_an_episode_have_one_reward(rewards: tuple[float, float | None]) -> None:
    def outputs(p: list[int], r: list[int], rewards: tuple[float | None, ...]) -> list[AgentLoopOutput]:
        return [
            AgentLoopOutput(prompt_ids=p, response_ids=r, response_mask=[1] * len(r), reward_score=reward)
            for reward in rewards
        ]

    make(lambda p, r: outputs(p, r, rewards))
    with pytest.raises(ValueError, match="'own' gave one of its 2 sequences the reward 1.0 and the last one"):
        run("Y")
    for shared in ((None, 1.0), (1.0, 1.0)):
        make(lambda p, r, shared=shared: outputs(p, r, shared))
        assert run("Y")[0][-1].reward_score == 1.0


def test_tokens_that_were_not_sampled_cannot_be_trained() -> None:
    make(lambda p, r: AgentLoopOutput(prompt_ids=p, response_ids=[*r, 5], response_mask=[1] * (len(r) + 1)))
    with pytest.raises(ValueError, match=r"trains response token 2 \(id 5\), but no call"):
        run("Y")
    make(lambda p, r: AgentLoopOutput(prompt_ids=p, response_ids=[5, *r], response_mask=[0, *[1] * len(r)]))
    with pytest.raises(ValueError, match=r"trains response token 1 .* but no call"):
        run("Y")
    make(lambda p, r: AgentLoopOutput(prompt_ids=p, response_ids=r, response_mask=[1]))
    with pytest.raises(ValueError, match="2 response_ids and 1 response_mask"):
        run("Y")


def test_sampled_tokens_may_be_left_out_of_training() -> None:
    make(lambda p, r: AgentLoopOutput(prompt_ids=p, response_ids=r, response_mask=[0, 1]))
    ((one,), model) = run("Y")
    assert one.sampled == (False, True)
    assert one.log_probs == (0.0, model.said[1][1])
    assert one.num_turns == 2


def test_a_loop_may_return_several_sequences_or_none() -> None:
    make(
        lambda p, r: [
            AgentLoopOutput(p, r, [1] * len(r)),
            AgentLoopOutput([*p, r[0]], r[1:], [1] * (len(r) - 1)),
        ]
    )
    sequences, _ = run("Y")
    assert [len(one.response_ids) for one in sequences] == [2, 1]
    make(lambda p, r: None)
    assert run("Y")[0] == ()


def test_a_response_beyond_the_limit_is_cut() -> None:
    make(lambda p, r: AgentLoopOutput(p, [*r, 5, 5, 5], [*[1] * len(r), 0, 0, 0]))
    ((one,), _) = run("Y", max_tokens=4)
    assert (len(one.response_ids), one.stop_reason) == (4, "length")


@pytest.mark.parametrize(
    ("max_tokens", "given", "said", "reason"),
    [(5, [], "", "length"), (6, [], "", "stop"), (9, [5], "", "stop"), (9, [], "aborted", "aborted")],
)
def test_an_answer_that_was_cut_off_is_told_from_one_that_ended(
    max_tokens: int, given: list[int], said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five letters and the end-of-turn token; tokens of a tool may follow."""
    generate = ScriptedModel.generate

    async def generate_with_reason(*args: Any, **kwargs: Any) -> Any:
        output = await generate(*args, **kwargs)
        return dataclasses.replace(output, stop_reason=said or output.stop_reason)

    monkeypatch.setattr(ScriptedModel, "generate", generate_with_reason)
    make(lambda p, r: AgentLoopOutput(p, [*r, *given], [*[1] * len(r), *[0] * len(given)]))
    ((one,), _) = run("Yours", max_tokens=max_tokens)
    assert (len(one.response_ids), one.stop_reason) == (min(max_tokens, 6) + len(given), reason)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"temperature": 0.5}, r"sampling_params.temperature is 0.5, but the run samples with 1.0"),
        ({"top_k": 5}, "sampling_params.top_k is 5"),
        ({"min_p": 0.1}, "sampling_params has 'min_p'"),
    ],
)
def test_a_loop_cannot_sample_in_another_way(params: dict[str, Any], match: str) -> None:
    @register("own")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            await self.server_manager.generate("a", prompt_ids=[1], sampling_params=params)

    with pytest.raises(ValueError, match=match):
        run("Y")


def test_a_loop_can_stop_earlier() -> None:
    @register("own")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
            own = {**sampling_params, "max_tokens": 3, "stop_token_ids": [9]}
            output = await self.server_manager.generate("a", prompt_ids=prompt_ids, sampling_params=own)
            return AgentLoopOutput(prompt_ids, output.token_ids, [1] * len(output.token_ids))

    _, model = run("Yes indeed")
    assert model.requests[0][1].max_tokens == 3
    assert model.requests[0][1].stop_token_ids == (9, END) if END > 9 else (END, 9)


def test_loops_come_from_a_list_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Polite(AgentLoopBase):
        def __init__(self, *args: Any, greeting: str, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.greeting = greeting

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            limit = self.rollout_config.response_length
            assert limit == self.config.actor_rollout_ref.rollout.response_length
            prompt_ids = ids(self.greeting)
            output = await self.server_manager.generate(
                "a", prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            return AgentLoopOutput(prompt_ids, output.token_ids, [1] * len(output.token_ids))

    module = ModuleType("polite_loops")
    module.Polite = Polite  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polite_loops", module)
    file = tmp_path / "loops.yaml"
    file.write_text("- name: own\n  _target_: polite_loops.Polite\n  greeting: Hello\n")
    setup = AgentSetup(AgentConfig(default_agent="own", loops=str(file)), TOKENIZER)
    model = ScriptedModel([[*ids("Hi"), END]])
    prompt = prompt_of(TOKENIZER, agent_name="own")
    (one,) = play(prompt, model, setup, sampling=sampling_of(TOKENIZER))
    assert one.prompt_ids == tuple(ids("Hello")), "a loop may ask in its own words"
    assert model.requests[0][0] == tuple(ids("Hello"))
    file.write_text("- {name: own}")
    with pytest.raises(ValueError, match="entry 1 of .* needs the keys name and _target_"):
        AgentSetup(AgentConfig(default_agent="own", loops=str(file)), TOKENIZER)


def test_a_loop_is_found_beside_the_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "brief_loop.py").write_text(
        "from strop.agents import AgentLoopBase\n\nclass Brief(AgentLoopBase):\n"
        "    async def run(self, sampling_params, **kwargs):\n        raise NotImplementedError\n"
    )
    (tmp_path / "loops.yaml").write_text("- {name: brief, _target_: './brief_loop.py:Brief'}")
    setup = AgentSetup(AgentConfig(default_agent="brief", loops=str(tmp_path / "loops.yaml")), TOKENIZER)
    assert setup.agent_of({}) == "brief"
    (tmp_path / "loops.yaml").write_text("- {name: brief, _target_: './brief_loop.py:Long'}")
    with pytest.raises(ValueError, match="agent.loops: entry 1 of .*has no class 'Long'; it has Brief"):
        AgentSetup(AgentConfig(default_agent="brief", loops=str(tmp_path / "loops.yaml")), TOKENIZER)


def test_what_is_no_agent_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="agent 'x' is .*; register an async function"):
        register("x")(lambda prompt: None)


class CallsTools(AgentLoopBase):
    """A loop of mid-2025: its constructor, its `run`, ids from `generate`, and what it prepares once."""

    num_prepared = 0

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        cls.num_prepared += 1
        turns = config.actor_rollout_ref.rollout.multi_turn
        cls.limit = turns.max_assistant_turns
        cls.system_ids = tokenizer.apply_chat_template([{"role": "system", "content": ""}], tokenize=True)

    def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
        super().__init__(config, server_manager, tokenizer)
        self.prompt_length = config.actor_rollout_ref.rollout.prompt_length
        self.response_length = config.actor_rollout_ref.rollout.response_length

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        seconds: dict[str, float] = {}
        token_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        start, mask = len(token_ids), []
        for turn in range(2):
            with simple_timer("generate_sequences", seconds):
                answer = await self.server_manager.generate(
                    request_id="x", prompt_ids=token_ids, sampling_params=sampling_params
                )
            token_ids += answer
            mask += [1] * len(answer)
            if turn == 0:
                given = self.tokenizer("\nAgain: ", add_special_tokens=False)["input_ids"]
                token_ids += given
                mask += [0] * len(given)
        return AgentLoopOutput(
            prompt_ids=token_ids[:start],
            response_ids=token_ids[start:][: self.response_length],
            response_mask=mask[: self.response_length],
            num_turns=3,
            metrics={**seconds, "tool_calls": float(self.prompt_length)},
        )


def test_a_loop_in_the_form_of_mid_2025_runs_as_it_is() -> None:
    register("own")(CallsTools)
    (one,), model = run("Yes.", "No.", max_prompt_tokens=77)
    assert TOKENIZER.decode(one.response_ids) == "Yes.<|im_end|>\nAgain: No.<|im_end|>"
    assert [token for token, sampled in zip(one.response_ids, one.sampled, strict=True) if sampled] == [
        token for token, _, _ in model.said
    ]
    assert one.prompt_ids == prompt_of(TOKENIZER).token_ids
    assert one.timings["tool_calls"] == 77.0, "what a prompt of the run may have, not what this one has"
    assert CallsTools.num_prepared == 1
    assert isinstance(CallsTools.system_ids, list)


GSM8K_TOOL = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Is it right?
        parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}
"""


def test_a_loop_of_mid_2025_calls_built_in_tools_in_the_form_of_that_time(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(GSM8K_TOOL)
    seen: list[Any] = []

    @register("own")
    class Loop(AgentLoopBase):
        @classmethod
        def init_class(cls, config: Any, tokenizer: Any) -> None:
            tools = initialize_tools_from_config(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)
            cls.tools = {tool.name: tool for tool in tools}

        def __init__(self, config: Any, server_manager: Any, tokenizer: Any) -> None:
            super().__init__(config, server_manager, tokenizer)

        async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> Any:
            prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            answer = await self.server_manager.generate("x", prompt_ids=prompt_ids)
            tool = self.tools["calc_gsm8k_reward"]
            instance = await tool.create(ground_truth="5")
            text, _, _ = await tool.execute(instance, {"answer": "5"})
            seen.extend([instance, text[:200], await tool.calc_reward(instance)])
            await tool.release(instance)
            return AgentLoopOutput(prompt_ids, answer, [1] * len(answer))

    setup = AgentSetup(AgentConfig(default_agent="own", tools=str(tmp_path / "tools.yaml")), TOKENIZER)
    prompt = prompt_of(TOKENIZER, agent_name="own")
    play(prompt, ScriptedModel([[*ids("Yes"), END]]), setup, sampling=sampling_of(TOKENIZER))
    assert isinstance(seen[0], str)
    assert seen[1:] == ["Current parsed answer: '5', reward: 1.0", 1.0]
    (as_it_is,) = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert isinstance(as_it_is, BaseTool), "for loops of today"


def test_loops_of_verl_that_are_built_in_are_named(tmp_path: Path) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text("- {name: own, _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop}")
    with pytest.raises(
        ValueError, match=r"entry 1 of .*ToolAgentLoop', a class of verl .* agent.default_agent=tool_agent"
    ):
        AgentSetup(AgentConfig(default_agent="own", loops=str(file)), TOKENIZER)


@pytest.mark.parametrize(("own", "reason"), [(2, "max_tokens"), (5, "length"), (None, "length")])
def test_an_answer_that_the_loop_limits_is_not_cut_by_the_run(own: int | None, reason: str) -> None:
    agents.pop("own", None)

    @register("own")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
            output = await self.server_manager.generate(
                "a", prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": own}
            )
            ids = output.token_ids
            return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids))

    ((one,), _) = run("One and no end.", max_tokens=5)
    assert one.stop_reason == reason
