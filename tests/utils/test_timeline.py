"""The recorder of a process's spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from strop.utils import timeline
from strop.utils.timeline import CONTROLLER, Track


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    yield
    timeline.stop()


def test_nothing_is_kept_while_nothing_is_recorded() -> None:
    with timeline.span("a", "call"):
        pass
    assert timeline.start()
    assert not timeline.start()
    assert timeline.stop() == []


def test_spans_have_track_facts_and_order_of_their_ends() -> None:
    timeline.start()
    actor = Track("actor", 1)
    with (
        timeline.span("outer", "phase"),
        timeline.on_track(actor),
        timeline.span("inner", "compute", tokens=7),
    ):
        pass
    inner, outer = timeline.stop()
    assert (inner.name, inner.track, inner.facts) == ("inner", Track("actor", 1), {"tokens": 7})
    assert (outer.name, outer.track, outer.facts) == ("outer", CONTROLLER, {})
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


def test_a_block_that_fails_is_a_span() -> None:
    timeline.start()
    with contextlib.suppress(ZeroDivisionError), timeline.span("a", "call"):
        _ = 1 / 0
    assert [span.name for span in timeline.stop()] == ["a"]


def test_other_profilers_see_the_spans_of_this_recording_alone() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def mark(name: str) -> Iterator[None]:
        seen.append(f"<{name}")
        yield
        seen.append(f"{name}>")

    timeline.start()
    timeline.mark_in((mark,))
    with timeline.span("a", "call"):
        seen.append("a")
    timeline.stop()
    timeline.start()
    with timeline.span("b", "call"):
        pass
    assert seen == ["<a", "a", "a>"]
