"""Python's garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_frozen = False
"""`settled` has frozen objects. Python counts frozen objects one by one, a tenth of a second for a million."""


@contextmanager
def settled() -> Iterator[None]:
    """Freeze all objects that exist by now: inside, garbage is looked for only among later ones.

    Libraries leave half a million objects, and a look at all of them takes a third of a second, in a small run every
    two seconds. Where a caller has frozen objects, nothing is done.
    """
    global _is_frozen
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
