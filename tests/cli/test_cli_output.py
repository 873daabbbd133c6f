"""Untrusted text on a terminal, JSON lines, and the log."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import unicodedata

import pytest
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.utils.quiet_libraries import terminal_log
from strop.utils.terminal import plain, print_json, shorten


def test_control_characters_become_escapes() -> None:
    assert plain("\x1b[31mred\x07\x9b2J\r") == "\\x1b[31mred\\x07\\x9b2J\\r"
    assert plain("a\u202eb\u2028c\ud800") == "a\\u202eb\\u2028c\\ud800"
    assert plain("two\nlines\tapart") == "two\nlines\tapart"
    assert plain("two\nlines", is_one_line=True) == "two\\nlines"
    assert plain("naïve 猫 👩\u200d🔬 √2") == "naïve 猫 👩\u200d🔬 √2"


@pytest.mark.draws
@given(st.text())
@settings(max_examples=draws(50, by_default=20), deadline=None)
def test_nothing_that_a_terminal_acts_on_is_left(text: str) -> None:
    shown = plain(text, is_one_line=True)
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in shown)
    if text.isascii() and text.isprintable():
        assert shown == text


def test_shorten_keeps_the_length() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"


def test_json_is_one_line_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": math.nan, "text": "two\nlines\x1b", "rate": None})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"loss": "nan", "text": "two\nlines\\x1b", "rate": None}


def log_lines(*, debug: bool) -> list[str]:
    logger = logging.getLogger("strop.somewhere")
    err = io.StringIO()
    with contextlib.redirect_stderr(err), terminal_log(debug=debug):
        for number in range(3):
            try:
                raise KeyError(f"row {number}")
            except KeyError:
                logger.exception("episode %d failed", number)
        logger.info("not for the terminal")
    return err.getvalue().splitlines()


def test_warnings_of_one_kind_are_shown_once_without_tracebacks() -> None:
    assert log_lines(debug=False) == [
        "warning: episode 0 failed: KeyError: 'row 0' (others like it are not shown; --debug shows all)"
    ]


def test_debug_shows_every_warning_with_its_traceback() -> None:
    lines = log_lines(debug=True)
    assert sum(line.startswith("Traceback") for line in lines) == 3


def test_the_notice_of_torch_fx_reaches_no_handler_while_a_command_runs() -> None:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    fx, keep = logging.getLogger("torch.fx._symbolic_trace"), Keep()
    fx.addHandler(keep)  # torch's own loggers have handlers of their own and do not propagate
    try:
        with terminal_log(debug=True):
            fx.warning("is_fx_tracing will return true for both")
            fx.warning("another")
        fx.warning("is_fx_tracing afterwards")
    finally:
        fx.removeHandler(keep)
    assert seen == ["another", "is_fx_tracing afterwards"]
