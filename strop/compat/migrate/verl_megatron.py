"""verl: roles on megatron-core, and the settings that the others take from the actor."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, many, skip
from strop.engines.megatron.checks import SET_BY_ENGINE, SET_BY_MODEL

_ACTOR, _REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_FIELDS = "megatron.override_transformer_config"
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def all_on_megatron(facts: Facts) -> bool:
    """The script names verl's configuration for megatron-core, which is that of every role."""
    name = str(facts.get("--config-name")).removesuffix(".yaml")
    return name == "ppo_megatron_trainer" or facts.get("model_engine") == "megatron"


def sizes_in_shared_groups(facts: Facts, section: str) -> Iterator[tuple[str, Any]]:
    """Sizes of a role on megatron-core where the files leave them out: its own default is 1, but the actor's process
    has its groups made first, and no others: the role runs with the actor's sizes.

    Args:
        facts: of the script.
        section: of the role, such as critic.

    Source: verl/trainer/config/engine/megatron.yaml, and verl's workers for megatron-core, which make groups unless
    there are some.
    """
    strategies = (facts.get(f"{_ACTOR}.strategy"), facts.get(f"{section}.strategy"))
    if all_on_megatron(facts) or strategies == ("megatron", "megatron"):
        yield from _sizes_of_actor(facts, section)


def _sizes_of_actor(facts: Facts, section: str) -> Iterator[tuple[str, Any]]:
    for name in _SIZES:
        size = facts.get(f"{_ACTOR}.megatron.{name}")
        if size not in (None, 1):
            yield f"{section}.megatron.{name}", size


def transformer_field(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """A field of megatron-core's TransformerConfig, unless the model or the engine says it here."""
    name = key.partition(f"{_FIELDS}.")[2]
    if name in SET_BY_MODEL | SET_BY_ENGINE:
        return skip("follows from the model and the other settings of the engine")
    return many({f"{ours}.{name}": value})


def reference_settings(
    facts: Facts, keys: Collection[str], own_rows: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Settings of a reference on megatron-core where the files leave them out: its strategy, sizes and fields of
    TransformerConfig are the actor's. verl's versions of 2025 have 1 as its sizes, and groups of the actor's.

    Args:
        facts: of the script.
        keys: all that it sets, read or not.
        own_rows: keys of the table; fields that have a row among them are no matter of the reference's layers.

    Source: verl/trainer/config/ref/ref.yaml and megatron_ref.yaml.
    """
    if not all_on_megatron(facts):
        strategy = f"{_REFERENCE}.strategy"
        if not facts.is_given(strategy) and facts.get(f"{_ACTOR}.strategy") == "megatron":
            yield strategy, "megatron"
        elif facts.get(strategy) != "megatron":
            return
    yield from _sizes_of_actor(facts, _REFERENCE)
    if any(key.startswith(f"{_REFERENCE}.{_FIELDS}") for key in keys):
        return  # the reference's own take the place of all of the actor's
    for key in keys:
        ours = key.replace(_ACTOR, _REFERENCE, 1)
        is_field = key.startswith(f"{_ACTOR}.{_FIELDS}.")
        if is_field and ours not in own_rows and facts.get(key) is not None:
            yield ours, facts.get(key)
