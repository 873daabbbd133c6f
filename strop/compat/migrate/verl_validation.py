"""verl: sampling in validation, whose meaning changed between its versions of 2025 and 2026, and runs of it alone."""

from __future__ import annotations

from strop.compat.migrate.result import Facts, Outcome, integer, many, number, skip

_ROLLOUT = "actor_rollout_ref.rollout"


def samples_in_validation(facts: Facts) -> bool:
    """Validation may sample; it never does where the script says so."""
    return facts.get(f"{_ROLLOUT}.val_kwargs.do_sample") is not False


def greedy_validation(key: str, value: object, facts: Facts) -> Outcome:
    """Sampling in validation: in 2025 whatever its temperature, in 2026 by the temperature alone."""
    if value is not False:
        return skip("val_kwargs.temperature says it; 0 is greedy")
    note = "greedy"
    if facts.get(f"{_ROLLOUT}.val_kwargs.temperature"):
        note = (
            "greedy, as in verl's versions of 2025; those of 2026 do not read it and sample at val_kwargs.temperature: "
            "set eval.temperature to that"
        )
    return many({"eval.temperature": 0}, note)


def validation_temperature(key: str, value: object, facts: Facts) -> Outcome:
    """The temperature of validation, where it samples."""
    if not samples_in_validation(facts):
        return skip("val_kwargs.do_sample=false is greedy")
    ours = {"eval.temperature": number(value)}
    if value and facts.get(f"{_ROLLOUT}.val_kwargs.do_sample") is None:
        return many(ours, "verl's versions of 2025 are greedy without val_kwargs.do_sample=true")
    return many(ours)


def validation_answers(key: str, value: object, facts: Facts) -> Outcome:
    """Answers per prompt in validation; greedy ones are all the same."""
    count = integer(value)
    if count > 1 and not (samples_in_validation(facts) and facts.get(f"{_ROLLOUT}.val_kwargs.temperature")):
        return skip("greedy answers to a prompt are all the same, so there is one")
    return many({"eval.samples_per_prompt": count})


def validation_alone(key: str, value: object, facts: Facts) -> Outcome:
    """No training: another command, with the same configuration."""
    if value is not True:
        return skip("off there too")
    if facts.get("trainer.val_before_train") is False:
        return skip("read with trainer.val_before_train=true alone")
    return many(
        {}, "validation alone: strop eval --config, with eval and data.val_files of this configuration"
    )
