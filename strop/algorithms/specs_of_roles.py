"""What the estimators of critic and process reward model ask for (torch-free)."""

from __future__ import annotations

from strop.algorithms.registry import Declaration, Recipes

RECIPES = Recipes(
    estimators={
        "gae": Declaration(
            needs=frozenset({"token_level_rewards", "values", "response_mask"}),
            settings=frozenset({"gamma", "lam"}),
        ),
        "prime": Declaration(
            needs=frozenset({"group_ids", "response_mask", "rewards", "process_rewards"}),
            settings=frozenset({"gamma"}),
            own={"process_weight": 1.0, "outcome_weight": 1.0, "process_norm": True, "whiten": True},
            is_group_relative=True,
        ),
    },
    functions="strop.algorithms.role_functions",
)
