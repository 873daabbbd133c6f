"""Files that somebody else may have written: opened only when they are files, read up to a limit, parsed up to a depth.

A name in a received folder may be a pipe that nobody writes, a device without an end, or a hole of a terabyte, and a
document may be nested until a parser's stack ends. What is wrong is an OSError (about the file) or a ValueError (about
its content), each with a sentence, as for files that are missing or damaged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from strop.utils.sanitize.values import is_deeper

MAX_DEPTH = 100
"""Levels of lists and mappings in a document."""
MAX_YAML_BYTES = 2**20
"""A reader of YAML takes seconds for that."""
MAX_YAML_VALUES = 200_000
"""Values of a YAML document with every alias written out."""
MAX_JSON_BYTES = 2**28
"""Of a document that is read whole."""
MAX_LINE_BYTES = 2**28
_READ_OTHERWISE = re.compile(r"\t|(?:^|[\s\[{,])[!?]|[|>][-+\d]*#")
"""In a text that libyaml and the parser in Python may read otherwise: tabs, tags, keys behind a question mark, and a
comment at once behind the sign of a block."""
_CHUNK_BYTES = 2**24
_SPARSE_FROM_BYTES = 2**34
_MIN_STORED_SHARE = 0.01
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFile(OSError):
    """The name belongs to a pipe, a device, a directory or the like."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        super().__init__(errno.EINVAL, f"it is {kind} and no file", str(path))


class TooLarge(OSError):
    """A file with more bytes than one of its kind can have."""

    def __init__(self, path: Path, num_bytes: int, limit: int) -> None:
        size = f"it has {num_bytes / 2**20:,.1f} MiB, and at most {limit / 2**20:g} MiB are read"
        super().__init__(errno.EFBIG, size, str(path))


def open_regular(path: Path | str) -> BufferedReader:
    """A file for reading; nothing that is no file is opened, so nothing waits.

    Raises:
        NotAFile: the name belongs to something else.
        TooLarge: nearly all of a huge file is a hole: whoever reads it reads zeros for hours.
        OSError: it cannot be opened.
    """
    path = Path(path)
    try:
        _check_regular(path, path.stat())  # opening a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:  # a name with a zero byte
        raise FileNotFoundError(errno.ENOENT, str(error), str(path)) from None
    try:
        _check_regular(path, os.fstat(descriptor))  # it may be another one by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: Path | str) -> int:
    """The size of a file that a library is about to open by its name, in bytes.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFile(path, status.st_mode)
    stored = status.st_blocks * 512
    if status.st_size > _SPARSE_FROM_BYTES and stored < status.st_size * _MIN_STORED_SHARE:
        raise TooLarge(path, status.st_size, _SPARSE_FROM_BYTES)


def read_bytes(path: Path | str, *, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file.

    Raises:
        TooLarge: there is more than `limit` bytes.
        OSError: as `open_regular`.
    """
    content = bytearray()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while size <= limit and (chunk := file.read(_CHUNK_BYTES)):
            content += chunk
            size = max(size, len(content))
    if size > limit:
        raise TooLarge(Path(path), size, limit)
    return bytes(content)


def read_text(path: Path | str, *, limit: int = MAX_JSON_BYTES) -> str:
    """The text of a UTF-8 file, without the mark that some editors put in front.

    Raises:
        UnicodeDecodeError: it is no UTF-8.
        OSError: as `read_bytes`.
    """
    return read_bytes(path, limit=limit).decode("utf-8-sig")


def read_json(path: Path | str, *, limit: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file.

    Raises:
        ValueError: as `parse_json`, or it is no UTF-8.
        OSError: as `read_bytes`.
    """
    return parse_json(read_text(path, limit=limit))


def lines_of(file: BufferedReader, path: Path | str, *, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of an open file with their ends.

    Raises:
        TooLarge: a line is longer than `limit` bytes.
    """
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise TooLarge(Path(path), len(line), limit)
        yield line


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is none.
        ValueError: it is nested too deeply, has a number of thousands of digits, or is no UTF-8.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep() from None
    # A text with few brackets cannot be deep; most lines of data are such.
    if isinstance(text, bytes):
        num_brackets = text.count(b"[") + text.count(b"{")
    else:
        num_brackets = text.count("[") + text.count("{")
    if num_brackets > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise too_deep()
    return value


def too_deep() -> ValueError:
    """The error for a document that is nested too deeply."""
    return ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _events_of(text: str) -> deque[yaml.Event] | None:
    """The events of a text by libyaml; None where the parser in Python is to read it. libyaml takes minutes for
    thousands of levels, and is left at the first that is too deep."""
    if not yaml.__with_libyaml__ or _READ_OTHERWISE.search(text):
        return None
    events, depth = deque[yaml.Event](), 0
    with contextlib.suppress(yaml.YAMLError):
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            events.append(event)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                return None
        return events
    return None


class BoundedLoader(yaml.SafeLoader):
    """Plain values only, no deeper than MAX_DEPTH, and no more than MAX_YAML_VALUES with every alias written out.

    A text is taken apart by libyaml, where PyYAML has it, in a tenth of the time. What that refuses, the parser in
    Python reads, whose errors have words (strop/config/yaml_text.py); and what the two do not read alike.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._events = _events_of(text)

    def check_event(self, *choices: Any) -> bool:
        """True if the next event is one of these; of any kind, where none is named."""
        if self._events is None:
            return bool(super().check_event(*choices))
        return bool(self._events) and (not choices or isinstance(self._events[0], choices))

    def peek_event(self) -> yaml.Event | None:
        """The next event."""
        if self._events is None:
            event: yaml.Event | None = super().peek_event()  # type: ignore[no-untyped-call]
            return event
        return self._events[0] if self._events else None

    def get_event(self) -> yaml.Event | None:
        """The next event, which is then behind."""
        if self._events is None:
            event: yaml.Event | None = super().get_event()  # type: ignore[no-untyped-call]
            return event
        return self._events.popleft() if self._events else None

    def get_single_node(self) -> yaml.Node | None:
        """The document, checked before any value is made of it."""
        node = super().get_single_node()
        if node is not None:
            _check_expanded(node)
        return node


def _check_expanded(root: yaml.Node) -> None:
    """Count the values that a document stands for, each node once, from the leaves up."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    open_nodes: set[int] = set()
    stack = [root]
    while stack:
        node = stack[-1]
        key = id(node)
        inner = [] if key in sizes else _inner(node)
        if key in sizes or not inner:
            sizes.setdefault(key, 1)
            depths.setdefault(key, 0)
            stack.pop()
            continue
        if key not in open_nodes:
            open_nodes.add(key)
            if any(id(child) in open_nodes and id(child) not in sizes for child in inner):
                raise yaml.MarkedYAMLError(problem="a value contains itself", problem_mark=node.start_mark)
            stack += [child for child in inner if id(child) not in sizes]
            continue
        stack.pop()
        sizes[key] = 1 + sum(sizes[id(child)] for child in inner)
        depths[key] = 1 + max(depths[id(child)] for child in inner)
        if sizes[key] > MAX_YAML_VALUES:
            problem = f"its aliases stand for more than {MAX_YAML_VALUES} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if depths[key] > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=str(too_deep()), problem_mark=node.start_mark)


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def parse_yaml(text: str, *, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """The plain value of a YAML text.

    Raises:
        yaml.YAMLError: it is no YAML, nested too deeply, or stands for too much.
        ValueError: a value is none of the type that it claims.
    """
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem=str(too_deep())) from None
