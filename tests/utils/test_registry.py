"""Things by name: what is known, what is taken, and what an unknown name is told."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from strop.utils import registry
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
    with pytest.raises(ValueError, match=r"known: a, b\. One of your own must"):
        things["one"]
    things.register("vllm")(two)
    with pytest.raises(
        ValueError,
        match=r"known: a, b, vllm\. Did you mean vllm\? One of your own must .* starts$",
    ):
        things["vlm"]
    assert "one" not in things
    assert things.get("one") is None


def test_an_unknown_name_is_told_where_packages_bring_one() -> None:
    things: Registry[Callable[[], int]] = Registry("thing", group="strop.things")
    with pytest.raises(
        ValueError,
        match=r"known: none\. One of your own must be registered under this name before the run starts, or be an entry "
        r"point \(strop\.things\) of an installed package$",
    ):
        things["one"]


def test_a_built_in_name_is_no_name_of_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    things: Registry[Callable[[], int]] = Registry("thing", {"inside": one}, group="strop.things")
    things.check_built_in("inside", one)
    things.check_built_in("elsewhere")
    things.register("elsewhere")(two)
    for name, built_in in (("inside", two), ("elsewhere", None)):
        with pytest.raises(
            ValueError, match=rf"thing '{name}' is built in, and .*\.\w+ is registered under the same"
        ):
            things.check_built_in(name, built_in)
    entry = EntryPoint("inside", "its_things", "strop.things")
    monkeypatch.setattr(registry, "packaged", lambda group: {"inside": (entry,)})
    with pytest.raises(
        ValueError, match=r"an entry point \(strop.things\) of the installed package its_things"
    ):
        things.check_built_in("inside", one)


def test_a_package_that_exits_while_it_is_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_things.py").write_text("raise SystemExit('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("one", "exiting_things", "strop.things")
    monkeypatch.setattr(registry, "packaged", lambda group: {"one": (entry,)})
    things: Registry[Callable[[], int]] = Registry("thing", group="strop.things")
    with pytest.raises(ValueError, match="which cannot be imported: SystemExit: no licence"):
        things["one"]


def test_where_names_may_be_replaced_the_last_one_counts() -> None:
    things: Registry[Callable[[], int]] = Registry("thing", replaceable=True)
    things.register("it")(one)
    things.register("it")(two)
    assert things["it"] is two
