"""Who makes the columns of a step: a table of stages, in the order in which a step has them.

What is handed on are references from role to role; nothing here looks at a token. What is asked for is made, by the
stage that the table of columns (`protocol.schema`) names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from strop.config.sections import where_on
from strop.protocol import DataProto
from strop.protocol.schema import Maker, made_by
from strop.trainer.config import Config
from strop.trainer.rollout_batch import Experience
from strop.trainer.timing import Stages
from strop.trainer.worker_groups import Roles


@dataclass(frozen=True)
class StepContext:
    """What stages make columns with."""

    config: Config
    roles: Roles
    kl_coef: float = 0.0
    """Of the KL penalty in the reward, in this step."""


@dataclass(frozen=True)
class Producer:
    """A stage that adds columns: what one call of a role's workers returns."""

    name: Maker
    role: str
    """Who works, on all columns, cut over its ranks; empty: the actor's first rank, with all rows at once and the light
    columns alone."""
    method: str
    """Of its workers."""
    is_by_row: bool = False
    """What it makes of a row does not depend on other rows."""
    section: str = ""
    """Section below algorithm that says by its `columns` what is made, where not all is."""

    def columns(self, config: Config) -> frozenset[str]:
        """What it makes in a run, of all that it can make."""
        if self.section:
            section = getattr(config.algorithm, self.section)
            return frozenset(section.columns)
        not_made = set() if config.needs("sum_pi_squared") else {"sum_pi_squared"}
        return made_by(self.name) - not_made - {"rm_cut_tokens"}  # which no other stage asks for


def produced(
    experience: Experience, wanted: Collection[str], context: StepContext, stages: Stages
) -> Experience:
    """The experience with the wanted columns, each made by its stage, which may add others that it makes with them."""
    for producer in PRODUCERS:
        if not made_by(producer.name) & (set(wanted) - experience.column_names):
            continue
        with stages.stage(producer.name, producer.role):
            group = context.roles.groups.get(producer.role, context.roles.actor)
            rows = experience.partition(group.mesh) if producer.role else experience.taken_by("advantages")
            settings = {"kl_coef": context.kl_coef} if producer.name == "adv" else {}
            made: DataProto = group.bound(producer.method)(rows, **settings)
            experience = experience.union(made, *producer.columns(context.config))
            if producer.name == "correction":
                experience = _counted(experience)
    return experience


def wanted_before_updates(config: Config, num_samples: int) -> frozenset[str]:
    """What the algorithm asks for before its updates, of the columns that generation does not make; `num_samples` are
    those of the step."""
    wanted = {"advantages", "returns", "token_level_rewards"}
    if _needs_old_log_probs(config, num_samples):
        wanted |= {"old_log_probs", "entropys"}
    if correction := where_on(config.algorithm.correction):
        wanted |= set(correction.columns)
    if config.uses_reference:
        wanted.add("ref_log_prob")
    wanted.update(*(one.wanted for name, one in config.further_roles.items() if name in config.roles))
    return frozenset(wanted)


def wanted_of_groups(config: Config) -> frozenset[str]:
    """Of `wanted_before_updates`, what can be made of some rows of a step before the others are there."""
    by_row = {name for producer in PRODUCERS if producer.is_by_row for name in made_by(producer.name)}
    return wanted_before_updates(config, config.samples_per_step) & by_row


def wanted_by_the_update(config: Config, experience: Experience) -> frozenset[str]:
    """What the update of the policy alone asks for, of rows that are trained on."""
    teacher = where_on(config.algorithm.distillation)
    return frozenset(teacher.columns if teacher and len(experience) else ())


def _needs_old_log_probs(config: Config, num_samples: int) -> bool:
    """False with one optimizer step on the whole batch, where the log-probs of that very pass are the old ones."""
    return (
        config.samples_per_update(config.actor) < num_samples
        or config.actor.epochs > 1
        or config.penalizes_kl
        or config.trainer.critic_warmup > 0
        or where_on(config.algorithm.correction) is not None
        or config.chooses_samples
        or config.needs("old_log_probs")
        or config.needs("sum_pi_squared")
    )


def _counted(experience: Experience) -> Experience:
    """With what a correction has said of each row: rejected tokens leave the loss and its denominators."""
    counted = experience.rows.select(["num_trained"], []).get()
    numbers: Mapping[str, float] = counted.meta_info["numbers"]
    counts = tuple(int(count) for count in counted.tensors()["num_trained"])
    return replace(experience, num_trained=counts, metrics={**experience.metrics, **numbers})


PRODUCERS = (
    Producer("reward_model", "reward_model", "compute_rm_score", is_by_row=True),
    Producer("old_log_prob", "actor", "compute_log_prob", is_by_row=True),
    Producer("correction", "", "correct_rollout", section="correction"),
    Producer("ref", "reference", "compute_ref_log_prob", is_by_row=True),
    Producer("values", "critic", "compute_values", is_by_row=True),
    Producer("prm_ref", "prm", "compute_prm_ref_log_prob", is_by_row=True),
    Producer("prm", "prm", "compute_process_rewards"),
    Producer("adv", "", "compute_advantages"),
    Producer("teacher", "teacher", "compute_teacher", section="distillation"),
)
"""In the order of a step. Without a reference model, the policy without its adapter is the reference; process rewards
are by the weights of now, so not before an update that comes first."""
