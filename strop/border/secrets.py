"""Secrets that this process knows, and texts without them.

Whoever reads a key says so with `remember_secret`, in every process that reads it. Values of fewer than eight
characters are not looked for: they would be found in ordinary words and numbers.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Mapping
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
MIN_CHARS = 8
"""Shorter values are not redacted."""
_MAX_DIGITS = 16  # numbers up to this length are sizes, ids and seeds more often than keys
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:API[_-]?KEY|ACCESS[_-]?KEY|AUTH[_-]?KEY|TOKEN|SECRET|PASSWORD|PASSWD|AUTHORIZATION|COOKIE)$",
    re.IGNORECASE,
)

_lock = threading.Lock()
_remembered: set[str] = set()
_forms: tuple[str, ...] = ()
"""All spellings of all secrets, the longest first, so that none leaves a rest of another."""


def remember_secret(value: str) -> None:
    """Redact this value from now on, as it is, URL-quoted, inside JSON and inside base64 (as for basic auth)."""
    global _forms
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    if rest and scheme.lower() in ("bearer", "basic", "token"):
        value = rest.strip()
    if value in _remembered or len(value) < MIN_CHARS or (value.isdecimal() and len(value) <= _MAX_DIGITS):
        return
    with _lock:
        _remembered.add(value)
        _forms = tuple(
            sorted(
                {form for one in _remembered for form in _spellings(one)}, key=lambda form: (-len(form), form)
            )
        )


def remember_named(values: Mapping[str, str]) -> None:
    """Remember the values whose names end like those of keys: `..._API_KEY`, `..._TOKEN`, `..._SECRET`, `..._PASSWORD`,
    `Authorization`. Given the environment, that covers what a library or a user's file reads by itself."""
    for name, value in values.items():
        if _SECRET_NAME.search(name):
            remember_secret(str(value))


def redacted(text: str) -> str:
    """The text with `[redacted]` in place of every known secret."""
    for form in _forms:
        if form in text:
            text = text.replace(form, REDACTED)
    return text


def _spellings(secret: str) -> set[str]:
    data = secret.encode("utf-8", "replace")
    quoted = {quote(data, safe=""), quote(data), quote_plus(data)}
    lower = {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), one) for one in quoted}
    escaped = json.dumps(secret)[1:-1]
    forms = {secret, escaped, escaped.replace("/", "\\/"), *quoted, *lower}
    for offset in range(3):  # whatever stands before it, such as a user name and a colon
        encoded = base64.b64encode(b"\0" * offset + data).rstrip(b"=").decode("ascii")
        inner = encoded[
            (offset * 8 + 5) // 6 : (offset + len(data)) * 8 // 6
        ]  # what no neighbour has a bit of
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {form for form in forms if len(form) >= MIN_CHARS}
