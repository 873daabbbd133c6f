"""Roles of a colocated group, by the names that verl's programs give."""

from __future__ import annotations

import pytest

from strop.controller.verl_groups import named_roles


def test_roles_of_a_colocated_group_are_found_by_name() -> None:
    found = {"actor": 1, "critic": 2, "rollout": 3}
    assert named_roles({"rollout", "actor"}, found) == {"actor": 1, "rollout": 3}
    with pytest.raises(
        ValueError, match="no role 'reference' in this group; its roles: actor, critic, rollout"
    ):
        named_roles({"actor", "reference"}, found)
