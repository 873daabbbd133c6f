"""Use of the devices by the passes of a step: the share of their operations, and the memory they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from strop.engines.causal_lm import CausalLM
from strop.engines.flops.peak import peak_flops
from strop.engines.tokens import TokenCounts
from strop.utils.machine_limits import numbers_in
from strop.utils.metrics import Metric

MFU = Metric(
    "perf/mfu/{actor,actor_infer,critic,prm}",
    "share",
    "of the operations per second that the devices can do at best (a CPU: as measured): of updates, and of the "
    "policy's log-probs; not there for models whose operations are not known (images, linear attention)",
)
SHARED_TOKENS = Metric(
    "perf/shared_tokens/{actor,critic,prm}",
    "share",
    "of the tokens of an update's rows: not computed, since another row of the micro-batch begins with the same ones",
)
MEMORY = Metric(
    "perf/max_memory_{allocated,reserved}_gb",
    "GiB",
    "most on one accelerator so far, of tensors, and held by torch",
)
HOST_MEMORY = Metric("perf/cpu_memory_used_gb", "GiB", "in use on the fullest machine, by all programs")
GIB = 2**30


def host_used_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the machine in use, without the caches that the kernel gives up; None where it does not say."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():
        return None
    facts = numbers_in(meminfo)
    return 1024 * (facts["MemTotal:"] - facts["MemAvailable:"])


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Use of a device by a rank of a role since the last call, and the memory it took."""

    updates: float | None
    """Floating-point operations of updates; None where the model's are not known."""
    others: float | None
    """The same of all else."""
    peak: float | None
    """Operations per second of this rank's device at best, in the precision of the model; None where that is not
    known."""
    tokens: TokenCounts
    """Of updates."""
    allocated: int | None
    """Most bytes of tensors on the accelerator so far; None on a CPU."""
    reserved: int | None
    """Most bytes that torch held for them."""
    host: int | None
    """Bytes in use on this machine, by all programs."""


def usage_of(model: CausalLM, *, done: float | None, updates: float, tokens: TokenCounts) -> Usage:
    """That of this rank.

    Args:
        model: that it has.
        done: operations since it was asked before; None where those of the model are not known.
        updates: of them, those of updates.
        tokens: of updates.
    """
    device, is_cpu = model.device, model.device.type == "cpu"
    return Usage(
        updates=None if done is None else updates,
        others=None if done is None else done - updates,
        peak=peak_flops(device, model.compute_dtype),
        tokens=tokens,
        allocated=None if is_cpu else torch.accelerator.max_memory_allocated(device),
        reserved=None if is_cpu else torch.accelerator.max_memory_reserved(device),
        host=host_used_bytes(),
    )


def usage_metrics(
    usage: Mapping[str, Sequence[Usage]], seconds: Mapping[str, float], *, actor_is_reference: bool
) -> dict[str, float]:
    """MFU, SHARED_TOKENS, MEMORY and HOST_MEMORY.

    Args:
        usage: of each rank, by the role that learns.
        seconds: of each stage of the step.
        actor_is_reference: the actor without its adapter gives the reference's log-probs.
    """
    stages = ("old_log_prob", "ref") if actor_is_reference else ("old_log_prob",)
    infer_s = sum(seconds.get(stage, 0.0) for stage in stages)
    metrics = {
        MFU.of(role): _mfu(
            [rank_usage.updates for rank_usage in ranks], ranks, seconds.get(f"update_{role}", 0.0)
        )
        for role, ranks in usage.items()
    }
    metrics[MFU.of("actor_infer")] = _mfu(
        [rank_usage.others for rank_usage in usage["actor"]], usage["actor"], infer_s
    )
    metrics |= {SHARED_TOKENS.of(role): _shared(ranks) for role, ranks in usage.items()}
    every = [rank_usage for ranks in usage.values() for rank_usage in ranks]
    for metric, values in (
        (MEMORY.of("allocated"), [rank_usage.allocated for rank_usage in every]),
        (MEMORY.of("reserved"), [rank_usage.reserved for rank_usage in every]),
        (HOST_MEMORY, [rank_usage.host for rank_usage in every]),
    ):
        numbers = [value for value in values if value is not None]
        metrics[metric] = max(numbers) / GIB if numbers else None
    return {name: value for name, value in metrics.items() if value is not None}


def _shared(ranks: Sequence[Usage]) -> float | None:
    of_rows = sum(usage.tokens.of_rows for usage in ranks)
    return 1 - sum(usage.tokens.computed for usage in ranks) / of_rows if of_rows else None


def _mfu(operations: Sequence[float | None], ranks: Sequence[Usage], seconds: float) -> float | None:
    done = [value for value in operations if value is not None]
    peaks = [usage.peak for usage in ranks if usage.peak is not None]
    if not seconds or len(done) < len(ranks) or len(peaks) < len(ranks):
        return None
    return sum(done) / (seconds * sum(peaks))
