"""Secrets that this process knows, and texts without them.

Whoever reads a key says so with `remember_secret`, in every process that reads it. Values of fewer than eight
characters are not looked for: they would be found in ordinary words and numbers. `is_secret` recognises one among
settings, by its name or by its form.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
MIN_CHARS = 8
"""Shorter values are not redacted."""
_MAX_DIGITS = 16  # numbers up to this length are sizes, ids and seeds more often than keys
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:(?:API|ACCESS|SECRET|PRIVATE|AUTH|WANDB|SWANLAB|COMET|CLEARML)[_.-]?KEY|TOKEN|SECRET|PASSWORD"
    r"|PASSWD|AUTHORIZATION|COOKIE)$",
    re.IGNORECASE,
)
_KEY_NAME = re.compile(r"(?:API|ACCESS|AUTH|HUB|HF|GITHUB|SESSION)[_.-]?TOKEN$", re.IGNORECASE)
_TOKEN_NAME = re.compile(r"TOKEN$", re.IGNORECASE)  # stop_token and eos_token are no keys
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.~+/=-]{16,}")
_PASSWORD = re.compile(r"://[^/\s:@]*:(?P<password>[^/\s@]+)@")
"""In an address."""
_SECRET_FORM = re.compile(
    r"(?<![A-Za-z0-9])(?:"  # keys of well-known services
    r"sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abpr]-[\w-]{16,}|AKIA[0-9A-Z]{12,}|AIza[\w-]{30,}|eyJ[\w-]+\.[\w-]+\.[\w-]+"
    r")"
    rf"|{_PASSWORD.pattern}"
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
        _forms = tuple(sorted({*_forms, *_spellings(value)}, key=lambda form: (-len(form), form)))


def remember_named(values: Mapping[str, str]) -> None:
    """Remember the values whose names end like those of keys: `..._API_KEY`, `..._TOKEN`, `..._SECRET`, `..._PASSWORD`,
    `Authorization`. Given the environment, that covers what a library or a user's file reads by itself."""
    for name, value in values.items():
        if _SECRET_NAME.search(name):
            remember_secret(str(value))


def is_secret(name: str, value: object) -> bool:
    """True if a setting of this name holds a key or a password, or its value has the form of a key."""
    if not isinstance(value, str) or not value.strip() or value.lstrip().startswith("$"):
        return False
    if _SECRET_FORM.search(value):
        return True
    if _TOKEN_NAME.search(name) and not (_KEY_NAME.search(name) or _OPAQUE.fullmatch(value.strip())):
        return False
    return _SECRET_NAME.search(name) is not None


def secrets_in(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(full key, value) of each secret among nested settings; a list has the name of its key."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from secrets_in(value, f"{key}.{name}" if key else str(name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from secrets_in(value, key)
    elif is_secret(key, settings):
        yield key, settings


def without_secrets(settings: object, key: str = "") -> Any:
    """Nested settings with `[redacted]` in place of each secret."""
    if isinstance(settings, Mapping):
        return {
            name: without_secrets(value, f"{key}.{name}" if key else str(name))
            for name, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [without_secrets(value, key) for value in settings]
    return REDACTED if is_secret(key, settings) else settings


def remember_secrets_in(settings: object, key: str = "") -> None:
    """Remember each secret among nested settings."""
    for _, value in secrets_in(settings, key):
        remember_secret(value)
        for form in _SECRET_FORM.finditer(value):
            remember_secret(form["password"] or form[0])


def redacted(text: str) -> str:
    """The text with `[redacted]` in place of every known secret."""
    for form in _forms:
        if form in text:
            text = text.replace(form, REDACTED)
    return text


def _spellings(secret: str) -> set[str]:
    data = secret.encode("utf-8", "replace")
    quoted = {quote(data, safe=""), quote(data), quote_plus(data)}
    lower = {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted_form) for quoted_form in quoted}
    escaped = json.dumps(secret)[1:-1]
    forms = {secret, escaped, escaped.replace("/", "\\/"), *quoted, *lower}
    for offset in range(3):  # whatever stands before it, such as a user name and a colon
        encoded = base64.b64encode(b"\0" * offset + data).rstrip(b"=").decode("ascii")
        inner = encoded[
            (offset * 8 + 5) // 6 : (offset + len(data)) * 8 // 6
        ]  # what no neighbour has a bit of
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {form for form in forms if len(form) >= MIN_CHARS}
