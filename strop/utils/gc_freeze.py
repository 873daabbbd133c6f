"""Python's garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 10_000
"""New objects between two looks for garbage while a command starts; Python's own number is 700 to 2,000."""

_thresholds: tuple[int, int, int] | None = None
"""Python's own, where `look_rarely` has changed them."""
_is_frozen = False
"""`settled` has frozen objects. Python counts frozen objects one by one, a tenth of a second for a million."""


def look_rarely() -> None:
    """Look for garbage less often, until a run has settled.

    What a command imports stays, and looking at it again and again took a seventh of the time of its imports.
    """
    global _thresholds
    _thresholds = gc.get_threshold()
    gc.set_threshold(RARELY, *_thresholds[1:])


@contextmanager
def settled() -> Iterator[None]:
    """Freeze all objects that exist by now: inside, garbage is looked for only among later ones.

    Libraries leave half a million objects, and a look at all of them takes a third of a second, in a small run every
    two seconds. Where a caller has frozen objects, nothing is done.
    """
    global _is_frozen, _thresholds
    if _thresholds is not None:
        gc.set_threshold(*_thresholds)
        _thresholds = None
    if _is_frozen or gc.get_freeze_count() > 0:
        yield
        return
    gc.collect()
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        gc.unfreeze()
        _is_frozen = False
