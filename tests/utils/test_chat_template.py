"""Chat templates that loop, or write far more than they are given, end with a sentence; others write the same text in
the process that renders them as in this one."""

# ruff: noqa: E501  (templates are one program per string)
from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from default_cases import by_default
from hypothesis import given, settings
from hypothesis import strategies as st
from template_family import FAMILIES, family_tokenizer
from transformers.utils import chat_template_utils

from references.chat_templates import CHATML, make_tokenizer
from strop.agents.tools.templates import ChatTemplate
from strop.data.chat import Chat, render
from strop.utils import chat_template
from strop.utils.chat_template import (
    TemplateRefused,
    TemplateTooCostly,
    apply_template,
    apply_template_to_all,
    process,
    stop_clock,
    trust_template,
)

USER = {"role": "user", "content": "x"}
GROWS = "{% set ns = namespace(x=START, y=START) %}{% for i in range(99999) %}BODY{% endfor %}"


def grows(start: str, body: str, then: str = "") -> str:
    return GROWS.replace("START", start).replace("BODY", body) + then


DOUBLED = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% if i == 60 %}{% break %}{% endif %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOPS,
    "macros": "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set b = f(n-1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "powers, known at once": "{{ 9**9999999 }}",
    "lists of lists, as JSON": grows("['a']", DOUBLED, "{{ ns.x|tojson }}"),
    "a long text": "{{ 'a' * 300000000 }}",
}
"""Ended by the deadline, and a text by its length."""
GROWING = {
    "a macro of itself": ("RecursionError", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    "a block of itself": ("RecursionError", "{% block a %}{{ self.a() }}{% endblock %}"),
    "brackets": ("RecursionError", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    "filters of filters": ("RecursionError", "{{ 'a'" + "|upper" * 5000 + " }}"),
    "repeated text": ("MemoryError", "{{ 'a' * 9999999999 }}"),
    "repeated lists": ("MemoryError", "{{ ([1] * 999999999)|length }}"),
    "doubled in a block": ("MemoryError", grows("'ab'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}")),
    "joins": ("MemoryError", "{% set x = 'a' * 99999 %}{{ x.join(x) }}"),
}
"""Ended by an error, long before the deadline."""


def tokenizer_with(template: str) -> Any:
    tokenizer = copy.copy(family_tokenizer("qwen25"))  # which is kept
    tokenizer.chat_template = template
    tokenizer.name_or_path = "models/received"
    return tokenizer


def rendered(template: str, messages: Any, tools: Any = None, *, is_trusted: bool = False) -> str:
    tokenizer = tokenizer_with(template)
    if is_trusted:
        trust_template(tokenizer)
    return str(apply_template(tokenizer, messages, tools, tokenize=False))


def process_id() -> int:
    kept = process._kept
    assert kept is not None
    return kept._process.pid


@pytest.mark.parametrize("name", by_default(ENDLESS, "loops", "macros", "powers, known at once"))
def test_a_template_that_does_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DEADLINE_S", 0.5)
    message = "the chat template of models/received loops, or writes far more.*and was stopped; correct it"
    with pytest.raises(TemplateTooCostly, match=message):
        rendered(ENDLESS[name], [USER])
    assert rendered("{{ messages[0].content }}", [USER]) == "x"


@pytest.mark.parametrize(
    "name", by_default(GROWING, "a macro of itself", "brackets", "repeated text", "doubled in a block")
)
def test_a_template_that_grows_is_stopped(name: str) -> None:
    error, template = GROWING[name]
    message = f"the chat template of models/received ends with {error}, and was stopped; correct it"
    with pytest.raises(TemplateTooCostly, match=message):
        rendered(template, [USER])
    assert rendered("{{ messages[0].content }}", [USER]) == "x"


def test_every_door_says_so_and_takes_it_for_no_fault_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DEADLINE_S", 0.5)
    tokenizer = tokenizer_with(LOOPS)
    with pytest.raises(TemplateTooCostly):
        render(tokenizer, Chat(messages=(USER,), where="train row 1"), add_generation_prompt=True)
    with pytest.raises(TemplateTooCostly):  # the first thing that a run with tools does
        _ = ChatTemplate(tokenizer).profile


def test_a_conversation_of_a_thousand_turns_is_rendered() -> None:
    for family in FAMILIES:
        turns = [
            {"role": role, "content": f"turn {i} " * 50} for i in range(500) for role in ("user", "assistant")
        ]
        assert "turn 499" in rendered(family.template, turns)


def test_a_template_of_megabytes_is_not_compiled() -> None:
    """Half a minute and two gigabytes, in the measure of tokens that Jinja makes of it."""
    with pytest.raises(TemplateTooCostly, match="has 1050000 characters, more than 131072"):
        rendered("{{ a }}" * 150_000, [USER])


@pytest.mark.parametrize("depth", [450, 5000])
def test_messages_nested_too_deeply_are_a_fault_of_the_messages(depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    if depth < 1000:
        assert rendered("{{ messages|length }}", [{"role": "user", "content": nested}]) == "1"
        return
    with pytest.raises(TemplateRefused, match="nested"):
        rendered("{{ messages }}", [{"role": "user", "content": nested}])


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no system turns') }}", "no system turns"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_with_an_error_refuses_the_messages(
    template: str, sentence: str, is_trusted: bool
) -> None:
    with pytest.raises(TemplateRefused, match=sentence):
        rendered(template, [USER], is_trusted=is_trusted)


def test_only_a_template_that_is_not_trusted_goes_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendered("{{ messages[0].content }}", [USER]) == "x"
    monkeypatch.setattr(process, "framed", None)
    assert rendered("{{ messages[0].content }}", [USER], is_trusted=True) == "x"
    with pytest.raises(TemplateRefused):
        rendered("{{ messages[0].content }}", [USER])


def test_one_process_is_kept_and_one_that_died_is_replaced() -> None:
    rendered("{{ 1 }}", [USER])
    first = process_id()
    rendered("{{ 2 }}", [USER])
    assert process_id() == first
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    assert rendered("{{ 3 }}", [USER]) == "3"
    assert process_id() != first


@pytest.mark.parametrize("is_trusted", [False, True])
def test_each_tokenizer_has_a_clock_of_its_own(is_trusted: bool) -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}"
    for date in ("2024-02-03", "2025-03-04", "2024-02-03"):
        tokenizer = tokenizer_with(template)
        stop_clock(tokenizer, date)
        if is_trusted:
            trust_template(tokenizer)
        assert apply_template(tokenizer, [USER], None, tokenize=False) == date


def test_values_that_json_does_not_know_are_shown_as_transformers_shows_them() -> None:
    message = {"role": "user", "content": [{"type": "image", "image": np.zeros(3)}, {"number": np.int64(7)}]}
    for template in ("{{ messages }}", "{{ messages[0].content[1].number + 1 }}"):
        assert rendered(template, [message]) == rendered(template, [message], is_trusted=True)


CALLS = {
    "added to a text": "{{ '<' + c.function.arguments + '>' }}",
    "as JSON": "{{ '<' + c.function.arguments | tojson + '>' }}",
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("num_conversations", [1, 2])
def test_arguments_of_calls_are_texts_for_a_template_that_takes_no_objects(
    form: str, num_conversations: int
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ä", "b": [1, None]}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}" + CALLS[form] + "{% endfor %}{% endfor %}"
    )
    texts = apply_template_to_all(tokenizer_with(template), [messages] * num_conversations, None)
    assert texts == ['<{"a": "ä", "b": [1, null]}>'] * num_conversations
    assert call["function"]["arguments"] == {"a": "ä", "b": [1, None]}, "what was given stays"  # type: ignore[index]


def test_the_error_of_a_template_is_that_of_the_messages_as_they_were_given() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    template = "{{ raise_exception(messages[0].tool_calls[0].function.arguments is string) }}"
    with pytest.raises(TemplateRefused, match="False"):
        rendered(template, [{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_marked_answers_have_their_tokens() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    encodings = []
    for is_trusted in (False, True):
        tokenizer = tokenizer_with(template)
        if is_trusted:
            trust_template(tokenizer)
        encoded = apply_template(tokenizer, [USER], None, return_dict=True, return_assistant_tokens_mask=True)
        encodings.append((list(encoded["input_ids"]), list(encoded["assistant_masks"])))
    assert encodings[0] == encodings[1]
    assert sum(encodings[0][1]) == 1


PIECES = r"""
{{ messages[0].content }}{{ messages|length }}{{ messages|map(attribute='role')|join(', ') }}{{ tools|tojson }}
{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ m.content|trim }}{% else %}none{% endfor %}
{% for m in messages %}{% if loop.last %}.{% endif %}{{ loop.previtem }}{{ loop.cycle('a', 'b') }}{% endfor %}
{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}
{% macro f(x, y=2) %}[{{ x }}{{ y }}]{% endmacro %}{{ f('a') ~ f(1, y='b') }}{{ messages[1:]|length }}{{ 'abc'[::-1] }}
{{ 'a,b'.split(',')[1].upper() }}{{ ' x '.strip() }}{{ '%s-%d' % ('a', 3) }}{{ '{}:{:>4}'.format(1, 'x') }}{{ '%s'|format(1) }}
{{ 1 + 2 * 3 - 4 // 3 % 2 }}{{ 2 ** 8 }}{{ 7 / 2 }}{{ 'a' * 3 }}{{ [1] + [2] }}{{ missing }}{{ missing is defined }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'x' in 'xyz' }}{{ 1 < 2 < 3 }}{{ 'a' not in ['b'] }}
{{ tools|tojson(indent=2) }}{{ 3.7|round|int }}{{ 'a\nb'|indent(2) }}{{ 'abc'|replace('b', 'd')|title }}{{ [3,1,2]|sort }}
{% generation %}x{% endgeneration %}{% filter upper %}y{% endfilter %}{% set z %}q{{ 1 }}{% endset %}{{ z }}{{ -3|abs }}
{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}{{ {'a': 1, 'b': [2]}|items|list }}
{{ messages[0]['role'] if messages else 'none' }}{{ messages[-1].content|default('d', true) }}{{ none|string }}{{ 1000000|default(9) }}
{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ dict(a=1) }}{{ 'x'.join(['1', '2']) }}{{ 'aXb'.partition('X') }}
{{ messages|first|attr('nothing') }}{{ 'abc'|first }}{{ [1, 2]|last }}{{ [1, 1, 2]|unique|list }}{{ [1, 2]|sum }}{{ '<&>'|e }}
{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ loop.changed(m.role) }}{% endfor %}{{ range(3)|list }}
{{ messages|groupby('role')|length }}{{ 'a b'|wordcount }}{{ ['b', 'a']|sort|reverse|list }}{{ {'b': 1, 'a': 2}|dictsort }}
{{ ['a', 'b']|map('upper')|list }}{{ [1, 2, 3]|select('odd')|list }}{{ [1, 2, 3]|batch(2)|list }}{{ 'abcdef'|truncate(5) }}
""".strip().splitlines()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    st.lists(st.text(max_size=30), min_size=1, max_size=4),
)
def test_templates_write_the_same_text_in_both_processes(pieces: list[str], contents: list[str]) -> None:
    messages = [{"role": "user" if i % 2 else "system", "content": text} for i, text in enumerate(contents)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    template = "\n".join(pieces)
    assert rendered(template, messages, tools) == rendered(template, messages, tools, is_trusted=True)


@pytest.mark.parametrize("name", ["_compile_jinja_template", "_plain_template_data", "render_jinja_template"])
def test_a_version_of_transformers_that_renders_otherwise_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(chat_template_utils, name)
    chat_template._render_apart_by_default.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=rf"transformers \S+ has no {name}: .*constraints\.txt names"):
            apply_template(make_tokenizer(CHATML), [{"role": "user", "content": "a"}], None, tokenize=False)
    finally:
        chat_template._render_apart_by_default.cache_clear()
