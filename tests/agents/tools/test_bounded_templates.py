"""Chat templates that loop, or write far more than they are given, end with a sentence; others write the same text."""

# ruff: noqa: E501  (templates are one program per string)
from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_family import FAMILIES, family_tokenizer
from transformers.utils import chat_template_utils

from strop.agents.tools.templates import ChatTemplate
from strop.data.chat import Chat, render
from strop.utils.chat_template import TemplateRefused, TemplateTooCostly, apply_template
from strop.utils.chat_template.bounded import budget

GROWS = "{% set ns = namespace(x=START, y=START) %}{% for i in range(99999) %}BODY{% endfor %}"


def grows(start: str, body: str, then: str = "") -> str:
    return GROWS.replace("START", start).replace("BODY", body) + then


DOUBLED = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% if i == 60 %}{% break %}{% endif %}"
PAIRED = "{% set ns.x = (ns.x, ns.x) %}{% if i == 60 %}{% break %}{% endif %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops in a filter": "{% for a in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    "text of the template": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}{% set b = f(n-1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block of itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop of itself": "{% for a in [1] recursive %}{{ loop([1] * 9) }}{% endfor %}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "filters of filters": "{{ 'a'" + "|upper" * 5000 + " }}",
    "powers": "{% set n = 9**999 %}{{ n**n }}",
    "powers, known at once": "{{ 9**9999999 }}",
    "products": grows("99999", "{% set ns.x = ns.x * ns.x %}"),
    "repeated text": "{{ 'a' * 9999999999 }}",
    "repeated lists": "{{ ([1] * 999999999)|length }}",
    "doubled with ~": grows("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubled with +": grows("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "doubled in a block": grows("'ab'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "lists of lists, shown": grows("['a']", DOUBLED, "{{ ns.x }}"),
    "lists of lists, as JSON": grows("['a']", DOUBLED, "{{ ns.x|tojson }}"),
    "lists of lists, compared": grows("['a']", DOUBLED, "{{ ns.x == ns.y }}"),
    "lists of lists, looked for": grows("['a']", DOUBLED, "{{ ns.x is in([ns.y]) }}"),
    "pairs of pairs, as a key": grows("(1,)", PAIRED, "{{ {ns.x: 1} }}"),
    "pairs of pairs, asked for": grows("(1,)", PAIRED, "{{ {}[ns.x] }}"),
    "pairs of pairs, in dict": grows("(1,)", PAIRED, "{{ dict([(ns.x, 1)]) }}"),
    "a list in itself": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x|tojson }}",
    "nested deeply": grows("(1,)", "{% set ns.x = (ns.x,) %}", "{{ {ns.x: 1} }}"),
    "a width": "{{ 'a'.center(999999999) }}",
    "a width of a filter": "{{ ['a']|map('center', 999999999)|join }}",
    "a width of format": "{{ '{:999999999}'.format(1) }}",
    "a given width of format": "{{ '{:{}}'.format(1, 999999999) }}",
    "a width of %": "{{ '%999999999d' % 1 }}",
    "replacements": "{% set x = 'a' * 9999 %}{{ x.replace('a', x).replace('a', x) }}",
    "joins": "{% set x = 'a' * 99999 %}{{ x.join(x) }}",
    "searches from the right": "{% set x = 'a' * 3000000 %}{{ x.rfind('b' ~ x[:1500000]) }}",
    "comments taken out": "{% set x = '<!--' * 300000 %}{{ x|striptags }}",
    "sums of lists": "{{ ([[1] * 99] * 99999)|sum(start=[])|length }}",
    "slices": "{{ 'a'|slice(999999999)|list }}",
    "indents": "{{ [[1]]|tojson(indent=999999999) }}",
    "many arguments": "{% macro f() %}{% set y = varargs %}{% endmacro %}{% set x = range(9999)|list %}{% for i in range(50000) %}{{ f(*x) }}{% endfor %}",
    "answers marked": "{% for a in range(99999) %}{% generation %}x{% endgeneration %}{% endfor %}" * 20,
}


class Tokenizer:
    """As much of a tokenizer as a template needs."""

    name_or_path = "models/received"
    chat_template = ""

    def apply_chat_template(self, messages: Any, tools: Any = None, **options: Any) -> str:
        options.pop("tokenize", None)
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], tools, chat_template=self.chat_template, **options
        )
        return str(texts[0])


