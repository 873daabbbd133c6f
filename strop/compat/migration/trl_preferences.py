"""TRL's arguments of trainings on preferences: DPOTrainer, KTOTrainer and RewardTrainer."""

from __future__ import annotations

from typing import Any

from strop.compat.migration.outcomes import Facts, Outcome, UnreadableError, many, number, refuse, skip
from strop.compat.migration.trl_loop import argument

_LOSSES = ("sigmoid", "hinge", "ipo")


def preference_loss(key: str, value: Any, facts: Facts) -> Outcome:
    """The loss of pairs, of which TRL adds several with weights; `sft` imitates the better answer."""
    names = value if isinstance(value, list) else [value]
    given = argument(facts, "loss_weights")
    weights = [1.0] * len(names) if given is None else [number(weight) for weight in given]
    if len(weights) != len(names):
        raise UnreadableError(f"{len(names)} losses, and {len(weights)} loss_weights")
    together = dict(zip(names, weights, strict=True))
    imitation = together.pop("sft", 0.0)
    if len(together) != 1 or (name := next(iter(together))) not in _LOSSES or together[name] != 1:
        return refuse(
            f"prefer.loss is one of {', '.join(_LOSSES)}, with weight 1; prefer.nll_coef weighs `sft` beside it"
        )
    ours = {"prefer.loss": name}
    if not imitation:
        return many(ours)
    return many({**ours, "prefer.nll_coef": imitation}, "of an answer it is the mean over its tokens")


def starting_model(key: str, value: Any, facts: Facts) -> Outcome:
    """The model that the policy stays near."""
    model = next((facts.get(f"{kind}Trainer.model") for kind in ("DPO", "KTO") if key.startswith(kind)), None)
    if value in (None, "", model):
        return skip("the policy as it is in the beginning, in both")
    return refuse(
        "the policy stays near the model that it begins with: name that one in model.path, or begin with --from RUN"
    )
