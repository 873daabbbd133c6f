"""Random numbers as pure functions of a key and a position.

No generator object is passed around and no state is advanced: a number depends only on the seed, on what
it is for, and on where it is used, never on the order in which requests arrive or finish. The numbers are
made of integer arithmetic on 64 bits, so they are the same on every machine and library version.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""Increment of splitmix64: 2**64 divided by the golden ratio, made odd."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def random_key(seed: int, purpose: str, *parts: str | int) -> int:
    """A 64-bit key that depends on the seed, the purpose and each part, in their order and type.

    Every part is encoded with its type and length, so `("a", "bc")` and `("ab", "c")`, or `1` and `"1"`,
    give unrelated keys.

    Args:
        seed: the seed of the run, any integer.
        purpose: what the numbers are for, for example `"sampling"`.
        parts: what tells the uses of one purpose apart, for example prompt id and sample index.

    Raises:
        TypeError: a part is neither a string nor an integer.
    """
    state = hashlib.blake2b(digest_size=8)
    for part in (seed, purpose, *parts):
        state.update(_encode(part))
    return int.from_bytes(state.digest(), "little")


def _encode(part: str | int) -> bytes:
    """Type letter, length, colon, content: no two different sequences of parts share an encoding."""
    if isinstance(part, str):
        kind, content = b"s", part.encode("utf-8", "surrogatepass")
    else:
        try:
            if isinstance(part, bool | np.bool_):
                raise TypeError
            kind, content = b"i", str(operator.index(part)).encode()
        except TypeError:
            raise TypeError(
                f"a random key is made of strings and integers, got {part!r} ({type(part).__name__}); "
                f"pass an id or a position"
            ) from None
    return kind + str(len(content)).encode() + b":" + content


def _words(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Output number `position` (from 0) of the splitmix64 stream that starts at `key`, elementwise."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant; numpy warns for scalars
        steps = np.asarray(positions, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        words = np.asarray(keys, dtype=np.uint64) + steps * _GAMMA
        words = (words ^ (words >> np.uint64(30))) * _MIX_1
        words = (words ^ (words >> np.uint64(27))) * _MIX_2
        return np.asarray(words ^ (words >> np.uint64(31)), dtype=np.uint64)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform number per (key, position), strictly between 0 and 1.

    Args:
        keys: uint64 of any shape, from `random_key`.
        positions: int64 of a shape that broadcasts with `keys`; counts from 0 within a key.

    Returns:
        float64 of the broadcast shape: 52 random bits, centred in their cell, so that the logarithm of
        the number and of one minus the number are both finite.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (splitmix64).
    """
    words = _words(keys, positions)
    numbers = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(numbers, dtype=np.float64)


def permutation(key: int, n: int) -> NDArray[np.int64]:
    """The numbers 0..n-1 in an order that depends only on `key` and `n`: [n] int64.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"a permutation needs a length of at least 0, got {n}")
    words = _words(np.full(n, key, dtype=np.uint64), np.arange(n, dtype=np.int64))
    return np.argsort(words, kind="stable").astype(np.int64)
