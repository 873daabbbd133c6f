"""Overrides such as `rollout.temperature=0.7`, read with Hydra's grammar."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException

from strop.config.schema import current_key
from strop.config.wrong_values import text_in_list
from strop.utils.shell_words import shell_word


@dataclass(frozen=True, kw_only=True)
class Override:
    """One override of the command line."""

    kind: Literal["set", "add", "reset"]
    """`key=value`, `+key=value`, `~key`."""
    key: str
    """The full key, with dots, under the name that it has now."""
    value: Any
    """The plain value; None for a reset."""
    text: str
    """As it was typed."""


_NO_TEXTS = ("true", "false", "null", "inf", "nan", "none")
"""Words that the grammar, or a reader, takes for something else without quotes."""


def _spelling_advice(key: str, value: str) -> str:
    """Advice on writing a value that the grammar does not take."""
    if value.endswith(","):
        return "leave out the comma at its end"
    if value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return f"names have no quotes here, as in {shell_word(f'{key}={_in_grammar(json.loads(value))}')}"
    if re.fullmatch(r"\w+=[^=]+", value):
        return f"an entry of a mapping is written {key}.{value}"
    whole = f"{key}={_with_quotes(value)}"
    try:
        _parser().parse_override(whole)
    except HydraException:
        whole = f'{key}="..."'
    return f"put a value with special characters in quotes, within those of the whole: {shell_word(whole)}"


def _with_quotes(value: str) -> str:
    """A value with quotes around those of its texts that have special characters."""
    if value[:1] not in ("{", "["):
        return text_in_list(value)
    return re.sub(r"[^\[\]{},]+", lambda part: _part_with_quotes(part[0], value[0] == "{"), value)


def _part_with_quotes(part: str, is_in_mapping: bool) -> str:
    name, colon, text = part.partition(":") if is_in_mapping and ":" in part else ("", "", part)
    text = text.strip()
    is_plain = not text or text[0] in "'\"" or re.fullmatch(r"[\w.+-]+", text)
    return f"{name}{colon}{text if is_plain else text_in_list(text)}"


def override_text(key: str, value: object) -> str:
    """The override that gives a key this plain value."""
    is_word = isinstance(value, str) and re.fullmatch(r"[a-z][a-z_]*", value) and value not in _NO_TEXTS
    return f"{key}={value if is_word else _in_grammar(value)}"


def _in_grammar(value: object) -> str:
    """A value of JSON in Hydra's grammar."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_in_grammar(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_in_grammar, value))}]"
    return json.dumps(value)


_KINDS: dict[OverrideType, Literal["set", "add", "reset"]] = {
    OverrideType.CHANGE: "set",
    OverrideType.ADD: "add",
    OverrideType.FORCE_ADD: "add",
    OverrideType.DEL: "reset",
}


@cache
def _parser() -> OverridesParser:
    """Hydra's parser: to make one takes longer than to parse an override."""
    return OverridesParser.create()


def parse_override(text: str) -> Override:
    """The override that a text of the command line stands for.

    Raises:
        ValueError: the text does not follow the grammar, or asks for what only a sweep can do.
    """
    key = text.split("=", 1)[0]
    if "=" not in text and not text.startswith("~"):
        is_file = text.endswith((".yaml", ".yml"))
        hint = (
            f"give a file of settings with --config {text}"
            if is_file
            else "write key=value, as in trainer.seed=1"
        )
        raise ValueError(f"{text!r} is not an override: {hint}")
    if not key.strip():
        raise ValueError(
            f"{text!r} has no key: write key=value, as in trainer.seed=1, without spaces around ="
        )
    try:
        parsed = _parser().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        way = _spelling_advice(key, text.partition("=")[2].strip())
        raise ValueError(f"the override {text!r} cannot be read ({reason}): {way}") from error
    if parsed.is_sweep_override():
        raise ValueError(
            f"the override {text!r} is a sweep over several runs: give it to `strop sweep`; for a list, write "
            f"'{key}=[{'...' if '(' in text else text.partition('=')[2]}]'"
        )
    if parsed.package is not None:
        raise ValueError(f"the override {text!r} names a package after @; write the full key instead")
    kind = _KINDS[parsed.type]
    value = parsed.value()
    typed = text.partition("=")[2].strip().lower()
    if typed in (".inf", "+.inf", "-.inf"):  # as in YAML
        value = float(typed.replace(".", ""))
    if kind == "reset" and "=" in text:
        raise ValueError(f"the override {text!r} goes back to the default: write it without a value, {key}")
    key = current_key(parsed.key_or_group.replace("/", "."))
    return Override(kind=kind, key=key, value=value, text=text)
