from __future__ import annotations

import pytest

import strop


def test_public_names_arrive_on_first_use_and_unknown_ones_are_listed() -> None:
    assert strop.Trajectory.__module__ == "strop.trajectory"
    assert {"DataProto", "Prompt", "__version__"} <= set(dir(strop))
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it offers DataProto"):
        strop.nothing  # noqa: B018
