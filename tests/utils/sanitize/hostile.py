"""Values that once ended a run, or could: used by the tests of every door."""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from hypothesis import strategies as st

LONE = "half a pair \ud83d"
ESCAPES = "\x1b[31m\x9b2J\x00\x07 \u202egnp.exe"


class Raises:
    """Every question is answered with an exception."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __str__(self) -> str:
        raise SystemExit(3)

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("no attribute")

    def __len__(self) -> int:
        raise OSError


class Lies:
    """Says that it is a text."""

    __class__ = str  # type: ignore[assignment]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Shouts(str):
    def __str__(self) -> str:
        raise ValueError("no")

    def translate(self, *_: object) -> str:
        raise ValueError("no")

    def encode(self, *_: object, **__: object) -> bytes:
        raise ValueError("no")


def cycle() -> list[Any]:
    made: list[Any] = [1]
    made.append({"again": made})
    return made


def deep(levels: int = 5000) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def doubling(levels: int = 60) -> list[Any]:
    """2^60 leaves in sixty lists."""
    made: list[Any] = [0]
    for _ in range(levels):
        made = [made, made]
    return made


MAKERS: dict[str, Callable[[], Any]] = {
    "lone surrogate": lambda: LONE,
    "lone surrogate in a key": lambda: {LONE: {"\udc00": "\ud800" * 3}, chr(0xD800): 1, chr(0xD801): 2},
    "control characters": lambda: ESCAPES,
    "integer of 5,000 digits": lambda: 10**5000,
    "negative integer of 400 digits": lambda: -(10**400),
    "float that overflows float32": lambda: 1e300,
    "not a number": lambda: [float("nan"), float("inf"), {"x": -float("inf")}],
    "numbers of numpy": lambda: [np.float32("inf"), np.longdouble(1), np.array([[1]]), np.bool_(1), np.str_(LONE)],
    "decimals and fractions": lambda: [decimal.Decimal("1e999999"), fractions.Fraction(10**5000, 3), 1 + 2j],
    "cycle": cycle,
    "deep": deep,
    "doubling": doubling,
    "objects that raise": lambda: [Raises(), Lies(), Mute(), Shouts("x\ud800"), {Raises(): 1, Mute(): 2}],
    "keys that are no text": lambda: {1: "a", "1": "b", None: 0, (1, 2): 3, 2.5: 4, 10**5000: 5, float("nan"): 6},
    "bytes and sets": lambda: [b"\xff\x00" * 100, {3, 1, "a"}, frozenset({LONE}), memoryview(b"abc")],
    "long text": lambda: "x" * (1 << 21),
}  # fmt: skip

texts = st.text(st.characters(codec=None, categories=None), max_size=20) | st.sampled_from(
    [LONE, ESCAPES, "a\r\n\tb"]
)
"""Any code points, lone surrogates among them."""
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=5)
    | st.integers(0, 6).map(lambda n: [10**5000, -(10**400), 1e300, Raises(), Lies(), Mute(), Shouts("y")][n])
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
