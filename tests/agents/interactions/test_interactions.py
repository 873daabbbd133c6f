"""Users that answer the model: loading, episodes, scores, failures."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_cases import ScriptedModel, play, sampling_of

from strop.agents.config import AgentConfig
from strop.agents.interactions import BaseInteraction, load_interactions
from strop.agents.interactions.gsm8k import NO_NUMBER, RIGHT, WRONG, Gsm8kInteraction
from strop.agents.interactions.loading import interaction_of_row
from strop.agents.setup import AgentSetup
from strop.data.tiny_model import make_tiny_tokenizer
from strop.protocol.trajectory import Prompt

TOKENIZER = make_tiny_tokenizer()
GSM8K = "strop.agents.interactions.gsm8k.Gsm8kInteraction"
USERS = """
import asyncio
from strop.agents.interactions import BaseInteraction

class Curious(BaseInteraction):
    log = []

    async def start_interaction(self, instance_id=None, **kwargs):
        self.log.append(("start", instance_id, kwargs))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.log.append(("says", [m["role"] for m in messages], kwargs))
        said = messages[-1]["content"]
        if said == "hang":
            await asyncio.sleep(60)
        if said == "break":
            raise RuntimeError("no mood")
        if said == "odd":
            return "what"
        if said == "exit":
            raise SystemExit(3)
        if said == "cancel":
            raise asyncio.CancelledError("mine")
        if said == "much":
            return False, "go on", 10**400, {}
        return said == "bye", "go on", 0.5, {"seen": len(messages)}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.log.append(("end", instance_id, kwargs))
