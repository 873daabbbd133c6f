"""Habits of templates that the families do not have, each in the smallest template that has it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from agent_cases import prompt_of, sampling_of, setup_with
from template_family import BY_NAME, CHATML, family_tokenizer, tokenizer_of
from test_exact_tokens import Echo

from strop.agents.tools.conversation import Conversation
from strop.agents.tools.formats import FunctionCall, ParsedTurn, parser_for_template
from strop.agents.tools.templates import ChatTemplate
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.types import TokenOutput

REST = """{%- else %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def chatml(calls: str, *, before: str = "", rest: str = REST) -> Any:
    """A template that writes answers with calls in this way."""
    text = before + "{%- for m in messages %}{%- if m.tool_calls %}{{- '<|im_start|>assistant\\n' }}"
    text += "{%- for c in m.tool_calls %}" + calls + "{%- endfor %}{{- '<|im_end|>\\n' }}" + rest
    return tokenizer_of(text, control=(*CHATML, "<|call_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
                        end="<|im_end|>")  # fmt: skip


HERMES = """{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}"""
XML = """{{- 'OPEN<function=' + c.function.name + '>' }}{%- for k, v in c.function.arguments.items() %}
{{- '<parameter=' + k + '>' + v + '</parameter>' }}{%- endfor %}{{- '</function>CLOSE' }}"""
LISTED = """{{- 'OPEN[' + c.function.name + '(' }}{%- for k, v in c.function.arguments.items() %}
{{- k + '=' }}{{- v | tojson }}{%- endfor %}{{- ')]CLOSE' }}"""
THINKS = REST.replace("assistant\\n", "assistant\\n<think>\\n")


def found(tokenizer: Any) -> str:
    example = ChatTemplate(tokenizer).profile.call_example
    return parser_for_template(example, tokenizer).format.name


@pytest.mark.parametrize(
    ("calls", "rest", "name"),
    [
        (HERMES, REST, "hermes"),
        # The header opens a tag that begins with the letters of the call's own.
        (HERMES, THINKS, "hermes"),
        (XML.replace("OPEN", "<tool_call>").replace("CLOSE", "</tool_call>"), REST, "qwen3_coder"),
        (LISTED.replace("OPEN", "").replace("CLOSE", ""), REST, "pythonic"),
        (
            LISTED.replace("OPEN", "<|tool_call_start|>").replace("CLOSE", "<|tool_call_end|>"),
            REST,
            "pythonic",
        ),
    ],
)
def test_the_format_is_the_one_that_reads_the_call_of_the_template(calls: str, rest: str, name: str) -> None:
    assert found(chatml(calls, rest=rest)) == name


@pytest.mark.parametrize(
    "calls",
    [
        XML.replace("OPEN", "<my:tool_call>").replace("CLOSE", "</my:tool_call>"),
        "{{- '<function=' + c.function.name + '>' }}{{- c.function.arguments | tojson }}{{- '</function>' }}",
        LISTED.replace("OPEN", "<|call_start|>").replace("CLOSE", "<|call_start|>"),
    ],
)
def test_a_way_to_write_calls_that_no_format_reads_is_refused_though_it_looks_like_one(calls: str) -> None:
    with pytest.raises(ValueError, match=r"how the model calls tools is not known: set agent\.tool_format"):
        found(chatml(calls))


def test_a_template_that_insists_on_tools_still_has_a_role_for_their_results() -> None:
    tokenizer = chatml(HERMES, before="{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}")
    profile = ChatTemplate(tokenizer).profile
    assert profile.reply_role == "tool"
    assert not profile.rewrites_at


def test_a_system_text_that_moves_is_a_rewriting_for_conversations_that_have_one() -> None:
    # It stands in front of a user turn, if nothing has answered that yet.
    rest = (
        """{%- elif m.role == 'system' %}{%- elif m.role == 'user' and loop.last and messages[0].role == 'system' %}
{{- '<|im_start|>user\\n' + messages[0].content + m.content + '<|im_end|>\\n' }}"""
        + REST
    )
    profile = ChatTemplate(chatml(HERMES, rest=rest)).profile
    assert profile.rewrites_at == frozenset()
    assert profile.rewrites_after_system_at == {"tool", "user"}


IDS = """{{- c.id + ' is ' + c.function.name + c.function.arguments | tojson }}"""
NINE = "{%- if c.id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}"
SHOWS_IDS = "{%- elif m.role == 'tool' %}{{- m.tool_call_id + ': ' + m.content + '<|im_end|>\\n' }}" + REST


@pytest.mark.parametrize(
    ("calls", "written", "expected"),
    [
        (IDS, "abcDEF123", "abcDEF123"),
        (IDS, "my-own", "my-own"),
        (NINE + IDS, "abcDEF123", "abcDEF123"),
        (NINE + IDS, "my-own", "call00000"),
        ("{{- c.id + c.function.arguments | tojson }}", None, "functions.look_up:0"),
    ],
)
def test_a_result_has_the_id_that_the_model_gave_its_call(
    calls: str, written: str | None, expected: str
) -> None:
    tokenizer = chatml(calls, rest=SHOWS_IDS)
    conversation = begun(tokenizer, "hermes")
    answer(conversation, tokenizer, "call<|im_end|>", FunctionCall("look_up", '{"value": "a"}', written))
    assert conversation.add_replies(["seven"])
    assert tokenizer.decode(conversation.token_ids).endswith(
        f"call<|im_end|>\n{expected}: seven<|im_end|>\n<|im_start|>assistant\n"
    )


def begun(tokenizer: Any, tool_format: str, *, last: str = "") -> Conversation:
    tool = Echo()
    setup = setup_with(tokenizer, [tool], tool_format=tool_format)
    prompt: Prompt = prompt_of(tokenizer, tools=[tool.tool_schema.model_dump()])
    if last:  # which the answer continues
        messages = (*prompt.messages, {"role": "assistant", "content": last})
        prompt = dataclasses.replace(prompt, messages=messages)
    context = setup.context(prompt, sampling_of(tokenizer), deadline=60.0)
    trajectory = Trajectory(uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids)
    return Conversation(prompt, trajectory, context)


def answer(
    conversation: Conversation, tokenizer: Any, text: str, *calls: FunctionCall, reasoning: str = ""
) -> None:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    output = TokenOutput(
        token_ids=ids, log_probs=(-0.5,) * len(ids), versions=(0,) * len(ids), stop_reason="stop"
    )
    content = text.rpartition("</think>")[2].partition("<|")[0].strip() if not calls else ""
    conversation.add_answer(output, ParsedTurn(content, calls, reasoning))


def test_an_answer_that_the_template_ends_with_another_token_is_not_left_in_the_history() -> None:
    tokenizer = family_tokenizer("gpt_oss")
    conversation = begun(tokenizer, "gpt_oss")
    answer(conversation, tokenizer, "<|channel|>final<|message|>It is 3.<|return|>")
    # As the model writes it; the template has the content in the final channel by itself.
    conversation._messages[-1] = {"role": "assistant", "content": "It is 3."}
    assert conversation.add_replies(["Sure?"], role="user")
    first, second = conversation.finish("stop", extra={}, numbers={}, timings={})
    assert tokenizer.decode(first.response_ids).endswith("It is 3.<|return|>")
    shown = tokenizer.decode(second.prompt_ids)
    assert "It is 3.<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant" in shown
    assert "<|return|>" not in shown


def test_an_answer_and_the_message_that_it_continues_are_one_in_a_rewritten_history() -> None:
    tokenizer = family_tokenizer("gpt_oss")
    conversation = begun(tokenizer, "gpt_oss", last="Let me see. ")
    answer(conversation, tokenizer, "It is 3.<|return|>")
    assert conversation.add_replies(["Sure?"], role="user")
    _, second = conversation.finish("stop", extra={}, numbers={}, timings={})
    shown = tokenizer.decode(second.prompt_ids)
    assert "Let me see. It is 3.<|end|>" in shown
    assert shown.count("Let me see. ") == 1


@pytest.mark.parametrize("knows_fields", [False, True])
def test_thinking_that_the_header_opened_is_closed_in_a_rewritten_history(knows_fields: bool) -> None:
    thought = "m.reasoning_content" if knows_fields else "m.content.split('</think>')[0].split('<think>')[1]"
    text = "m.content" if knows_fields else "m.content.split('</think>')[1]"
    # A template that shows thinking in full, with a mark of its own, and forgets where it was asked.
    template = f"""{{%- for m in messages %}}{{%- if m.role == 'assistant' and ({
        "m.reasoning_content" if knows_fields else "'<think>' in m.content and '</think>' in m.content"
    }) %}}
{{{{- '<|im_start|>assistant\\n<think>\\n' + {thought}.strip() + '\\n</think>\\n\\n' + {
        text
    }.lstrip() + '<|im_end|>\\n' }}}}
{{%- else %}}{{{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}}}{{%- endif %}}
{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n<think>\\n' }}}}{{%- endif %}}"""
    tokenizer = tokenizer_of(template, control=CHATML, end="<|im_end|>")
    conversation = begun(tokenizer, "hermes")
    answer(conversation, tokenizer, "well\n</think>\n\nSo.<|im_end|>", reasoning="well\n")
    conversation.add_replies(["And?"], role="user")
    answer(conversation, tokenizer, "hm\n</think>\n\nYes.<|im_end|>", reasoning="hm\n")
    (whole,) = conversation.finish("stop", extra={}, numbers={}, timings={})
    assert whole.numbers["template_drift"] == 0.0


def test_a_last_token_that_opens_the_next_turn_is_no_drift() -> None:
    tokenizer, family = family_tokenizer("glm"), BY_NAME["glm"]
    conversation = begun(tokenizer, "glm")
    answer(conversation, tokenizer, family.write_calls([("look_up", {"value": "a"})]).strip() + "<|observation|>",
           FunctionCall("look_up", '{"value": "a"}'))  # fmt: skip
    assert conversation.add_replies(["7"])
    answer(conversation, tokenizer, "It is 7.<|user|>")
    (whole,) = conversation.finish("stop", extra={}, numbers={}, timings={})
    assert whole.numbers["template_drift"] == 0.0
