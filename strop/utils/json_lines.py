"""One JSON array a line, for pipes and files. Byte strings come back as such; nothing is unpickled."""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import json
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from strop.utils.sanitize import storable
from strop.utils.sanitize.text import BROKEN, describe_object

_DIGITS_OF_A_FLOAT = 300
"""Decimals of other sizes are written as text: as numbers they would be 0, infinite, or of a million digits."""
_BYTES_TAG = "__bytes__"


def encode(message: list[Any]) -> bytes:
    """A message as one line.

    Raises:
        TypeError: a value inside is no plain data; the sentence names its type.
        ValueError: it is nested too deeply, within itself, or holds an integer of thousands of digits.
    """
    try:
        return json.dumps(message, default=_plain_or_refused, separators=(",", ":")).encode("ascii") + b"\n"
    except RecursionError:
        raise ValueError("a value that is nested too deeply cannot be written as JSON") from None


def decode(line: bytes) -> list[Any]:
    """The message of one line; byte strings are restored.

    Raises:
        ValueError: it is none.
    """
    try:
        message = json.loads(line, object_hook=_restore_bytes if _BYTES_TAG.encode() in line else None)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, list) or not message:
        raise ValueError(f"expected a JSON array, got {line[:100]!r}")
    return message


def plain(value: object) -> Any:
    """A value as a reader of such a line would have it; `storable` of it where JSON cannot say it."""
    try:
        return decode(encode([value])[:-1])[0]
    except (TypeError, ValueError, RecursionError):
        return storable(value)


def _plain(value: object) -> Any:
    """The nearest JSON value of something that JSON does not know."""
    if isinstance(value, bytes):
        return {_BYTES_TAG: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if (
        isinstance(value, decimal.Decimal)
        and value.is_finite()
        and abs(value.adjusted()) < _DIGITS_OF_A_FLOAT
    ):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (PurePath, uuid.UUID, decimal.Decimal)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return value.tolist()
    raise TypeError(f"a {type_name(value)} cannot be written as JSON")


def _plain_or_refused(value: object) -> Any:
    try:
        return _plain(value)
    except TypeError:
        raise
    except BROKEN as error:  # its own code failed
        raise TypeError(f"{describe_object(value)} cannot be written as JSON") from error


def type_name(value: object) -> str:
    """Dotted name of the type of a value; of a built-in type, the name alone."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _restore_bytes(value: dict[str, Any]) -> Any:
    if len(value) == 1 and isinstance(encoded := value.get(_BYTES_TAG), str):
        with contextlib.suppress(ValueError):  # a row may hold such a dictionary of its own
            return base64.b64decode(encoded, validate=True)
    return value
