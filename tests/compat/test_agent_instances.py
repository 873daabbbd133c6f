"""Agents of OpenRLHF: what is shown, what is trained, what the episode is worth, and what is said of wrong answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agent_cases import ScriptedModel, play, prompt_of, sampling_of, setup_with
from template_family import family_tokenizer

from strop.agents import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, openrlhf_agents
from strop.agents.tools import threads
from strop.protocol.trajectory import Trajectory

TOKENIZER = family_tokenizer("qwen25")
END = TOKENIZER.eos_token_id
AGAIN = "\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def none_defined() -> Iterator[None]:
    before = list(openrlhf_agents._EXECUTORS)
    openrlhf_agents._EXECUTORS.clear()
    yield
    openrlhf_agents._EXECUTORS[:] = before


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def run(
    *answers: str, max_tokens: int = 200, max_prompt_tokens: int = 100
) -> tuple[Trajectory, ScriptedModel]:
    model = ScriptedModel([[*ids(text), END] for text in answers])
    (played,) = play(
        prompt_of(TOKENIZER, agent_name="openrlhf_agent"),
        model,
        setup_with(TOKENIZER, [], max_prompt_tokens=max_prompt_tokens),
        sampling=sampling_of(TOKENIZER, max_tokens=max_tokens),
    )
    return played, model


def define(**methods: Any) -> None:
    """An AgentInstance with these methods, given to an executor."""
    made = type("AgentInstance", (AgentInstanceBase,), methods)

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self) -> None:
            super().__init__(made)


def answering(**result: Any) -> Any:
    """A step that ends the episode so."""

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"rewards": 1.0, "environment_feedback": "", "done": True, **result}

    return step


def test_an_episode_of_two_steps() -> None:
    seen: list[dict[str, Any]] = []

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        seen.append(dict(states))
        return {
            "rewards": torch.tensor([0.25 * len(seen)]),
            "scores": torch.tensor(0.5),
            "environment_feedback": AGAIN if len(seen) == 1 else "never shown",
            "done": len(seen) == 2,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"steps": torch.tensor([len(seen)])},
        }

    define(step=step)
    played, model = run("Yes.", "No.")
    asked = TOKENIZER.decode(played.prompt_ids)
    assert TOKENIZER.decode(played.response_ids) == f"Yes.<|im_end|>{AGAIN}No.<|im_end|>"
    trained = [
        (token, log_prob, version)
        for token, log_prob, version, sampled in zip(
            played.response_ids, played.log_probs, played.versions, played.sampled, strict=True
        )
        if sampled
    ]
    assert trained == model.said
    assert played.reward_score == 0.75
    assert played.extra["reward_parts"] == {"scores": 0.5, "steps": 2.0}
    assert (played.num_turns, played.stop_reason) == (4, "stop")
    assert seen[0]["observation_text"] == asked
    assert asked.endswith("<|im_start|>assistant\n")
    assert seen[1]["observation_text"] == f"{asked}Yes.<|im_end|>{AGAIN}"
    assert [one["action_text"] for one in seen] == ["Yes.<|im_end|>", "No.<|im_end|>"]
    assert {one["label"] for one in seen} == {"3"}
    assert seen[0]["sampling_params"].temperature == 1.0


def test_a_constructor_may_be_a_coroutine() -> None:
    # OpenRLHF's own example has one, which Ray calls.
    async def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.worth = 0.5

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"rewards": self.worth, "environment_feedback": "", "done": True}

    define(__init__=begin, step=step)
    assert run("Yes.")[0].reward_score == 0.5


def test_reset_may_show_another_text_and_steps_may_limit_the_next_answer() -> None:
    async def reset(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.steps = 0
        return {"observation": states["observation"] + states["label"]}

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.steps += 1
        states["sampling_params"].max_tokens = 2
        result = {"rewards": self.steps, "environment_feedback": AGAIN, "done": self.steps == 2}
        return {**result, "sampling_params": states["sampling_params"]}

    define(reset=reset, step=step)
    played, model = run("One.", "Two and three.")
    assert TOKENIZER.decode(played.prompt_ids).endswith("<|im_start|>assistant\n3")
    assert [sampling.max_tokens for _, sampling in model.requests][1] == 2
    assert (played.reward_score, played.stop_reason) == (3.0, "max_tokens")


def test_an_episode_ends_with_the_budget_of_the_response() -> None:
    define(step=answering(done=False, environment_feedback=AGAIN))
    played, _ = run("One.", max_tokens=20)
    assert len(played.response_ids) == 20
    assert played.stop_reason == "length"
    assert played.reward_score is not None
    define(step=answering())
    assert run("One and no end.", max_tokens=3)[0].stop_reason == "length"


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_feedback_that_leaves_no_room_ends_the_episode_at_the_limit(more: int) -> None:
    define(step=answering(environment_feedback=AGAIN, done=False))
    played, model = run("Yes.", "No.", max_tokens=len(ids("Yes.")) + 1 + len(ids(AGAIN)) + more)
    assert (played.stop_reason, len(model.requests)) == ("length", 2 if more == 1 else 1)


@pytest.mark.parametrize("max_tokens", [30, 43, 44, 60])
def test_no_step_is_taken_without_an_answer_where_reset_shows_more(max_tokens: int) -> None:
    shown = "three and a lot more words"
    steps: list[str] = []

    async def reset(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"] + shown}

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        steps.append(states["action_text"])
        return {"rewards": 1.0, "environment_feedback": AGAIN, "done": False}

    define(reset=reset, step=step)
    played, model = run("One.", max_tokens=max_tokens)
    assert all(steps)
    assert played.reward_score == len(steps) == len(model.requests)
    assert len(played.response_ids) == max_tokens - len(ids(shown))
    assert played.stop_reason == "length"


def test_a_reset_that_leaves_no_room_for_an_answer_is_named() -> None:
    async def reset(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"] + "three and a lot more words"}

    define(reset=reset, step=answering())
    with pytest.raises(
        ValueError, match="reset makes prompt .* tokens longer, but data.max_response_tokens is 3"
    ):
        run("One.", max_tokens=3)


def test_executors_of_mid_2025_are_made_with_their_arguments() -> None:
    class Instance(AgentInstanceBase):
        step = answering(rewards=2)

    class AgentExecutor(AgentExecutorBase):
        def __init__(
            self, max_steps: int, max_length: int, llm_engine: Any, hf_tokenizer: Any, result_queue: Any
        ) -> None:
            super().__init__(Instance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    assert run("Yes.")[0].reward_score == 2.0


def test_an_executor_that_plays_itself_is_refused() -> None:
    with pytest.raises(
        TypeError, match="AgentExecutor has an `execute` of its own, which strop does not call"
    ):

        class AgentExecutor(MultiTurnAgentExecutor):
            async def execute(self, *args: Any) -> None: ...


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"rewards": torch.tensor([1.0, 2.0])}, "as rewards; it must be one finite number"),
        ({"rewards": float("nan")}, "step gave nan as rewards"),
        ({"extra_logs": {"text": "no"}}, r"as extra_logs\['text'\]; it must be one finite number"),
        ({"environment_feedback": None}, "a dictionary with a text under 'environment_feedback'"),
    ],
)
def test_wrong_answers_of_a_step_are_named(result: dict[str, Any], sentence: str) -> None:
    define(step=answering(**result))
    with pytest.raises(ValueError, match=sentence):
        run("Yes.")


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match="none does: name the file in agent.files"):
        run("Yes.")
    define(step=answering())
    with pytest.raises(
        ValueError, match="reset gave an observation of [0-9]+ tokens, but data.max_prompt_tokens is 4"
    ):
        run("Yes.", max_prompt_tokens=4)


def test_methods_that_are_not_async_run_in_threads() -> None:
    are_main: list[bool] = []

    def note() -> None:
        are_main.append(threading.current_thread() is threading.main_thread())

    def reset(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        note()
        return states

    def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        note()
        return {"rewards": 0.5, "environment_feedback": "", "done": True}

    define(reset=reset, step=step)
    assert run("Yes.")[0].reward_score == 0.5
    assert are_main == [False, False]


def test_a_step_that_holds_every_episode_up_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "_named", set())
    monkeypatch.setattr(threads, "HELD_UP_S", 0.05)

    async def step(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        time.sleep(0.1)
        return {"rewards": 0.5, "environment_feedback": "", "done": True}

    define(step=step)
    run("Yes.")
    assert [one.message.split(" took ")[0] for one in caplog.records] == ["openrlhf_agent: step"]
