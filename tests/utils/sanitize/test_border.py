"""What comes from outside becomes storable, whatever it is, in time linear in its size."""

from __future__ import annotations

import base64
import json
import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given, settings
from utils.sanitize import hostile

import strop.utils.sanitize.secrets as secrets_module
from strop.utils.sanitize import (
    as_number,
    described,
    encodable,
    finite,
    is_secret,
    printable,
    read_json,
    read_json_at,
    redacted,
    remember_named,
    remember_secret,
    remember_secrets_in,
    secrets_in,
    storable,
    storable_text,
    without_secrets,
)


@pytest.fixture(autouse=True)
def no_secrets() -> Iterator[None]:
    before = set(secrets_module._remembered), secrets_module._forms
    yield
    secrets_module._remembered.clear()
    secrets_module._remembered.update(before[0])
    secrets_module._forms = before[1]


def check_storable(value: Any) -> None:
    """It is plain JSON that UTF-8, Parquet, a strict reader and a terminal take; storing it again changes nothing."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode()) == value
    pa.array([text], type=pa.string()).validate(full=True)
    assert not set(text) & {chr(code) for code in range(0x7F, 0xA0)}
    assert storable(value, max_items=1 << 20, max_depth=100) == value


@settings(deadline=None)
@given(hostile.values)
def test_any_value_becomes_storable(value: Any) -> None:
    check_storable(storable(value))


@pytest.mark.parametrize("name", hostile.MAKERS)
def test_each_hostile_value_becomes_storable_and_describes_itself(name: str) -> None:
    value = hostile.MAKERS[name]()
    check_storable(storable(value))
    for text in (storable_text(value), printable(value)):
        assert text.encode()
    assert len(str(storable(value, max_chars=1000, max_items=100))) < 20_000


@settings(deadline=None)
@given(hostile.texts)
def test_any_text_can_be_encoded_and_shown(text: str) -> None:
    assert encodable(text).encode() or not text
    assert storable_text(text).encode() or not text
    shown = printable(text, is_one_line=True)
    kinds = {unicodedata.category(char) for char in shown if char not in "\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert printable(shown, is_one_line=True) == shown


def test_what_each_kind_becomes() -> None:
    assert storable({"a": (1, 2.5, None, True), 3: math.nan, "i": -math.inf}) == {
        "a": [1, 2.5, None, True],
        "3": "nan",
        "i": "-inf",
    }
    assert storable([2**63 - 1, -(2**63), 2**63]) == [2**63 - 1, -(2**63), str(2**63)]
    assert storable(10**5000) == "[integer of 5001 digits]"
    assert storable("a\ud83db\ud83d\ude00\x1b[1m\x00\x9b\r\n\t") == "a\ufffdb😀\\x1b[1m\\x00\\x9b\r\n\t"
    assert storable({chr(0xD800 + number): number for number in (1, 2, 3)}) == {
        "\ufffd": 1,
        "\ufffd (2)": 2,
        "\ufffd (3)": 3,
    }
    assert storable({"b", "a"}) == ["a", "b"]
    assert storable(hostile.Raises()) == "<Raises>"
    assert storable(hostile.cycle()) == [1, {"again": "[the same value again]"}]
    assert storable([[[1]]], max_depth=2) == [["[nested more deeply]"]]
    assert storable([1, 2, 3, 4], max_items=2) == [1, 2, "[… 2 more]"]
    assert storable({"a": 1, "b": 2}, max_items=1) == {"a": 1, "…": "[1 more]"}
    assert storable_text("abcdef", max_chars=2) == "ab… [4 more characters]"
    assert described(ValueError("x\ud800")) == "ValueError: x\ufffd"
    assert described(hostile.Mute()) == "Mute: its text cannot be shown"


def test_a_number_is_finite_or_none() -> None:
    assert [finite(value) for value in (1, 2.5, True)] == [1.0, 2.5, 1.0]
    for value in (10**400, math.nan, math.inf, "3", None, [1], hostile.Raises(), hostile.Lies()):
        assert finite(value) is None
    assert as_number(10**5000) == math.inf
    assert as_number(-(10**5000)) == -math.inf
    assert as_number("-inf") == -math.inf
    assert math.isnan(as_number("word"))


def test_json_from_outside_is_read_or_refused_with_a_value_error() -> None:
    assert read_json('{"a": "\\ud83d", "n": %s, "m": 12}' % ("9" * 5000)) == {
        "a": "\ufffd",
        "n": "[integer of 5000 digits]",
        "m": 12,
    }
    assert read_json("[1e999]") == [math.inf]
    for text in ("[" * 100_000, "{", b"\xff\xfe\xff", "\ud83d"):
        with pytest.raises(ValueError, match="."):
            read_json(text)
    for text in ("[" * 101 + "]" * 101, "[" * 500 + "]" * 500):
        with pytest.raises(ValueError, match="objects and lists are nested more than 100 deep"):
            read_json(text)
    assert str(read_json("[" * 100 + "]" * 100)).count("[") == 100
    assert read_json_at(' {"a": 1} and more', 1) == ({"a": 1}, 9)
    for extra in ("[1] 2", "1,"):
        with pytest.raises(ValueError, match="Extra data"):
            read_json(extra)


@pytest.mark.parametrize("limit", [640, 0])
def test_no_limit_on_digits_changes_what_is_stored(limit: int) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        check_storable(storable([10**598, 10**599, 10**700, {10**700: 1}]))
    finally:
        sys.set_int_max_str_digits(before)


KEY = "sk-Zm9v+/bar=quux&17"


def test_a_secret_is_redacted_in_all_its_spellings() -> None:
    remember_secret(f"Bearer {KEY}")
    said = [
        f"Authorization: Bearer {KEY}",
        "Basic " + base64.b64encode(f"user:{KEY}".encode()).decode(),
        "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode(),
        base64.urlsafe_b64encode(KEY.encode()).decode(),
        "https://x/?key=" + quote(KEY),
        "https://x/?key=" + quote(KEY, safe="").lower().replace("sk-zm9v", "sk-Zm9v"),
        json.dumps({"k": KEY}).replace("/", "\\/"),
    ]
    for text in said:
        for function in (redacted, encodable, storable_text, printable):
            assert "[redacted]" in function(text), text
            assert KEY[:12] not in function(text)
    assert storable({KEY: [KEY]}) == {"[redacted]": ["[redacted]"]}
    assert KEY[:8] not in storable_text(f"{'x' * 10}{KEY}", max_chars=18), "redacted before it is cut"


def test_short_values_and_plain_numbers_are_not_redacted() -> None:
    for value in ("", "seven77", "12345678"):
        remember_secret(value)
    assert redacted("seven77 12345678") == "seven77 12345678"


def test_the_environment_gives_its_keys_by_their_names() -> None:
    remember_named(
        {"OPENAI_API_KEY": "abcdefgh1", "HF_TOKEN": "abcdefgh2", "TOKENIZERS_PARALLELISM": "abcdefgh3"}
    )
    assert redacted("abcdefgh1 abcdefgh2 abcdefgh3") == "[redacted] [redacted] abcdefgh3"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward.kwargs.api_key", "Swordfish-1"),
        ("resources.env.WANDB_API_KEY", "x"),
        ("wandb_key", "0123456789abcdef"),
        ("hub_token", "abcdefghijkl"),
        ("api_token", "abcdefghijkl"),
        ("token", "1a2b3c4d5e6f7a8b9c"),
        ("db.password", "two words"),
        ("anything", "hf_AbCdEfGhIjKlMnOpQrStUv"),
        ("anything", "Bearer sk-proj-Ab1cdefghijklmnopqrs"),
        ("url", "http://me:hunter2@10.0.0.1:5000/get"),
    ],
)
def test_a_key_among_settings_is_known_by_its_name_or_its_form(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert list(secrets_in({"a": {name: [value]}})) == [(f"a.{name}", value)]
    assert without_secrets({name: value, "seed": 1}) == {name: "[redacted]", "seed": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward.kwargs.stop_token", "</answer>"),
        ("eos_token", "<|im_end|>"),
        ("data.prompt_key", "prompt"),
        ("rollout.openai.api_key_env", "OPENAI_API_KEY"),
        ("reward.kwargs.api_key", "${oc.env:OPENAI_API_KEY}"),
        ("reward.kwargs.api_key", ""),
        ("reward.kwargs.api_key", 1),
        ("model.path", "models/hf_checkpoint_step_1000_final"),
        ("run.copy_to", "runs/task-0123456789-ABCDEFGHIJ"),
        ("url", "http://10.0.0.1:5000/get?x=@a"),
    ],
)
def test_what_only_looks_like_a_key_is_none(name: str, value: object) -> None:
    assert not is_secret(name, value)


def test_secrets_among_settings_are_redacted_from_then_on() -> None:
    remember_secrets_in({"kwargs": {"api_key": "Opensesame-77"}, "url": "http://me:swordfish99@h/x"})
    assert redacted("Opensesame-77 swordfish99") == "[redacted] [redacted]"


LINEAR: dict[str, Callable[[int], Any]] = {
    "surrogates": lambda n: "\ud800" * n,
    "low halves": lambda n: "\udc00\ud800" * n,
    "controls": lambda n: "\x1b" * n,
    "near secrets": lambda n: ("a" * 4000 + "c") * (n // 4000),
    "equal keys": lambda n: {
        ("\ud800" + chr(0xD800 + i % 2000)) * (i // 2000 + 1): i for i in range(n // 400)
    },
    "list": lambda n: [0] * n,
}


@pytest.mark.parametrize("name", LINEAR)
def test_time_grows_in_proportion_to_size(name: str) -> None:
    remember_secret("a" * 4000 + "b")

    def seconds(size: int) -> float:
        value, best = LINEAR[name](size), math.inf
        for _ in range(3):
            started = time.process_time()
            storable(value)
            best = min(best, time.process_time() - started)
        return best

    assert seconds(200_000) < 10 * max(seconds(50_000), 1e-3)  # 16 times if it were quadratic


def test_numbers_of_many_digits_are_read_in_proportion_to_their_length() -> None:
    def seconds(digits: int) -> float:
        text = "9" * digits
        started = time.process_time()
        storable(read_json(f"[{text}, {text}.5, -{text}e5]"))
        return time.process_time() - started

    assert seconds(400_000) < 10 * max(seconds(100_000), 1e-3)
