"""How Python looks for garbage while a run goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """What there is by now stays until the end: garbage is looked for only in what comes later.

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
