"""Who makes the columns of a step: one function per stage, in the order in which a step has them.

Every function hands references from role to role; nothing here looks at a token. What is asked for is made, by the
stage that the table of columns (`protocol.schema`) names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from strop.protocol.schema import Maker, made_by
from strop.trainer.config import Config
from strop.trainer.experience import Experience
from strop.trainer.roles import Roles
from strop.trainer.stages import Stages

PRM_REF = "prm_ref_log_prob"
"""What the update of the process reward model takes."""


@dataclass(frozen=True)
class StepContext:
    """What stages make columns with."""

    config: Config
    roles: Roles
    kl_coef: float = 0.0
    """Of the KL penalty in the reward, in this step."""


@dataclass(frozen=True)
class Producer:
    """A stage that adds columns."""

    name: Maker
    role: str
    """Who works; empty where it is nobody's model."""
    make: Callable[[StepContext, Experience], Experience]
    """The experience with the columns."""
    is_by_row: bool = False
    """What it makes of a row does not depend on other rows."""


def produced(
    experience: Experience, wanted: Collection[str], context: StepContext, stages: Stages
) -> Experience:
    """The experience with the wanted columns, each made by its stage, which may add others that it makes with them."""
    for producer in PRODUCERS:
        if made_by(producer.name) & (set(wanted) - experience.column_names):
            with stages.stage(producer.name, producer.role):
                experience = producer.make(context, experience)
    return experience


def wanted_before_updates(config: Config, num_samples: int) -> frozenset[str]:
    """What the algorithm asks for before its updates, of the columns that generation does not make; `num_samples` are
    those of the step."""
    algorithm = config.algorithm
    wanted = {"advantages", "returns", "token_level_rewards"}
    if config.uses_reward_model:
        wanted.add("rm_scores")
    if _needs_old_log_probs(config, num_samples):
        wanted |= {"old_log_probs", "entropys"}
    if algorithm.correction.is_on:
        wanted.add("loss_mask")
    if algorithm.correction.weights != "none":
        wanted.add("rollout_is_weights")
    if config.uses_reference:
        wanted.add("ref_log_prob")
    if config.uses_critic:
        wanted.add("values")
    if config.uses_prm:
        wanted |= {PRM_REF, "process_rewards"}
    return frozenset(wanted)


def wanted_of_groups(config: Config) -> frozenset[str]:
    """Of `wanted_before_updates`, what can be made of some rows of a step before the others are there."""
    by_row = {name for producer in PRODUCERS if producer.is_by_row for name in made_by(producer.name)}
    return wanted_before_updates(config, config.samples_per_step) & by_row


def wanted_by_the_update(config: Config, experience: Experience) -> frozenset[str]:
    """What the update of the policy alone asks for, of rows that are trained on."""
    if not config.uses_teacher or not len(experience):
        return frozenset()
    is_reverse = config.algorithm.distillation.kind == "reverse_kl"
    return frozenset({"teacher_log_prob"} if is_reverse else {"teacher_ids", "teacher_logprobs"})


def _needs_old_log_probs(config: Config, num_samples: int) -> bool:
    """False with one optimizer step on the whole batch, where the log-probs of that very pass are the old ones."""
    return (
        config.samples_per_update(config.actor) < num_samples
        or config.actor.epochs > 1
        or config.algorithm.use_kl_in_reward
        or config.trainer.critic_warmup > 0
        or config.algorithm.correction.is_on
        or config.algorithm.resampling != "none"
        or config.algorithm.keep.is_on
        or config.needs("old_log_probs")
        or config.needs("sum_pi_squared")
    )


def _rm_scores(context: StepContext, experience: Experience) -> Experience:
    group = context.roles.reward_model
    assert group is not None, "asked for with a reward model only"
    return experience.union(group.call.compute_rm_score(experience.partition(group.mesh)), "rm_scores")


def _old_log_probs(context: StepContext, experience: Experience) -> Experience:
    actor = context.roles.actor
    log_probs = actor.call.compute_log_prob(experience.partition(actor.mesh))
    squares = ["sum_pi_squared"] if context.config.needs("sum_pi_squared") else []
    return experience.union(log_probs, "old_log_probs", "entropys", *squares)


def _correction(context: StepContext, experience: Experience) -> Experience:
    """Rejected tokens leave the loss and its denominators; the others may get weights."""
    actor = context.roles.actor
    made = actor.call.correct_rollout(experience.taken_by("advantages"))
    counted = made.select(["num_trained"]).get()
    numbers: Mapping[str, float] = counted.meta_info["numbers"]
    counts = tuple(int(count) for count in counted.tensors()["num_trained"])
    names = ["loss_mask"]
    if context.config.algorithm.correction.weights != "none":
        names.append("rollout_is_weights")
    return replace(
        experience.union(made.select(names), *names),
        num_trained=counts,
        metrics={**experience.metrics, **numbers},
    )


def _ref_log_prob(context: StepContext, experience: Experience) -> Experience:
    """By the frozen model, or by the policy without its adapter."""
    reference, actor = context.roles.reference, context.roles.actor
    if reference is None:
        made = actor.call.compute_ref_log_prob(experience.partition(actor.mesh))
    else:
        made = reference.call.compute_ref_log_prob(experience.partition(reference.mesh))
    return experience.union(made, "ref_log_prob")


def _values(context: StepContext, experience: Experience) -> Experience:
    critic = context.roles.critic
    assert critic is not None, "asked for with a critic only"
    return experience.union(critic.call.compute_values(experience.partition(critic.mesh)), "values")


def _prm_ref(context: StepContext, experience: Experience) -> Experience:
    """By the weights that the process reward model began with."""
    prm = context.roles.prm
    assert prm is not None, "asked for with a process reward model only"
    return experience.union(prm.call.compute_prm_ref_log_prob(experience.partition(prm.mesh)), PRM_REF)


def _process_rewards(context: StepContext, experience: Experience) -> Experience:
    """By the weights of now, so not before an update that comes first."""
    prm = context.roles.prm
    assert prm is not None, "asked for with a process reward model only"
    made = prm.call.compute_process_rewards(experience.partition(prm.mesh))
    return experience.union(made, "process_rewards")


def _advantages(context: StepContext, experience: Experience) -> Experience:
    rows = experience.taken_by("advantages")
    made = context.roles.actor.call.compute_advantages(rows, kl_coef=context.kl_coef)
    return experience.union(made, *made_by("adv"))


def _teacher(context: StepContext, experience: Experience) -> Experience:
    """What the teacher says, which the update alone reads: for a forward KL, top_k numbers per token."""
    teacher = context.roles.teacher
    assert teacher is not None, "asked for with a teacher only"
    if context.config.algorithm.distillation.kind == "reverse_kl":
        log_probs = teacher.call.compute_teacher_log_prob(experience.partition(teacher.mesh))
        return experience.union(log_probs, "teacher_log_prob")
    most_likely = teacher.call.compute_teacher_top_k(experience.partition(teacher.mesh))
    return experience.union(most_likely, "teacher_ids", "teacher_logprobs")


PRODUCERS = (
    Producer("reward_model", "reward_model", _rm_scores, is_by_row=True),
    Producer("old_log_prob", "actor", _old_log_probs, is_by_row=True),
    Producer("correction", "", _correction),
    Producer("ref", "reference", _ref_log_prob, is_by_row=True),
    Producer("values", "critic", _values, is_by_row=True),
    Producer("prm_ref", "prm", _prm_ref, is_by_row=True),
    Producer("prm", "prm", _process_rewards),
    Producer("adv", "", _advantages),
    Producer("teacher", "teacher", _teacher),
)
"""In the order of a step."""
