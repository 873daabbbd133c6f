"""Settings that rollout.router_replay does not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.rollout.registry import NATIVE
from strop.rollout.vllm.config import NOT_RECORDED
from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse to replay a routing that is not recorded, or is lost on the way to the policy.

    Raises:
        ValueError: the sentence names the setting.
    """
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
