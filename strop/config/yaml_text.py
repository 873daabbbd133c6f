"""YAML in and out, so that what is written reads back equal, and what is typed means what it says.

PyYAML follows YAML 1.1: it reads 1e-5 as text, `no` and `off` as false, 1:30 as ninety, a date as an object,
and keeps the last of two equal keys. Here 1e-5 is a number, only true and false are booleans, times and dates
are text, and an equal key is an error. Text that either reading would take for something else is quoted.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml

from strop.utils.safe_read import BoundedLoader, parse_yaml

_FLOAT = (
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        _FLOAT,
        list("-+0123456789."),
    ),
    ("tag:yaml.org,2002:merge", r"^<<$", ["<"]),
)


class _Loader(BoundedLoader):
    """Plain values only, in the spellings above."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ; equal ones are an error with their line."""
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key_node.value!r} appears twice in one mapping",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or the loader above would read as another type."""

    def ignore_aliases(self, data: object) -> bool:
        """Equal values are written out each time: a reader need not follow references."""
        return True


class _QuickDumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """The same by libyaml, in a quarter of the time; what it writes otherwise, `_WRITTEN_OTHERWISE` finds."""

    ignore_aliases = _Dumper.ignore_aliases


_WRITTEN_OTHERWISE = re.compile(r"[^ -~\n]|\\|\? |'':")
"""In a text of libyaml's that the dumper in Python may write otherwise: escapes, keys behind a question mark, and empty
ones."""


def _text(dumper: yaml.representer.SafeRepresenter, text: str) -> yaml.ScalarNode:
    """Text with control characters and the rarer line breaks goes in double quotes, escaped."""
    style = None if text.replace("\n", "").isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _dumper in (_Dumper, _QuickDumper):
    _dumper.add_representer(str, _text)
for _tag, _pattern, _first in _RESOLVERS:
    for _reader_or_writer in (_Loader,) if _tag.endswith(":merge") else (_Loader, _Dumper, _QuickDumper):
        _reader_or_writer.add_implicit_resolver(_tag, re.compile(_pattern), _first)


_INDENTATION = "the indentation does not fit: the keys of one section begin in the same column"
_IN_WORDS = (
    (r"expected <block end>, but found", _INDENTATION),
    (
        "mapping values are not allowed here",
        f"`key: value` cannot stand here: {_INDENTATION}; and a value with `: ` in it needs quotes",
    ),
    (r"found character '\\t'", "a tab cannot indent: use spaces"),
    (r"found character '(.)' that cannot start any token", r"a value that begins with \1 needs quotes"),
    (r"expected ',' or '(.)', but got", r"a `\1` or a comma is missing before this place"),
    ("found unexpected end of stream", "a quote that was opened before is not closed"),
    (r"could not find expected ':'", "a key has no `:` after it"),
)
"""PyYAML's messages for common mistakes, and the mistakes in words."""


def _in_words(problem: str) -> str:
    for pattern, words in _IN_WORDS:
        if match := re.match(pattern, problem):
            return match.expand(words)
    return problem


def parse(text: str, name: str) -> Any:
    """The plain value of a YAML text; `name` is what an error calls it.

    Raises:
        ValueError: the text is not YAML, with line and column.
    """
    try:
        return parse_yaml(text, loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        location = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{name}{location}: {_in_words(error.problem or str(error))}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from error


def compose(text: str) -> yaml.Node | None:
    """The nodes of a YAML text, which know their places."""
    return yaml.compose(text, Loader=_Loader)


def dump(value: object) -> str:
    """The YAML text of a plain value (None, bool, int, float, str, list, dict), keys in their order."""
    if isinstance(value, dict):
        with contextlib.suppress(UnicodeEncodeError):  # half a character, which is escaped
            text = _dumped(value, _QuickDumper)
            if not _WRITTEN_OTHERWISE.search(text):
                return text
    return _dumped(value, _Dumper)


def _dumped(value: object, dumper: Any) -> str:
    text: str = yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
