"""Rules on what is beside the policy: the critic, the process reward model, and tools."""

from __future__ import annotations

from statistics import fmean

from strop.algorithms.batch_metrics import EXPLAINED_VARIANCE, GROUPS, PROCESS
from strop.observability.health.history import History
from strop.workers.metrics import AGENT_NUMBER

BAD_CRITIC_STEPS = 20
"""Steps in a row in which the critic explains less than a constant would."""
SWAMPED, SWAMPED_STEPS, MIXED_GROUPS = 0.9, 3, 0.2
"""Share of the squared advantages that process rewards make, above which outcomes hardly count; steps in a row; share
of groups whose outcomes differ, below which that is why."""
CHANCE, CHANCE_STEPS = 0.5, 5
"""Share of a prompt's pairs that a process reward model without knowledge ranks right, and steps that are looked at."""

FAILED_CALLS_STEPS = 3
"""Steps in a row in which no call of a tool worked."""


def useless_critic(history: History) -> str:
    """An explained variance below 0 for twenty steps."""
    values = history.last(EXPLAINED_VARIANCE, BAD_CRITIC_STEPS)
    if not values or max(values) >= 0:
        return ""
    return (
        f"the critic explained less than a constant for {BAD_CRITIC_STEPS} steps - use trainer.critic_warmup, another "
        f"critic.optim.lr, or an estimator without a critic (algorithm=grpo)"
    )


def process_rewards_swamp(history: History) -> str:
    """Process rewards make more than 90 % of the squared advantages for three steps: they are too large, or too few
    groups have different outcomes."""
    values = history.last(PROCESS.of("advantage_share"), SWAMPED_STEPS)
    if not values or min(values) <= SWAMPED:
        return ""
    symptom = (
        f"process rewards make {100 * fmean(values):.0f} % of the advantages, so right and wrong hardly count"
    )
    mixed = history.mean(GROUPS.of("mixed"), SWAMPED_STEPS)
    if mixed is not None and mixed < MIXED_GROUPS:
        return (
            f"{symptom}, for in {100 * mixed:.0f} % of the groups alone outcomes differ: the policy goes to whatever "
            f"their model has not seen fail - use algorithm.filter_groups.lowest_mean=0.2 and "
            f"algorithm.filter_groups.highest_mean=0.8, other prompts, or a smaller "
            f"algorithm.adv_settings.process_weight"
        )
    return (
        f"{symptom} - set algorithm.adv_settings.process_norm=true, or lower algorithm.adv_settings.process_weight or "
        f"prm.beta"
    )


def process_rewards_at_chance(history: History) -> str:
    """Over five steps the better of two answers to a prompt has the larger process rewards no more often than not."""
    share = history.mean(PROCESS.of("pair_acc"), CHANCE_STEPS)
    if share is None or share > CHANCE:
        return ""
    return (
        f"process rewards tell right from wrong answers to a prompt in {100 * share:.0f} % of the pairs, which is no "
        f"better than chance: the policy follows noise - raise prm.optim.lr or rollout.samples_per_prompt, look at "
        f"prm.right_above, or set algorithm.adv_settings.process_weight=0 until prm/acc has risen"
    )


def tool_fails(history: History) -> str:
    """Every call of a tool ended with an error, in three steps that had calls."""
    for errors_name in history.names(AGENT_NUMBER.of("tools/*/errors", "mean")):
        tool = errors_name.split("/", 1)[1].rsplit("/", 2)[0]
        calls = history.last(AGENT_NUMBER.of(f"tools/{tool}/calls", "mean"), FAILED_CALLS_STEPS)
        errors = history.last(errors_name, FAILED_CALLS_STEPS)
        if calls and errors == calls:
            return (
                f"every call of the tool {tool!r} ended with an error, in {FAILED_CALLS_STEPS} steps - read what it "
                f"answered (strop samples): an error of its own code is to be mended there; where it refuses the "
                f"model's arguments, describe them in its schema, or show a call in the prompt"
            )
    return ""
