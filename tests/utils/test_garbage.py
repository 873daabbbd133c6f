"""Garbage of a run, and what was there before it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from strop.utils import gc_freeze
from strop.utils.gc_freeze import RARELY, look_rarely, settled


class Ring:
    """It is garbage as soon as nobody else holds it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_freeze, "_is_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_there_is_passed_over_and_what_comes_is_not() -> None:
    earlier, before = weakref.ref(Ring()), Ring()
    stays = weakref.ref(before)
    with settled():
        assert earlier() is None, "garbage would stay to the end"
        assert gc.get_freeze_count() > 1000
        del before
        within = weakref.ref(Ring())
        gc.collect()
        assert within() is None
        assert stays() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert stays() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_an_error_leaves_nothing_frozen_and_what_a_caller_froze_stays_so() -> None:
    with pytest.raises(ValueError, match="within"), settled():
        raise ValueError("within")
    assert gc.get_freeze_count() == 0
    gc.freeze()
    for _ in range(2):
        with settled():
            pass
        assert gc.get_freeze_count() > 1000
    gc.unfreeze()
    with settled():
        assert gc.get_freeze_count() > 1000, "what a caller has thawed is frozen again"
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_a_run_that_has_settled_looks_as_often_as_python_does() -> None:
    usual = gc.get_threshold()
    look_rarely()
    assert gc.get_threshold() == (RARELY, *usual[1:])
    with settled():
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual


def test_a_command_starts_with_few_looks() -> None:
    program = """if True:
        import gc, sys
        from strop.cli.main import main
        sys.argv[1:] = ["--version"]
        main()
        print(gc.get_threshold())
    """
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1].startswith(f"({RARELY}, ")
