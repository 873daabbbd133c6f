"""How well a step used the machines: model FLOPs utilization and memory, of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.base.metrics import Metric
from strop.workers.models import Usage

MFU = Metric(
    "perf/mfu/{actor,actor_infer,critic,prm}",
    "share",
    "of the operations per second that the devices can do at best (a CPU: as measured): of updates, and of the "
    "policy's log-probs; not there for models whose operations are not known (images, linear attention)",
)
MEMORY = Metric(
    "perf/max_memory_{allocated,reserved}_gb",
    "GiB",
    "most on one accelerator so far, of tensors, and held by torch",
)
HOST_MEMORY = Metric("perf/cpu_memory_used_gb", "GiB", "in use on the fullest machine, by all programs")
_GIB = 2**30
_INFER = ("old_log_prob", "ref")
"""Stages in which the actor computes log-probs; `ref` where it is its own reference."""


def usage_metrics(
    usage: Mapping[str, Sequence[Usage]], seconds: Mapping[str, float], *, actor_is_reference: bool
) -> dict[str, float]:
    """MFU, MEMORY and HOST_MEMORY.

    Args:
        usage: of each rank, by the role that learns.
        seconds: of each stage of the step.
        actor_is_reference: the actor without its adapter gives the reference's log-probs.
    """
    stages = _INFER if actor_is_reference else _INFER[:1]
    infer_s = sum(seconds.get(stage, 0.0) for stage in stages)
    found = {
        MFU.of(role): _share([one.updates for one in ranks], ranks, seconds.get(f"update_{role}", 0.0))
        for role, ranks in usage.items()
    }
    found[MFU.of("actor_infer")] = _share([one.others for one in usage["actor"]], usage["actor"], infer_s)
    every = [one for ranks in usage.values() for one in ranks]
    for what, values in (
        (MEMORY.of("allocated"), [one.allocated for one in every]),
        (MEMORY.of("reserved"), [one.reserved for one in every]),
        (HOST_MEMORY, [one.host for one in every]),
    ):
        known = [value for value in values if value is not None]
        found[what] = max(known) / _GIB if known else None
    return {name: value for name, value in found.items() if value is not None}


def _share(operations: Sequence[float | None], ranks: Sequence[Usage], seconds: float) -> float | None:
    done = [value for value in operations if value is not None]
    peaks = [one.peak for one in ranks if one.peak is not None]
    if not seconds or len(done) < len(ranks) or len(peaks) < len(ranks):
        return None
    return sum(done) / (seconds * sum(peaks))
