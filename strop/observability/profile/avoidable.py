"""Parts of the time of a run that a setting would save: seconds from its records, and the setting.

Each is computed from what was measured, under the assumption that its reason names; none is a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.algorithms.config import learns_from_older
from strop.algorithms.specs import ADV_DECLARATIONS
from strop.observability.profile.phases import CHECKPOINT, FIRST_VALIDATION, PREFLIGHT, TESTING, Phases
from strop.observability.profile.steps import ProfiledStep
from strop.workers.generation_waits import REWARDS, TAIL

_TRAINING = (
    "reward_model", "old_log_prob", "correction", "ref", "values", "prm_ref", "prm", "adv", "teacher", "update_prm",
    "update_critic", "update_actor", "summary",
)  # fmt: skip
"""Phases of a step after its samples are there and before the weights are handed over."""
_BEFORE_TRAINING = (
    (
        "preflight", PREFLIGHT, "trainer.preflight",
        "the samples that are played and shown before the first step change nothing of the run",
    ),
    (
        "first validation", FIRST_VALIDATION, "eval.before_train",
        "the validation before the first step says where the run begins, and is not needed to train",
    ),
)  # fmt: skip
"""Name, phase, setting and reason of what is done once, and could be left out."""
_AHEAD = "rollout.max_staleness"
_ASYNC_NOTE = "; run.async_save=true writes them in the background"


@dataclass(frozen=True, kw_only=True)
class Avoidable:
    """A part of the time of a run that a setting would save."""

    name: str
    seconds: float
    key: str
    """Setting that saves it."""
    setting: str
    """The setting with a value, for the command line."""
    reason: str
    """One sentence: what was measured, and what the setting does about it."""


def largest_avoidable(
    phases: Phases, settings: Mapping[str, Any], profiled: Sequence[ProfiledStep]
) -> Avoidable | None:
    """The largest part that a setting would save; None where nothing was found.

    Args:
        phases: of the run.
        settings: of the run, by full key.
        profiled: its profiled steps.
    """
    parts = [part for part in avoidable_parts(phases, settings, profiled) if part.seconds > 0]
    return max(parts, key=lambda part: part.seconds, default=None)


def avoidable_parts(
    phases: Phases, settings: Mapping[str, Any], profiled: Sequence[ProfiledStep]
) -> Iterator[Avoidable]:
    """Every part that a setting would save; some save the same seconds."""
    yield from _of_generation(phases, settings)
    yield from _of_intervals(phases, settings)
    for name, phase, key, reason in _BEFORE_TRAINING:
        yield Avoidable(name=name, seconds=phases.of(phase), key=key, setting=f"{key}=false", reason=reason)
    yield from _of_profiled(phases, settings, profiled)


def _of_generation(phases: Phases, settings: Mapping[str, Any]) -> Iterator[Avoidable]:
    num_apart = settings.get("resources.apart.rollout")
    is_ahead = bool(settings.get(_AHEAD) or settings.get("rollout.over_issue"))
    if is_ahead:
        if isinstance(num_apart, int):
            yield _more_workers(phases, num_apart)
        return
    tail_s, rewards_s = phases.waits.get(TAIL, 0.0), phases.waits.get(REWARDS, 0.0)
    if _may_run_ahead(settings):
        yield Avoidable(
            name="tail of generation",
            seconds=tail_s,
            key=_AHEAD,
            setting=f"{_AHEAD}=1",
            reason="with most samples done, the last ones are generated at a lower rate; generation ahead fills the "
            "free places with samples of the next step",
        )
        if isinstance(num_apart, int):
            yield Avoidable(
                name="generation and training in turns",
                seconds=min(phases.of("gen"), phases.of(*_TRAINING)),
                key=_AHEAD,
                setting=f"{_AHEAD}=1",
                reason="generation has processes of its own, which wait while the others train, and the others for "
                "them; with generation ahead both work at the same time",
            )
    has_service = bool(settings.get("reward.judge.base_url") or settings.get("reward.server.url"))
    if not has_service:
        num_workers = settings.get("reward.num_workers")
        count = 2 * num_workers if isinstance(num_workers, int) else 4
        yield Avoidable(
            name="wait for rewards",
            seconds=rewards_s / 2,
            key="reward.num_workers",
            setting=f"reward.num_workers={count}",
            reason=f"steps waited {rewards_s:.1f} s for scores after their last token; twice as many processes need "
            "half as long, if there are cores for them",
        )
    elif _may_run_ahead(settings):
        yield Avoidable(
            name="wait for rewards",
            seconds=rewards_s,
            key=_AHEAD,
            setting=f"{_AHEAD}=1",
            reason="a step waits for the last scores of a service; with generation ahead it takes the groups that are "
            "scored",
        )


def _may_run_ahead(settings: Mapping[str, Any]) -> bool:
    """The other settings of the run go with generation ahead (strop.trainer.checks: async_rollout, router_replay)."""
    declaration = ADV_DECLARATIONS.get(str(settings.get("algorithm.adv_estimator")))
    if declaration is not None and "reward_baselines" in declaration.needs:
        return False
    if settings.get("rollout.router_replay") or settings.get("trainer.skip_rollout"):
        return False
    weights, rejects = settings.get("algorithm.correction.weights", "none"), "algorithm.correction.reject."
    return learns_from_older(
        str(settings.get("algorithm.policy_loss")),
        settings.get("algorithm.old_log_probs"),
        is_corrected=weights != "none" or any(key.startswith(rejects) for key in settings),
    )


def _more_workers(phases: Phases, count: int) -> Avoidable:
    """Wait of the trainer for samples that are generated meanwhile, and of it what one more process would save."""
    wait_s, training_s = phases.of("gen"), phases.of(*_TRAINING)
    left_s = max(0.0, (wait_s + training_s) * count / (count + 1) - training_s)
    return Avoidable(
        name="wait for samples",
        seconds=wait_s - left_s,
        key="resources.apart",
        setting=f"resources.apart.rollout={count + 1}",
        reason=f"training waited {wait_s:.1f} s for samples that are generated beside it; one more process generates "
        f"them in {count}/{count + 1} of the time",
    )


def _of_intervals(phases: Phases, settings: Mapping[str, Any]) -> Iterator[Avoidable]:
    """Work that is done once per step, or once in so many steps: with twice as many samples or steps between."""
    prompts = settings.get("data.prompts_per_step")
    if isinstance(prompts, int):
        yield Avoidable(
            name="weight sync",
            seconds=phases.of("update_weights") / 2,
            key="data.prompts_per_step",
            setting=f"data.prompts_per_step={2 * prompts}",
            reason=f"it took {phases.of('update_weights'):.1f} s; with twice the prompts, a sample needs half of it",
        )
    last_step = max(phases.steps, default=0)
    is_async = bool(settings.get("run.async_save"))
    for name, phase, key, note in (
        ("validation", TESTING, "eval.every", ""),
        ("checkpoints", CHECKPOINT, "run.save_every", "" if is_async else _ASYNC_NOTE),
    ):
        every = settings.get(key)
        if not isinstance(every, int) or every < 1 or not last_step:
            continue
        count, rarer = _num_times(last_step, every), _num_times(last_step, 2 * every)
        yield Avoidable(
            name=name,
            seconds=phases.of(phase) * (1 - rarer / count),
            key=key,
            setting=f"{key}={2 * every}",
            reason=f"they took {phases.of(phase):.1f} s; with twice the steps between them, {rarer} are left of "
            f"{count}{note}",
        )


def _num_times(last_step: int, every: int) -> int:
    """Number of times that something is done every so many steps, and after the last one."""
    return -(-last_step // every)


def _of_profiled(
    phases: Phases, settings: Mapping[str, Any], profiled: Sequence[ProfiledStep]
) -> Iterator[Avoidable]:
    """Parts that only a timeline shows, as shares of the profiled steps, over all steps."""
    seconds = math.fsum(step.seconds for step in profiled)
    if not seconds:
        return
    numbers = ", ".join(str(step.step) for step in profiled)
    measured = f"measured in step{'s' * (len(profiled) > 1)} {numbers}, for all steps"
    imbalance_s = math.fsum(step.imbalance_s for step in profiled) / seconds * phases.steps_s
    prompts = settings.get("data.prompts_per_step")
    if isinstance(prompts, int):
        yield Avoidable(
            name="imbalance of ranks",
            seconds=imbalance_s / 2,
            key="data.prompts_per_step",
            setting=f"data.prompts_per_step={2 * prompts}",
            reason=f"ranks with fewer tokens wait for the one with most in each update, {imbalance_s:.1f} s "
            f"({measured}); with twice the rows the difference is half as large a share",
        )
    if settings.get("resources.offload_idle"):
        yield Avoidable(
            name="offloading",
            seconds=math.fsum(step.offload_s for step in profiled) / seconds * phases.steps_s,
            key="resources.offload_idle",
            setting="resources.offload_idle=false",
            reason=f"roles moved to host memory ({measured}); where the devices hold all of them, they can stay",
        )
