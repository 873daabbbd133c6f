"""The client of OpenAI drives the gateway, and what is recorded is what was sampled, token for token."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_cases import TOKENIZER, Open, ScriptedEngine, served
from template_family import BY_NAME, family_tokenizer, tokenizer_of

from strop.agents.openai_server.errors import ApiError
from strop.agents.openai_server.request import read_completion
from strop.protocol.trajectory import Trajectory

pytestmark = pytest.mark.timeout(60)

QUESTION = {"role": "user", "content": "How much is 1 + 2?"}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}


def columns(trajectory: Trajectory) -> list[tuple[int, float, int]]:
    """The sampled tokens of a sequence."""
    rows = zip(
        trajectory.response_ids, trajectory.log_probs, trajectory.versions, trajectory.sampled, strict=True
    )
    return [(token, log_prob, version) for token, log_prob, version, sampled in rows if sampled]


def said(engine: ScriptedEngine) -> list[tuple[int, float, int]]:
    """What the engine sampled, in order."""
    return [
        row
        for output in engine.outputs
        for row in zip(output.token_ids, output.log_probs, output.versions, strict=True)
    ]


def test_a_chat_of_two_turns_is_one_sequence_of_the_very_tokens() -> None:
    engine = ScriptedEngine(TOKENIZER, ["3<|im_end|>", "Still 3<|im_end|>"])

    def work(opened: Open) -> list[str]:
        client = opened.client()
        first = client.chat.completions.create(model="any", messages=[QUESTION])
        messages: list[Any] = [QUESTION, first.choices[0].message, {"role": "user", "content": "Sure?"}]
        second = client.chat.completions.create(model="any", messages=messages)
        assert second.usage is not None
        assert second.usage.completion_tokens == 8
        return [str(one.choices[0].message.content) for one in (first, second)]

    answers, sessions = served(engine, work)
    assert answers == ["3", "Still 3"]
    (trajectory,) = sessions["one"].sequences()
    assert trajectory.prompt_messages == ({"role": "user", "content": "How much is 1 + 2?"},)
    assert columns(trajectory) == said(engine)
    text = TOKENIZER.decode(trajectory.token_ids)
    assert text == (
        "<|user|>How much is 1 + 2?<|im_end|><|assistant|>3<|im_end|><|user|>Sure?<|im_end|><|assistant|>"
        "Still 3<|im_end|>"
    )
    assert trajectory.stop_reason == "stop"
    assert engine.prompts[1] == trajectory.token_ids[: len(engine.prompts[1])]


def test_what_a_later_sequence_answers_is_in_the_record() -> None:
    engine = ScriptedEngine(TOKENIZER, ["<think>well</think>3<|im_end|>", "4<|im_end|>"])

    def work(opened: Open) -> None:
        create: Any = opened.client().chat.completions.create
        for question in ("1 + 2?", "2 + 2?"):
            system = {"role": "system", "content": "Add."}
            create(model="any", messages=[system, {"role": "user", "content": question}])

    _, sessions = served(engine, work)
    last = sessions["one"].sequences()[-1]
    assert [(one["role"], one["content"], one["sequence"], one["tokens"]) for one in last.messages] == [
        ("assistant", "3", 0, [0, len(engine.outputs[0].token_ids)]),
        ("system", "Add.", 1, [0, 0]), ("user", "2 + 2?", 1, [0, 0]), ("assistant", "4", 1, [0, 2]),
    ]  # fmt: skip
    assert last.messages[0]["reasoning"] == "well"
    assert last.num_turns == 4, "two questions and two answers"


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {"deepseek"}))  # which opens the thinking itself
def test_answers_that_come_back_keep_their_tokens_in_every_family(name: str) -> None:
    """The model writes its text character by character, which the tokenizer never does."""
    family, tokenizer = BY_NAME[name], family_tokenizer(name)
    end = tokenizer.convert_tokens_to_ids(family.end)
    letters = tokenizer.convert_tokens_to_ids([*"theĠanswerĠisĠ12"])
    assert len(letters) == 16
    assert len(tokenizer("the answer is 12", add_special_tokens=False)["input_ids"]) < 16
    engine = ScriptedEngine(tokenizer, [[*letters, end]])

    def work(opened: Open) -> None:
        client, messages = opened.client(), [QUESTION]
        for _ in range(2):
            made = client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
            assert made.choices[0].message.content == "the answer is 12"
            messages += [made.choices[0].message.model_dump(exclude_none=True), QUESTION]

    _, sessions = served(engine, work, tokenizer=tokenizer)
    found = sessions["one"].sequences()
    # Such a template writes the first question otherwise by then; gpt_oss ends an answer with another token by then.
    if "user" in family.rewrites_at or name == "gpt_oss":
        assert [columns(one) for one in found] == [said(engine)[:17], said(engine)[17:34]]
        return
    assert [columns(one) for one in found] == [said(engine)]


def test_thinking_that_the_template_forgets_ends_a_sequence() -> None:
    family, tokenizer = BY_NAME["qwen3"], family_tokenizer("qwen3")
    engine = ScriptedEngine(tokenizer, [f"<think>\nHm.\n</think>\n\n3{family.end}"])

    def work(opened: Open) -> list[Any]:
        client, messages, found = opened.client(), [QUESTION], []
        for _ in range(2):
            made = client.chat.completions.create(model="any", messages=messages).choices[0].message  # type: ignore[arg-type]
            found.append((made.content, (made.model_extra or {})["reasoning_content"]))
            messages += [{"role": "assistant", "content": str(made.content).strip()}, QUESTION]
        return found

    told, sessions = served(engine, work, tokenizer=tokenizer)
    assert [(text.strip(), thought.strip()) for text, thought in told] == [("3", "Hm.")] * 2
    first, second = sessions["one"].sequences()
    assert columns(first) + columns(second) == said(engine)
    assert "Hm." not in tokenizer.decode(second.prompt_ids)


def test_a_tool_call_comes_back_in_other_words_and_keeps_its_tokens() -> None:
    family, tokenizer = BY_NAME["qwen25"], family_tokenizer("qwen25")
    written = '<tool_call>\n{"name": "look_up",  "arguments": {"value":   "x"}}\n</tool_call>' + family.end
    engine = ScriptedEngine(tokenizer, [written, f"12{family.end}"])

    def work(opened: Open) -> Any:
        client = opened.client()
        first = client.chat.completions.create(model="any", messages=[QUESTION], tools=[LOOK_UP])  # type: ignore[list-item]
        (call,) = first.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"value": "x"})
        assert first.choices[0].finish_reason == "tool_calls"
        again = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": call.id, "type": "function",
                 "function": {"name": "look_up", "arguments": json.dumps({"value": "x"}, indent=4)}}
            ],
        }  # fmt: skip
        messages: list[Any] = [
            QUESTION,
            again,
            {"role": "tool", "tool_call_id": call.id, "content": "twelve"},
        ]
        return client.chat.completions.create(model="any", messages=messages, tools=[LOOK_UP])  # type: ignore[list-item]

    second, sessions = served(engine, work, tokenizer=tokenizer)
    assert second.choices[0].message.content == "12"
    (trajectory,) = sessions["one"].sequences()
    assert columns(trajectory) == said(engine)
    given = [t for t, sampled in zip(trajectory.response_ids, trajectory.sampled, strict=True) if not sampled]
    assert "<tool_response>\ntwelve\n</tool_response>" in tokenizer.decode(given)
    assert [entry["role"] for entry in trajectory.messages] == ["assistant", "tool", "assistant"]


def with_tools(client: Any, *messages: Any) -> Any:
    return client.chat.completions.create(
        model="any", messages=[QUESTION, *messages], tools=[LOOK_UP]
    ).choices[0]


def test_a_model_whose_template_writes_no_calls_is_given_a_format(caplog: pytest.LogCaptureFixture) -> None:
    written = '<tool_call>{"name": "look_up", "arguments": {"value": "x"}}</tool_call><|im_end|>'
    engine = ScriptedEngine(TOKENIZER, [written, "12<|im_end|>"])

    def work(opened: Open) -> Any:
        client = opened.client()
        first = with_tools(client)
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look_up", '{"value": "x"}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "twelve"}
        return with_tools(client, first.message.model_dump(exclude_none=True), result)

    second, sessions = served(engine, work, tool_format="hermes")
    assert second.message.content == "12"
    (trajectory,) = sessions["one"].sequences()
    assert columns(trajectory) == said(engine)
    given = [t for t, sampled in zip(trajectory.response_ids, trajectory.sampled, strict=True) if not sampled]
    assert "twelve" in TOKENIZER.decode(given)
    assert caplog.text.count("describe the tools in the system message") == 1


def test_a_model_without_a_format_is_refused_with_the_setting_that_gives_one() -> None:
    def work(opened: Open) -> None:
        with pytest.raises(
            openai.BadRequestError, match=r"writes no tool calls, .* set agent\.tool_format to one"
        ):
            with_tools(opened.client())

    served(ScriptedEngine(TOKENIZER, ["12<|im_end|>"]), work)


def test_a_rewritten_context_begins_a_second_sequence() -> None:
    engine = ScriptedEngine(TOKENIZER, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])

    def work(opened: Open) -> None:
        client = opened.client()
        first = client.chat.completions.create(model="any", messages=[QUESTION]).choices[0].message
        turn: list[Any] = [first.model_dump(exclude_none=True), {"role": "user", "content": "Go on"}]
        client.chat.completions.create(model="any", messages=[QUESTION, *turn])
        rules: Any = {"role": "system", "content": "Be short"}
        client.chat.completions.create(model="any", messages=[rules, QUESTION, *turn])

    _, sessions = served(engine, work)
    first, second = sessions["one"].sequences()
    assert [columns(first), columns(second)] == [said(engine)[:8], said(engine)[8:]]
    assert (first.stop_reason, second.stop_reason) == ("continued", "stop")
    assert "Be short" in TOKENIZER.decode(second.prompt_ids)


def test_choices_of_one_call_are_sequences_of_one_prompt() -> None:
    engine = ScriptedEngine(TOKENIZER, ["a<|im_end|>", "b<|im_end|>"])

    def work(opened: Open) -> list[Any]:
        made = opened.client().chat.completions.create(model="any", messages=[QUESTION], n=2, logprobs=True)  # type: ignore[list-item]
        return [(one.index, one.message.content, one.logprobs) for one in made.choices]

    choices, sessions = served(engine, work)
    assert [(index, text) for index, text, _ in choices] == [(0, "a"), (1, "b")]
    found = sessions["one"].sequences()
    assert len({one.prompt_ids for one in found}) == 1
    assert [columns(one) for one in found] == [said(engine)[:2], said(engine)[2:]]
    for (_, _, logprobs), trajectory in zip(choices, found, strict=True):
        assert [one.logprob for one in logprobs.content] == list(trajectory.log_probs)
        assert [one.token for one in logprobs.content][-1] == "<|im_end|>"


def test_a_question_is_in_the_log_once_however_many_choices_it_has() -> None:
    said_in_order = ["a", "b", "c", "d"]
    engine = ScriptedEngine(TOKENIZER, [f"{text}<|im_end|>" for text in said_in_order])

    def work(opened: Open) -> None:
        client = opened.client()
        first = client.chat.completions.create(model="any", messages=[QUESTION], n=2)  # type: ignore[list-item]
        asked = [QUESTION, {"role": "assistant", "content": first.choices[1].message.content}, QUESTION]
        client.chat.completions.create(model="any", messages=asked, n=2)  # type: ignore[arg-type]

    _, sessions = served(engine, work)
    last = sessions["one"].sequences()[-1]
    logged = [(entry["role"], entry["content"]) for entry in last.messages]
    question = ("user", QUESTION["content"])
    assert sorted(logged) == sorted([question, *(("assistant", text) for text in said_in_order)])
    assert last.num_turns == 6, "two questions and four answers"


def test_a_stop_text_ends_the_answer_in_the_engine() -> None:
    engine = ScriptedEngine(TOKENIZER, ["one\nObservation: two and more<|im_end|>"])

    def work(opened: Open) -> Any:
        client = opened.client()
        made = client.chat.completions.create(model="any", messages=[QUESTION], stop=["Observation:"])  # type: ignore[list-item]
        return made.choices[0]

    choice, sessions = served(engine, work)
    assert (choice.message.content, choice.finish_reason) == ("one\n", "stop")
    (trajectory,) = sessions["one"].sequences()
    assert TOKENIZER.decode(trajectory.response_ids) == "one\nObservation:"
    assert len(engine.outputs[0].token_ids) < 24, "the engine was told"


def test_text_comes_as_it_is_sampled_and_no_stop_text_is_shown() -> None:
    engine = ScriptedEngine(TOKENIZER, ["hello STOP there<|im_end|>"])

    def work(opened: Open) -> tuple[list[str], Any]:
        client = opened.client()
        pieces, last = [], None
        stream = client.chat.completions.create(
            model="any", messages=[QUESTION], stop="STOP", stream=True, stream_options={"include_usage": True}  # type: ignore[list-item]
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
            last = chunk
        return pieces, last

    (pieces, last), sessions = served(engine, work)
    assert "".join(pieces) == "hello "
    assert len(pieces) > 3
    assert last.usage.completion_tokens == 10
    assert len(sessions["one"].sequences()) == 1


def test_a_streamed_tool_call_is_read_by_the_client() -> None:
    family, tokenizer = BY_NAME["qwen25"], family_tokenizer("qwen25")
    engine = ScriptedEngine(
        tokenizer, [f"Well.{family.write_calls([('look_up', {'value': 'x'})])}{family.end}"]
    )

    def work(opened: Open) -> Any:
        with opened.client().chat.completions.stream(
            model="any", messages=[QUESTION], tools=[LOOK_UP]  # type: ignore[list-item]
        ) as stream:  # fmt: skip
            stream.until_done()
            return stream.get_final_completion().choices[0]

    choice, _ = served(engine, work, tokenizer=tokenizer)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"value": "x"})
    assert choice.message.content.strip() == "Well."
    assert choice.finish_reason == "tool_calls"


def test_completions_continue_text_and_tokens() -> None:
    engine = ScriptedEngine(TOKENIZER, ["3<|im_end|>", "4<|im_end|>", "5"])

    def work(opened: Open) -> None:
        client = opened.client()
        first = client.completions.create(model="any", prompt="1 + 2 = ", logprobs=0)
        assert first.choices[0].text == "3"
        assert first.choices[0].logprobs is not None
        assert first.choices[0].logprobs.token_logprobs == list(engine.outputs[0].log_probs)
        client.completions.create(model="any", prompt="1 + 2 = 3 and 2 + 2 = ")
        again = client.completions.create(
            model="any", prompt=engine.encode("ab"), max_tokens=1, extra_body={"return_token_ids": True}
        )
        assert again.choices[0].model_dump()["token_ids"] == engine.encode("5")
        assert again.choices[0].finish_reason == "length"

    _, sessions = served(engine, work)
    text, ids = sessions["one"].sequences()
    assert columns(text) == said(engine)[:4]
    assert TOKENIZER.decode(text.token_ids) == "1 + 2 = 3<|im_end|> and 2 + 2 = 4<|im_end|>"
    assert ids.prompt_ids == tuple(engine.encode("ab"))


def test_several_prompts_are_continued_each_for_itself() -> None:
    engine = ScriptedEngine(TOKENIZER, [f"{number}<|im_end|>" for number in (3, 4, 5, 6, 7, 8, 9)])
    asked: list[Any] = ["1 + 2 = ", "2 + 2 = ", "a b"]

    def work(opened: Open) -> tuple[Any, list[Any]]:
        client = opened.client()
        made = client.completions.create(
            model="any", prompt=asked, n=2, extra_body={"return_token_ids": True}
        )
        options = {"include_usage": True}
        stream = client.completions.create(
            model="any",
            prompt=[engine.encode("ab")],
            stream=True,
            stream_options=options,  # type: ignore[arg-type]
        )
        return made, list(stream)

    (made, events), sessions = served(engine, work)
    assert [(one.index, one.text) for one in made.choices] == list(enumerate("345678"))
    assert [one.model_dump()["prompt_token_ids"] for one in made.choices] == [
        engine.encode(asked[number // 2]) for number in range(6)
    ]
    num_prompt = sum(len(engine.encode(one)) for one in asked)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (num_prompt, 12)
    assert "".join(one.text for event in events for one in event.choices) == "9"
    assert events[-1].usage.prompt_tokens == len(engine.encode("ab"))
    found = sessions["one"].sequences()
    assert [row for one in found for row in columns(one)] == said(engine)
    assert len(found) == 7


def test_a_stream_of_several_prompts_names_the_choice_of_each_piece() -> None:
    engine = ScriptedEngine(TOKENIZER, ["12<|im_end|>", "34<|im_end|>"])

    def work(opened: Open) -> list[Any]:
        stream = opened.client().completions.create(model="any", prompt=["a", "b"], stream=True)
        return [one for event in stream for one in event.choices]

    pieces, _ = served(engine, work)
    for index, text in enumerate(("12", "34")):
        own = [one for one in pieces if one.index == index]
        assert "".join(one.text for one in own) == text
        assert [one.finish_reason for one in own if one.finish_reason] == ["stop"]


@pytest.mark.parametrize("prompt", [[], "", ["a", ""], ["a", [1, "b"]], ["a", {"b": 1}], [[-1]], [[]]])
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    engine = ScriptedEngine(TOKENIZER, [])

    def work(opened: Open) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as refused:
            opened.client().completions.create(model="any", prompt=prompt)
        return refused.value

    error, _ = served(engine, work)
    assert error.param == "prompt"


def test_more_answers_than_a_call_may_have_are_refused() -> None:
    with pytest.raises(ApiError, match="n: is 9 for 128 prompts; use at most 1024 answers"):
        read_completion({"prompt": ["a"] * 128, "n": 9})
    assert len(read_completion({"prompt": ["a"] * 128, "n": 8}).prompts) == 128


def test_what_servers_of_vllm_take_is_served_where_it_changes_nothing() -> None:
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True}
    assert read_completion({"prompt": "a", "top_k": -1, **neutral}).options.top_k == 0
    assert read_completion({"prompt": "a", "top_k": 5}).options.top_k == 5
    for name, value in (("min_p", 0.1), ("repetition_penalty", 1.1), ("ignore_eos", True), ("top_k", -2)):
        with pytest.raises(ApiError, match=f"^{name}(:| is not supported)"):
            read_completion({"prompt": "a", name: value})


def test_responses_take_function_tools_and_name_the_one_before() -> None:
    family, tokenizer = BY_NAME["qwen25"], family_tokenizer("qwen25")
    called = family.write_calls([("look_up", {"value": "x"})]) + family.end
    engine = ScriptedEngine(tokenizer, [called, f"12{family.end}", f"13{family.end}"])
    tool: Any = {"type": "function", **LOOK_UP["function"]}  # type: ignore[dict-item]

    def work(opened: Open) -> Any:
        client = opened.client()
        options: dict[str, Any] = {"model": "any", "tools": [tool], "instructions": "Use the tool."}
        first = client.responses.create(input="How much?", **options)
        (call,) = first.output
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "twelve"}
        second = client.responses.create(input=[result], previous_response_id=first.id, **options)  # type: ignore[list-item]
        question = {"role": "user", "content": "And one more?"}
        both: list[Any] = [*second.output, question]
        with client.responses.stream(input=both, previous_response_id=first.id, **options) as stream:  # type: ignore[arg-type]
            kinds = [event.type for event in stream]
            third = stream.get_final_response()
        return second.output_text, third.output_text, kinds

    (second, third, kinds), sessions = served(engine, work, tokenizer=tokenizer)
    assert (second, third) == ("12", "13")
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    found = sessions["one"].sequences()
    assert [row for one in found for row in columns(one)] == said(engine)
    assert columns(found[0]) == said(engine)[: len(columns(found[0]))]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [LOOK_UP], "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(TOKENIZER, ["3<|im_end|>"])

    def work(opened: Open) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as refused:
            opened.client().chat.completions.create(**{"model": "any", "messages": [QUESTION], **changes})
        return refused.value

    error, _ = served(engine, work)
    assert error.param == param
    assert param in error.message
    assert error.type == "invalid_request_error"
    assert not engine.prompts


def test_options_reach_the_engine_and_neutral_ones_pass() -> None:
    engine = ScriptedEngine(TOKENIZER, ["3<|im_end|>"])

    def work(opened: Open) -> None:
        client = opened.client()
        for _ in range(2):
            client.chat.completions.create(
                model="any", messages=[QUESTION], temperature=0.5, top_p=0.9, seed=7, max_completion_tokens=9,  # type: ignore[list-item]
                frequency_penalty=0, user="somebody", response_format={"type": "text"},
            )  # fmt: skip

    served(engine, work)
    first, second = engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens) == (0.5, 0.9, 9)
    assert first.key == second.key, "a seed fixes the random stream"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_thinking_between_special_tokens_is_told_apart(name: str, streams: bool) -> None:
    """One template begins answers with the special token itself."""
    family = BY_NAME[name]
    control = (*family.control, "<think>", "</think>")
    tokenizer = tokenizer_of(family.template, control=control, end=family.end)
    opening = "" if name == "deepseek" else "<think>\n"
    engine = ScriptedEngine(tokenizer, [f"{opening}Hm.\n</think>\n\n3{family.end}"])

    def work(opened: Open) -> tuple[str, str]:
        create: Any = opened.client().chat.completions.create
        made = create(model="any", messages=[QUESTION], stream=streams)
        if not streams:
            message = made.choices[0].message
            return message.content, message.model_extra["reasoning_content"]
        deltas = [event.choices[0].delta for event in made]
        thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        return "".join(delta.content or "" for delta in deltas), "".join(thoughts)

    (content, thought), _ = served(engine, work, tokenizer=tokenizer)
    assert (content.strip(), thought.strip()) == ("3", "Hm.")
