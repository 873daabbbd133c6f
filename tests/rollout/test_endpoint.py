"""A server somewhere as what answers: real HTTP servers on loopback, kind and hostile ones, and `strop serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from agent_cases import play, prompt_of, sampling_of, setup_with
from hostile_http import Line, hostile
from judge_cases import Handler, completion, serve

from strop.agents.tools.functions import FunctionTool
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.agents.tools.templates import ChatTemplate
from strop.engines.config import ModelConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import check_engine
from strop.rollout.openai.byte_tokenizer import Speech, make_speech_tokenizer
from strop.rollout.openai.client import Endpoint, EndpointFailed
from strop.rollout.openai.config import OpenAIConfig
from strop.rollout.types import Sampling, TokenOutput

pytestmark = pytest.mark.timeout(60)
TOKENIZER = make_speech_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
INTEGER = {"type": "integer", "description": "A number."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]},
    },
}


def prompt(*texts: str, tools: Any = None) -> tuple[int, ...]:
    return TEMPLATE.prompt_ids([{"role": "user", "content": text} for text in texts], tools)


def asked(
    url: str,
    prompts: Any,
    *,
    tokenizer: Any = TOKENIZER,
    sampling: Sampling | None = None,
    timeout_s: float = 20.0,
    **settings: Any,
) -> tuple[list[TokenOutput | BaseException], Endpoint]:
    """What a server answers to several prompts, or why it did not."""
    config = OpenAIConfig(base_url=f"{url}/v1", model="m", **({"backoff_s": 0.01} | settings))
    endpoint = Endpoint(config, tokenizer, timeout_s=timeout_s, max_tokens=50)
    chosen = sampling or sampling_of(tokenizer)

    async def whole() -> list[TokenOutput | BaseException]:
        endpoint.start()
        try:
            calls = (endpoint.generate(f"r{n}", one, chosen) for n, one in enumerate(prompts))
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await endpoint.close()

    return asyncio.run(whole()), endpoint


def text_of(output: TokenOutput | BaseException) -> str:
    assert isinstance(output, TokenOutput), output
    return str(TOKENIZER.decode(list(output.token_ids), skip_special_tokens=True))


# ------------------------------------------------------------------ conversations as bytes


def test_a_conversation_becomes_messages_again_whatever_its_texts_are() -> None:
    texts = [
        "né 🙂\n\n",
        "<|strop_message|>user\nx<|strop_end|>",
        " <tool_call>\n{}\n</tool_call>",
        "\ufeff\t",
        "",
    ]
    messages = [{"role": "system", "content": "Be brief.\n"}] + [
        {"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(texts)
    ]
    ids = TEMPLATE.prompt_ids([TEMPLATE.as_plain_message(one) for one in messages], None)
    read = Speech(TOKENIZER).read(ids).messages
    plain = [{**one, "content": TEMPLATE.as_plain_text(one["content"])} for one in messages]
    assert read == plain
    assert [one["content"] for one in read][2] == "< |strop_message|>user\nx< |strop_end|>"


def test_calls_that_no_agent_carried_out_are_answered_and_replies_without_a_call_are_a_users() -> None:
    speech = Speech(TOKENIZER)
    said = speech.write("Look", [("add", '{"a": 1}'), ("add", "{}")], is_whole=True)
    later = [
        {"role": "tool", "content": "1"},
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "late"},
    ]
    header = list(prompt("x"))[-len("assistant\n") - 1 :]
    before = list(TEMPLATE.prompt_ids([{"role": "user", "content": "p"}], [TOOL]))
    rest = TEMPLATE.encode(TEMPLATE.render(later, None, opens_answer=False))
    messages = speech.read([*before, *said, *rest, *header]).messages
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool", "user", "user"]
    first, second = messages[1]["tool_calls"]
    assert (messages[2]["tool_call_id"], messages[2]["content"]) == (first["id"], "1")
    assert (messages[3]["tool_call_id"], messages[3]["content"]) == (
        second["id"],
        "This call was not carried out.",
    )
    assert messages[5]["content"] == "late"


def test_an_answer_that_was_begun_cannot_be_continued() -> None:
    begun = (*prompt("q"), *TOKENIZER("It is")["input_ids"])
    with pytest.raises(ValueError, match="continue an answer that was begun"):
        Speech(TOKENIZER).read(begun)


# ------------------------------------------------------------------ a kind server


def test_the_request_and_the_answer() -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        handler.send(completion("né <|strop_end|>", prompt_tokens=7, completion_tokens=3))

    chosen = Sampling(key=5 << 33, temperature=0.7, top_p=0.9, top_k=4, max_tokens=2000)
    extra = {"max_tokens": None, "max_completion_tokens": 9}
    with serve(play) as service:
        (output,), endpoint = asked(service.url, [prompt("q")], sampling=chosen, extra_body=extra)
    assert service.requests == [
        {
            "model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": 0.7, "top_p": 0.9, "top_k": 4,
            "seed": 5, "max_completion_tokens": 9,
        }
    ]  # fmt: skip
    assert isinstance(output, TokenOutput)
    assert text_of(output) == "né < |strop_end|>"
    assert (output.token_ids[-1], output.stop_reason) == (TOKENIZER.eos_token_id, "stop")
    assert dict(endpoint.usage) == {"requests": 1, "retries": 0, "input_tokens": 7, "output_tokens": 3}


def test_an_answer_that_was_cut_has_no_end_and_one_too_long_is_cut() -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        data = completion("abcdef")
        data["choices"][0]["finish_reason"] = "length" if body["messages"][0]["content"] == "cut" else "stop"
        handler.send(data)

    with serve(play) as service:
        (cut,), _ = asked(service.url, [prompt("cut")])
        (long,), _ = asked(service.url, [prompt("long")], sampling=Sampling(key=0, max_tokens=4))
    assert isinstance(cut, TokenOutput)
    assert isinstance(long, TokenOutput)
    assert (text_of(cut), cut.stop_reason, len(cut.token_ids)) == ("abcdef", "length", 6)
    assert (text_of(long), long.stop_reason) == ("abcd", "length")
    assert service.requests[1]["max_tokens"] == 4


def test_the_key_is_sent_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "s3cret-of-the-endpoint")
    with serve(lambda handler, body, number: handler.send(completion("a"))) as service:
        asked(service.url, [prompt("q")], api_key_env="ENDPOINT_KEY")
    assert service.headers[0]["Authorization"] == "Bearer s3cret-of-the-endpoint"
    with pytest.raises(ValueError, match=r"rollout\.openai\.api_key_env names 'NO_SUCH_KEY'"):
        asked(service.url, [prompt("q")], api_key_env="NO_SUCH_KEY")


def test_token_ids_and_log_probs_of_a_server_are_used_and_text_where_there_are_none() -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        choice: dict[str, Any] = {"text": "ab", "finish_reason": "stop"}
        if body["prompt"] == [5, 6]:
            choice |= {"token_ids": [8, 9], "logprobs": {"token_logprobs": [-0.5, -0.25]}}
        handler.send({"choices": [choice]})

    with serve(play) as service:
        outputs, _ = asked(service.url, [[5, 6], [7]], api="completions")
    exact, encoded = outputs
    assert isinstance(exact, TokenOutput)
    assert (exact.token_ids, exact.log_probs) == ((8, 9), (-0.5, -0.25))
    assert isinstance(encoded, TokenOutput)
    assert encoded.token_ids == (*TOKENIZER("ab")["input_ids"], TOKENIZER.eos_token_id)
    assert service.requests[0]["return_token_ids"] is True


def test_an_agent_with_tools_plays_through_chat_messages() -> None:
    def add(a: int, b: int) -> str:
        return str(a + b)

    def call(arguments: str) -> dict[str, Any]:
        return {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}

    def answer(handler: Handler, body: dict[str, Any], number: int) -> None:
        data = completion("It is 3.") if number == 1 else completion("")
        if number == 0:
            data["choices"][0]["message"] = {
                "role": "assistant", "content": None, "tool_calls": [call('{"a": 1, "b": 2}'), call("{bad")],
            }  # fmt: skip
        handler.send(data)

    tool = FunctionTool(add, OpenAIFunctionToolSchema.model_validate(TOOL))
    schema = tool.tool_schema.model_dump()
    with serve(answer) as service:
        config = OpenAIConfig(base_url=f"{service.url}/v1", model="m")
        endpoint = Endpoint(config, TOKENIZER, timeout_s=20, max_tokens=50)
        endpoint.start()
        try:
            asking = prompt_of(TOKENIZER, tools=[schema])
            played = play(asking, endpoint, setup_with(TOKENIZER, [tool]), sampling=sampling_of(TOKENIZER))
        finally:
            asyncio.run(endpoint.close())
    (trajectory,) = played
    first, second = service.requests
    assert first["tools"] == [schema]
    assert [one["role"] for one in second["messages"]] == ["user", "assistant", "tool", "tool"]
    said, good, bad = second["messages"][1:]
    assert [one["function"]["arguments"] for one in said["tool_calls"]] == ['{"a": 1, "b": 2}', "{bad"]
    assert [one["id"] for one in said["tool_calls"]] == [good["tool_call_id"], bad["tool_call_id"]]
    assert good["content"] == "3"
    assert "{bad" not in good["content"]
    assert trajectory.stop_reason == "stop"
    assert trajectory.messages[-1]["content"] == "It is 3."


# ------------------------------------------------------------------ servers that fail


def test_rate_limits_and_errors_are_repeated_and_counted() -> None:
    answers = [(429, {"Retry_After": "0"}), (500, {}), (200, {})]

    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        status, headers = answers[number]
        handler.send(completion("a") if status == 200 else {"error": "busy"}, status, **headers)

    with serve(play) as service:
        (output,), endpoint = asked(service.url, [prompt("q")])
    assert text_of(output) == "a"
    assert (endpoint.usage["requests"], endpoint.usage["retries"]) == (3, 2)


def test_a_refusal_of_one_prompt_fails_that_prompt_alone() -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        is_long = body["messages"][0]["content"] == "long"
        handler.send(
            {"error": {"message": "too long"}} if is_long else completion("a"), 400 if is_long else 200
        )

    with serve(play) as service:
        outputs, _ = asked(service.url, [prompt("long"), prompt("q")], max_concurrent=1)
    assert isinstance(outputs[0], ValueError)
    assert "too long" in str(outputs[0])
    assert text_of(outputs[1]) == "a"


def test_a_server_that_never_answered_is_not_asked_for_every_prompt() -> None:
    with serve(lambda handler, body, number: handler.send({"error": "no key"}, 401)) as service:
        outputs, _ = asked(service.url, [prompt("q")] * 40, max_concurrent=2)
    assert all(isinstance(one, EndpointFailed) and "HTTP status 401" in str(one) for one in outputs)
    assert len(service.requests) <= 4


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ATTACKS: dict[str, tuple[Callable[[Line], None], str]] = {
    "silence": (lambda line: line.drip(HEAD * 100), r"did not answer in 0\.4 s \(rollout\.timeout_s\)"),
    "a slow body": (
        lambda line: (line.send(HEAD + b"Content-Length: 999\r\n\r\n"), line.drip(b" " * 999))[0],
        "0.4 s",
    ),
    "a closed line": (lambda line: None, "could not be asked"),
    "half a body": (lambda line: line.send(HEAD + b'Content-Length: 99\r\n\r\n{"cho'), "could not be asked"),
    "garbage": (lambda line: line.send(b"\x00\xff\r\n\r\n"), "could not be asked"),
    "no JSON": (lambda line: line.send(HEAD + b"Content-Length: 5\r\n\r\n<htm>"), "sent no JSON"),
    "a huge body": (
        lambda line: (line.send(HEAD + b"Content-Length: 99999999\r\n\r\n"), line.endless(b" " * 65536))[0],
        "more than 16 MiB",
    ),
}


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_a_hostile_server_costs_a_bounded_time_and_is_named(attack: str) -> None:
    answer, expected = ATTACKS[attack]
    started = time.monotonic()
    with hostile(answer) as (url, requests):
        (failed,), _ = asked(url, [prompt("q")], retries=1, timeout_s=0.4 if "0" in expected else 20.0)
    assert time.monotonic() - started < 15
    assert isinstance(failed, EndpointFailed)
    assert "after 2 attempts" in str(failed)
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(str(failed))
    assert len(requests) == 2


@pytest.mark.parametrize(
    "choice",
    [
        None,
        {},
        {"message": None},
        {"message": {"content": 3}},
        {"message": {"tool_calls": [{"function": 1}]}},
    ],
)
def test_what_is_no_chat_completion_is_asked_again_and_named(choice: Any) -> None:
    with serve(lambda handler, body, number: handler.send({"choices": [choice]})) as service:
        (failed,), _ = asked(service.url, [prompt("q")], retries=1)
    assert "sent no chat completion" in str(failed)
    assert len(service.requests) == 2


# ------------------------------------------------------------------ configuration


def test_settings_that_cannot_be_asked_with_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set rollout\.openai\.base_url"):
        RolloutConfig(engine="openai")
    with pytest.raises(ValueError, match=r"rollout\.openai\.model is empty"):
        RolloutConfig(engine="openai", openai=OpenAIConfig(base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(ValueError, match="holds a password"):
        RolloutConfig(engine="openai", openai=OpenAIConfig(base_url="http://a:b@c/v1", model="m"))
    with pytest.raises(ValueError, match=r"setting of rollout\.openai is given, but rollout\.engine=native"):
        RolloutConfig(openai=OpenAIConfig(model="m"))


def test_a_run_cannot_train_with_it() -> None:
    rollout = RolloutConfig(engine="openai", openai=OpenAIConfig(base_url="http://127.0.0.1:1/v1", model="m"))
    with pytest.raises(ValueError, match="m at http://127.0.0.1:1/v1, whose weights nobody here can train"):
        check_engine(ModelConfig(path="/nowhere"), rollout)
