"""What the estimator of process rewards asks for (torch-free)."""

from __future__ import annotations

from strop.algorithms.registry import Declaration, Recipes

RECIPES = Recipes(
    estimators={
        "prime": Declaration(
            needs=frozenset({"group_ids", "response_mask", "rewards", "process_rewards"}),
            settings=frozenset({"gamma"}),
            own={"process_weight": 1.0, "outcome_weight": 1.0, "process_norm": True, "whiten": True},
            is_group_relative=True,
        )
    },
    functions="strop.roles.prime",
)