def tokenizer_with(template: str) -> Any:
    tokenizer = Tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "BASE_STEPS", 50_000)  # the whole is a second of each
    tokenizer = tokenizer_with(ENDLESS[name])
    message = r"the chat template of models/received (loops|ends with \w+).*and was stopped; correct it"
    with pytest.raises(TemplateTooCostly, match=message):
        apply_template(tokenizer, [{"role": "user", "content": "x"}], None)


def test_every_door_says_so_and_takes_it_for_no_fault_of_the_row() -> None:
    tokenizer = tokenizer_with(ENDLESS["loops"])
    message = {"role": "user", "content": "x"}
    with pytest.raises(TemplateTooCostly):
        render(tokenizer, Chat(messages=(message,), where="train row 1"), add_generation_prompt=True)
    with pytest.raises(TemplateTooCostly):  # the first thing that a run with tools does
        _ = ChatTemplate(tokenizer).profile


def test_the_budget_grows_with_the_messages() -> None:
    per_character = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    tokenizer = tokenizer_with(per_character)
    text = "ab" * 40_000
    assert apply_template(tokenizer, [{"role": "user", "content": text}], None) == text
    squared = "{% for c in messages[0].content %}" + per_character + "{% endfor %}"
    with pytest.raises(TemplateTooCostly):
        apply_template(tokenizer_with(squared), [{"role": "user", "content": text}], None)


def test_a_conversation_of_a_thousand_turns_is_rendered() -> None:
    for family in FAMILIES:
        turns = [
            {"role": one, "content": f"turn {i} " * 50} for i in range(500) for one in ("user", "assistant")
        ]
        assert "turn 499" in apply_template(tokenizer_with(family.template), turns, None)


THINKING = """{% macro shown(all, m) %}{{ m.role }}{% endmacro %}{% for m in messages %}{% if messages|length > 0 %}
{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}{{ shown(messages, m) }}{{ content.rstrip('\\n') }}
{% set rest = messages[loop.index:] %}{{ rest|length }}{% endif %}{% endfor %}"""
"""What templates of models that think do with each message."""


@pytest.mark.parametrize(("turns", "words"), [(4, 30_000), (40, 3_000), (1000, 1)])
def test_long_conversations_need_a_small_part_of_the_budget(turns: int, words: int) -> None:
    answer = {"role": "assistant", "content": "<think>\nso\n</think>\n" + "word " * words}
    tokenizer = tokenizer_with(THINKING)
    with patch.object(budget, "BASE_STEPS", 0), patch.object(budget, "STEPS_PER_PIECE", 50):
        text = apply_template(tokenizer, [answer] * turns, None)
    assert text.count("word") == turns * words


def test_a_template_of_megabytes_is_not_compiled() -> None:
    """Half a minute and two gigabytes, in the measure of tokens that Jinja makes of it."""
    tokenizer = family_tokenizer("qwen25")
    messages, template = [{"role": "user", "content": "x"}], "{{ a }}" * 150_000
    with pytest.raises(TemplateTooCostly, match="has 1050000 characters, more than 131072"):
        apply_template(tokenizer, messages, None, tokenize=False, chat_template=template)


def test_messages_nested_too_deeply_are_a_fault_of_the_messages() -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TemplateRefused, match="nested"):
        apply_template(tokenizer_with("{{ messages }}"), [{"role": "user", "content": nested}], None)


def unbounded(template: str, **given: Any) -> str:
    """The text without a budget, with all that transformers adds to Jinja."""
    return str(_original(template).render(**given))


_original = getattr(chat_template_utils, "_cached_compile_jinja_template")  # noqa: B009
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
def test_good_templates_write_what_they_wrote_without_a_budget(
    pieces: list[str], contents: list[str]
) -> None:
    messages = [{"role": "user" if i % 2 else "system", "content": text} for i, text in enumerate(contents)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    template = "\n".join(pieces)
    assert apply_template(tokenizer_with(template), messages, tools) == unbounded(
        template, messages=messages, tools=tools, add_generation_prompt=False
    )


def test_every_piece_is_rendered() -> None:
    for piece in PIECES:
        text = apply_template(tokenizer_with(piece), [{"role": "user", "content": "x"}], None)
        assert not re.search("Undefined", text)
