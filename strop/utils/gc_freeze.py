"""Python's garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Freeze all objects that exist by now: inside, garbage is looked for only among later ones.

    Libraries leave half a million objects, and a look at all of them takes a third of a second, in a small run every
    two seconds. Where a caller has frozen objects, nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
