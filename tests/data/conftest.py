"""The core without what joins it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.base import guests


@pytest.fixture
def core_alone(tmp_path: Path) -> Iterator[None]:
    """As if the folders of all guests were taken away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guests, "PACKAGE", tmp_path)
        guests.guests.cache_clear()
        guests.targets.cache_clear()
        yield
    guests.guests.cache_clear()
    guests.targets.cache_clear()
