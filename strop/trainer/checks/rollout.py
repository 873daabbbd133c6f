"""Settings of generation that do not go together, or not with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.rollout.registry import NATIVE
from strop.rollout.vllm.config import NOT_RECORDED
from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse generation ahead of training, engines, and a replay of routers that the run cannot have.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    _check_replicas(config)
    _check_staleness(config)
    _check_router_replay(config)


def _check_replicas(config: Config) -> None:
    """Refuse several engines of a rollout worker that has a process of its own, and engines over more devices than
    their process is given."""
    rollout, is_apart = config.rollout, "rollout" in config.resources.apart
    if rollout.replicas > 1 and is_apart:
        raise ValueError(
            f"rollout.replicas is {rollout.replicas} with resources.apart={{rollout: …}}, where each process "
            f"has one engine: raise the number of processes instead"
        )
    if rollout.num_devices > 1 and config.resources.runtime == "ray" and not is_apart:
        raise ValueError(
            f"an engine of rollout.{rollout.engine} spans tensor_parallel x pipeline_parallel = {rollout.num_devices} "
            f"devices, but the processes of the trainer have one each: give generation processes of its own with "
            f"resources.apart={{rollout: N}}, N engines of {rollout.num_devices} devices each"
        )


def _check_staleness(config: Config) -> None:
    """Samples of older policies are corrected for, and can be had while the trainer works."""
    if not config.async_setting:
        return
    bound = config.rollout.max_staleness
    if bound and not config.algorithm.corrects_for_age:
        raise ValueError(
            f"rollout.max_staleness is {bound:g}, so samples are older than the policy that learns from them, but "
            f"nothing corrects for it: set algorithm.correction.weights=sequence (or token, geometric), "
            f"algorithm.correction.reject, or algorithm.old_log_probs=rollout; or rollout.max_staleness=0"
        )
    key = "rollout.max_staleness" if bound else "rollout.over_issue"
    if config.rollout.is_streamed and config.trainer.skip_rollout:
        raise ValueError(
            f"trainer.skip_rollout takes recorded samples, which are all there at once: remove {key}"
        )
    if config.rollout.is_streamed and config.needs("reward_baselines"):
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares samples with a greedy answer of the "
            f"same policy, which is not had with {key}: use another estimator, or remove {key}"
        )


def _check_router_replay(config: Config) -> None:
    """Refuse to replay a routing that is not recorded, or is lost on the way to the policy."""
    if not config.rollout.router_replay:
        return
    rollout, engine = config.rollout, config.actor.engine
    vllm = rollout.vllm
    needed = {
        "rollout.vllm.pipeline_parallel": (vllm.pipeline_parallel if rollout.engine == "vllm" else 1, 1),
        "rollout.max_staleness": (rollout.max_staleness, 0),
        "rollout.over_issue": (rollout.over_issue, 0),
        "agent.num_workers": (config.agent.num_workers, 0),
        "trainer.skip_rollout": (config.trainer.skip_rollout, ""),
        "actor.engine.compile": (engine.compile, False),
    }
    if rollout.engine not in (NATIVE, "vllm"):
        raise ValueError(
            f"rollout.router_replay is true, but rollout.engine={rollout.engine} records no routing: use native or "
            f"vllm, or set rollout.router_replay=false"
        )
    for name in NOT_RECORDED:
        if rollout.engine == "vllm" and name in vllm.engine_args:
            raise ValueError(
                f"rollout.router_replay is true, which does not go with {name} in rollout.vllm.engine_args: remove it, "
                f"or set rollout.router_replay=false"
            )
    for key, (value, only) in needed.items():
        if value != only:
            raise ValueError(
                f"rollout.router_replay is true, which does not go with {key}={setting_text(value)}: set that to "
                f"{'nothing' if only == '' else setting_text(only)}, or rollout.router_replay=false"
            )
