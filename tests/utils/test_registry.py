"""Things by name: what is known, what is taken, and what an unknown name is told."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest

from strop.utils.registry import Registry


def one() -> int:
    return 1


def two() -> int:
    return 2


class Names(Enum):
    ONE = "one"


def test_a_name_stands_for_one_thing() -> None:
    things: Registry[Callable[[], int]] = Registry("thing", {"built_in": two})
    assert things.register(Names.ONE)(one) is one is things["one"]
    assert things.register("one")(one) is one  # again is no conflict
    with pytest.raises(
        ValueError, match=r"thing 'built_in' is already registered by .*\.two: choose .*\.one"
    ):
        things.register("built_in")(one)
    assert things["built_in"] is two


def test_an_unknown_name_is_told_the_known_ones() -> None:
    things: Registry[Callable[[], int]] = Registry("thing")
    with pytest.raises(ValueError, match="unknown thing 'one'; known: none"):
        things["one"]
    things.register("b")(one)
    things.register("a")(two)
    with pytest.raises(ValueError, match="unknown thing 'one'; known: a, b"):
        things["one"]
    with pytest.raises(ValueError, match=r"known: a, b\. A function"):
        things["one"]
    things.register("vllm")(two)
    with pytest.raises(ValueError, match=r"known: a, b, vllm\. Did you mean vllm\? A function of your own"):
        things["vlm"]
    assert "one" not in things
    assert things.get("one") is None


def test_where_names_may_be_replaced_the_last_one_counts() -> None:
    things: Registry[Callable[[], int]] = Registry("thing", replaceable=True)
    things.register("it")(one)
    things.register("it")(two)
    assert things["it"] is two