"""


@pytest.fixture
def users(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "users_for_strop.py").write_text(USERS, encoding="utf-8")
    sys.path.insert(0, str(tmp_path))
    yield written(
        tmp_path, {"class_name": "users_for_strop.Curious"}, {"name": "teacher", "class_name": GSM8K}
    )
    sys.path.remove(str(tmp_path))
    del sys.modules["users_for_strop"]


def written(folder: Path, *entries: Mapping[str, Any]) -> str:
    path = folder / "interactions.yaml"
    path.write_text(yaml.safe_dump({"interaction": list(entries)}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("class_name", ["./curious_file.py:Curious", "curious_file.Curious"])
def test_a_class_is_found_beside_the_yaml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_name: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "curious_file.py").write_text(USERS, encoding="utf-8")
    made = load_interactions(written(tmp_path, {"class_name": class_name}))
    sys.modules.pop("curious_file", None)
    assert {name: type(one).__name__ for name, one in made.items()} == {"curious": "Curious"}


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def answer(text: str) -> list[int]:
    return ids(text + "<|im_end|>")


def asked(**kwargs: Any) -> Prompt:
    return Prompt(
        uid="e0-000001", row=1, token_ids=tuple(ids("<|user|>2+1<|im_end|><|assistant|>")),
        messages=({"role": "user", "content": "2+1"},), data_source="", ground_truth="3",
        agent_name="interaction_agent", extra_info={"interaction_kwargs": kwargs},
    )  # fmt: skip


def episode(path: str, model: ScriptedModel, prompt: Prompt, **settings: Any) -> Any:
    setup = AgentSetup(
        AgentConfig(default_agent="interaction_agent", interactions=path, **settings), TOKENIZER
    )
    (played,) = play(prompt, model, setup, sampling=sampling_of(TOKENIZER))
    return played


def test_the_teacher_asks_again_until_the_answer_is_right(users: str) -> None:
    model = ScriptedModel([answer("4?"), answer("dunno"), answer("It is #### 3")])
    played = episode(users, model, asked(name="teacher", ground_truth="3"))
    expected = (
        answer("4?") + ids(f"<|user|>{WRONG}<|im_end|><|assistant|>")
        + answer("dunno") + ids(f"<|user|>{NO_NUMBER}<|im_end|><|assistant|>") + answer("It is #### 3")
    )  # fmt: skip
    assert list(played.response_ids) == expected
    sampled = [token for token, chosen in zip(played.response_ids, played.sampled, strict=True) if chosen]
    assert sampled == [token for token, _, _ in model.said]
    assert played.extra["turn_scores"] == [0.0, 0.0, 1.0]
    assert (played.stop_reason, played.reward_score, played.num_turns) == ("stop", None, 6)


def test_an_interaction_is_started_answers_and_is_finalized(users: str) -> None:
    played = episode(users, ScriptedModel([answer("hi"), answer("bye")]), asked(name="curious", mood="good"))
    log = sys.modules["users_for_strop"].Curious.log
    mood = {"mood": "good"}
    assert log == [
        ("start", "e0-000001/0", mood), ("says", ["user", "assistant"], mood),
        ("says", ["user", "assistant", "user", "assistant"], mood), ("end", "e0-000001/0", mood),
    ]  # fmt: skip
    assert played.extra["turn_scores"] == [0.5, 0.5]


def test_methods_that_are_not_async_run_in_threads(tmp_path: Path) -> None:
    (tmp_path / "plain_users.py").write_text(
        USERS.replace("async def", "def").replace("await ", ""), encoding="utf-8"
    )
    path = written(tmp_path, {"class_name": "./plain_users.py:Curious"})
    played = episode(path, ScriptedModel([answer("hi"), answer("bye")]), asked(name="curious"))
    assert (played.extra["turn_scores"], played.stop_reason) == ([0.5, 0.5], "stop")


def test_limits_end_a_conversation(users: str) -> None:
    talk = ScriptedModel([answer("hi")])
    assert (
        episode(users, talk, asked(name="curious"), max_assistant_turns=3).stop_reason
        == "max_assistant_turns"
    )
    played = episode(users, ScriptedModel([answer("hi")]), asked(name="curious"), max_user_turns=1)
    assert (played.stop_reason, played.num_turns) == ("max_user_turns", 4)


@pytest.mark.parametrize(
    ("limits", "num_calls"), [({"max_assistant_turns": 2}, 1), ({"max_user_turns": 2}, 2)]
)
def test_calls_at_a_limit_are_not_carried_out(
    users: str, tmp_path: Path, limits: dict[str, int], num_calls: int
) -> None:
    name = f"called_{num_calls}_times"
    (tmp_path / "lookup.py").write_text(
        f'from strop.agents import function_tool\n\n@function_tool("{name}")\ndef look_up() -> str:\n'
        '    """Look up."""\n    return "3", 0.5\n'
    )
    call = answer(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    played = episode(
        users, ScriptedModel([call]), asked(name="curious"), function_tools=str(tmp_path / "lookup.py"),
        tool_format="hermes", **limits,
    )  # fmt: skip
    assert played.stop_reason == next(iter(limits))
    assert played.extra["tool_rewards"] == [0.5] * num_calls


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("break", "generate_response: RuntimeError: no mood"),
        ("hang", "generate_response took longer than 0.2 s"),
        ("odd", "generate_response returned 'what'"),
        ("exit", "generate_response: RuntimeError: SystemExit: 3"),
        ("cancel", "generate_response: RuntimeError: CancelledError: mine"),
        ("much", "it must be a number up to 1e15"),
    ],
)
def test_an_answer_on_which_the_interaction_fails_is_worth_0_and_counts(
    users: str, said: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedModel([answer("hi"), answer(said)])
    played = episode(users, model, asked(name="curious"), tool_timeout_s=0.2)
    assert (played.stop_reason, played.numbers["interaction_failed"]) == ("interaction_failed", 1.0)
    assert played.extra["turn_scores"] == [0.5, 0.0]
    assert sentence in caplog.text
    assert sys.modules["users_for_strop"].Curious.log[-1][0] == "end"


def test_rows_that_name_no_interaction_are_refused(users: str) -> None:
    setup = AgentSetup(AgentConfig(default_agent="interaction_agent", interactions=users), TOKENIZER)
    with pytest.raises(
        ValueError, match="train row 3 names the interaction 'nobody'.*the run has curious, teacher"
    ):
        setup.row_with_agent_and_tools(
            {"extra_info": {"interaction_kwargs": {"name": "nobody"}}}, "train row 3"
        )
    with pytest.raises(ValueError, match="names no interaction"):
        setup.row_with_agent_and_tools({"extra_info": {}}, "train row 3")
    with pytest.raises(ValueError, match="there are no interactions"):
        AgentConfig(default_agent="interaction_agent")


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"name": "x"}, "entry 1 of .* has no class_name"),
        ({"class_name": GSM8K, "colour": 1}, "unknown key 'colour'"),
        ({"class_name": "no.such.Class"}, "cannot be imported"),
        ({"class_name": "pathlib.Path"}, "has no method start_interaction"),
    ],
)
def test_mistakes_in_the_file_are_one_sentence(
    tmp_path: Path, entry: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_interactions(written(tmp_path, entry))


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("3", True), ("so 1 + 2 = 3.", True), ("$3.00", True), ("3...", True),
        ("#### 3 apples, not 4", True), ("#### 3", True),
        ("4", False), ("3" + "." * 400, False),
    ],
)  # fmt: skip
def test_the_teacher_reads_the_last_number(said: str, is_right: bool) -> None:
    async def run() -> Any:
        teacher = Gsm8kInteraction({"name": "teacher"})
        instance = await teacher.start_interaction(ground_truth="3")
        result = await teacher.generate_response(instance, [{"role": "assistant", "content": said}])
        assert await teacher.calculate_score(instance) == float(is_right)
        await teacher.finalize_interaction(instance)
        assert not teacher._truths, "nothing is kept of an episode that is over"
        assert not teacher._scores
        return result

    is_over, says, reward, _ = asyncio.run(run())
    assert (is_over, reward) == (is_right, float(is_right))
    assert (says == RIGHT) == is_right


def test_two_interactions_of_one_name_are_refused(tmp_path: Path) -> None:
    entry = {"name": "teacher", "class_name": GSM8K}
    with pytest.raises(ValueError, match="entry 2 of .* has the name 'teacher' of another one"):
        load_interactions(written(tmp_path, entry, entry))


def test_arguments_of_a_row_are_those_that_it_has() -> None:
    one: dict[str, BaseInteraction] = {"teacher": Gsm8kInteraction({"name": "teacher"})}
    row = {"interaction_kwargs": {"ground_truth": "3", "of_other_rows": None}}
    assert interaction_of_row(row, one, "row 1") == ("teacher", {"ground_truth": "3"})


def test_the_base_class_ends_at_once() -> None:
    async def run() -> Any:
        user = BaseInteraction({"name": "silent"})
        return await user.generate_response(await user.start_interaction(), [])

    assert asyncio.run(run()) == (True, "", 0.0, {})
