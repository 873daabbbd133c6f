"""TRL: the table of a trainer's arguments, and the migration of a script.

What becomes of each argument stands in trl.toml; what follows from several stands in trl_loop.py, trl_ppo.py,
trl_sources.py, and for the losses here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from strop.compat.migrate import engines, trl_loop, trl_ppo, trl_sources
from strop.compat.migrate.result import Facts, Outcome, Rule, UnreadableError, many, number, refuse, skip
from strop.compat.migrate.rules import functions_of
from strop.compat.migrate.source import Found
from strop.compat.migrate.tables import Migration, Table, apply_table, read_table
from strop.compat.migrate.trl_loop import COMMANDS, KINDS, argument

__all__ = ["COMMANDS", "KINDS", "migrate_trl", "trl_table"]

_PARTS = (engines, trl_loop, trl_ppo, trl_sources)


def trainer(key: str, value: object, facts: Facts) -> Outcome:
    """Settings that follow from the kind of a trainer, whatever its arguments say."""
    if value == "PPO":
        note = "one answer to each prompt, values from a critic, no dual clip, gradients never clipped"
        return many(trl_ppo.SETTINGS, note)
    if value == "Reward":
        return many({"prefer.loss": "reward"}, "a classifier with one label")
    return skip("its arguments say it all")


@cache
def trl_table(kind: str) -> Table:
    """The arguments of a trainer and its configuration, of one of KINDS."""
    table = read_table("trl", functions_of(globals(), *map(vars, _PARTS)), kind=kind)
    if kind != "PPO":
        return table
    return dataclasses.replace(table, rules={key: _for_both(rule) for key, rule in table.rules.items()})


def migrate_trl(
    settings: Sequence[Found], kind: str, *, processes: int = 1, engine: object = None
) -> Migration:
    """Migration of every argument of a TRL script.

    Args:
        settings: its arguments.
        kind: of KINDS.
        processes: with how many the script was started.
        engine: rollout.engine, where it is given beside them.
    """
    table = trl_table(kind)
    defaults = {**table.defaults, f"{kind}Config.delta": None, "processes": processes}
    write_out = list(table.written_out)
    values = {setting.key: setting.value for setting in settings if not setting.unresolved}
    theirs = "vllm" if values.get(f"{kind}Config.use_vllm") is True else None
    defaults[engines.ENGINE] = engines.engine_of(theirs, engine)
    if kind in ("GRPO", "RLOO") and values.get(f"{kind}Config.use_vllm") is True:
        write_out.append(f"{kind}Config.vllm_importance_sampling_correction")
    settings = [_in_config(setting, kind, table) for setting in settings]
    start = Found(key="processes", value=processes, place="--processes")
    return apply_table([start, *settings], table, defaults=defaults, write_out=write_out)


_NAMES_OF_TODAY = {"evaluation_strategy": "eval_strategy"}
"""Arguments of older versions of transformers, whose values others depend on."""


def _in_config(setting: Found, kind: str, table: Table) -> Found:
    """An argument under its name of today: of a configuration that it had none of, or of an older version."""
    old, _, name = setting.key.partition(".")
    if old == f"{kind}Config" and name in _NAMES_OF_TODAY:
        return dataclasses.replace(
            setting, key=f"{old}.{_NAMES_OF_TODAY[name]}", written=setting.written or setting.key
        )
    name = setting.key.removeprefix(f"{kind}Trainer.")
    config = f"{kind}Config.{name}"
    if setting.key == name or setting.key in table.rules or config not in table.rules:
        return setting
    return dataclasses.replace(setting, key=config, written=setting.key)


def _for_both(rule: Rule) -> Rule:
    """The rule for a trainer with one optimizer for policy and values: what the actor gets, the critic gets too."""

    def both(key: str, value: object, facts: Facts) -> Outcome:
        outcome = rule(key, value, facts)
        twins = {
            f"critic.{name.removeprefix('actor.')}": setting
            for name, setting in outcome.ours.items()
            if name.startswith("actor.")
        }
        return dataclasses.replace(outcome, ours={**outcome.ours, **twins}) if twins else outcome

    return both


_LOSSES = ("sigmoid", "hinge", "ipo")


def preference_loss(key: str, value: object, facts: Facts) -> Outcome:
    """The loss of pairs, of which TRL adds several with weights; `sft` imitates the better answer."""
    names = value if isinstance(value, list) else [value]
    loss_weights = argument(facts, "loss_weights")
    weights = [1.0] * len(names) if loss_weights is None else [number(weight) for weight in loss_weights]
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


def starting_model(key: str, value: object, facts: Facts) -> Outcome:
    """The model that the policy stays near."""
    model = next((facts.get(f"{kind}Trainer.model") for kind in ("DPO", "KTO") if key.startswith(kind)), None)
    if value in (None, "", model):
        return skip("the policy as it is in the beginning, in both")
    return refuse(
        "the policy stays near the model that it begins with: name that one in model.path, or begin with --from RUN"
    )


def loss(key: str, value: object, facts: Facts) -> Outcome:
    """The loss and its aggregation."""
    mode, kind = "algorithm.loss_agg_mode", "algorithm.policy_loss"
    settings_of: dict[str, dict[str, Any]] = {
        "grpo": {mode: "seq-mean-token-mean"},
        "bnpo": {mode: "token-mean"},
        "dapo": {mode: "token-mean"},
        "dr_grpo": {
            mode: "seq-mean-token-sum-norm",
            "algorithm.loss_scale_factor": argument(facts, "max_completion_length"),
        },
        "cispo": {kind: "cispo", mode: "token-mean", "algorithm.clip_ratio_low": 1.0},
        "sapo": {kind: "sapo"},
    }
    if value not in settings_of:
        return refuse(f"strop has {', '.join(settings_of)}")
    return many(settings_of[value], "no lower bound, as in TRL" if value == "cispo" else "")


def clip_high(value: object, facts: Facts) -> Any:
    """The upper side of the clip range."""
    if argument(facts, "loss_type") != "cispo":
        return number(value)
    ours = {"algorithm.clip_ratio_high": number(value) - 1}
    return many(ours, "TRL bounds the weight itself, strop its distance from 1")


def correction(key: str, value: object, facts: Facts) -> Outcome:
    """The correction of vLLM's samples."""
    if value is not True or argument(facts, "use_vllm") is not True:
        return skip("read with use_vllm=True alone")
    weights, _, action = str(argument(facts, "vllm_importance_sampling_mode")).partition("_")
    ours: dict[str, Any] = {"algorithm.correction.weights": weights}
    if action == "mask":
        ours |= {"algorithm.correction.mode": "mask", "algorithm.correction.lower": 1e-9}
    ours["algorithm.correction.upper"] = number(argument(facts, "vllm_importance_sampling_cap"))
    return many(ours)
