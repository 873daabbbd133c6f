"""verl-agent, which is verl with environments: GiGPO, and the section `env`."""

from __future__ import annotations

from strop.compat.migrate.result import Facts, Outcome, integer, many

PLAYED = {"agent.default_agent": "env_agent", "agent.credit": "turn"}
"""An environment is played, and each answer is a sample of its own."""


def plays(facts: Facts) -> bool:
    """The script is one of verl-agent's."""
    return facts.is_given("env.env_name") or facts.is_given("env.rollout.n")


def longest_response(facts: Facts) -> int:
    """Tokens of a response, which here is a whole episode, and there one answer of it."""
    answers = facts.get("env.max_steps") if plays(facts) else None
    return integer(facts.number("data.max_response_length")) * (1 if answers is None else integer(answers))


def response_limit(key: str, value: object, facts: Facts) -> Outcome:
    """The longest response."""
    note = f"of a whole episode, which is {facts.get('env.max_steps')} answers" if plays(facts) else ""
    return many({"data.max_response_tokens": longest_response(facts)}, note)


def is_gigpo(facts: Facts) -> bool:
    """Advantages are GiGPO's."""
    return bool(facts.get("algorithm.adv_estimator") == "gigpo")


def environment(key: str, value: object, facts: Facts) -> Outcome:
    """Environment of the episodes."""
    note = f"name the environment: a class FILE.py:CLASS that plays {value}, in agent.environment.name"
    return many(PLAYED, note)
