"""What a step leaves in the run folder: fates and a fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.run import Fate, digest
from strop.workers.reports import EpisodeReport


def untrained_fate(report: EpisodeReport, *, skipped: str) -> Fate:
    """Why a sample was not trained on.

    Args:
        report: the sample.
        skipped: why its optimizer step was not taken; empty when it was in none.
    """
    if not report.is_played:
        return Fate("failed", report.failure)
    if report.outcome is None:
        return Fate("failed", report.stop_reason)
    if report.num_sampled_tokens == 0:
        return Fate("filtered", "no token of it was sampled")
    if skipped:
        return Fate("filtered", skipped)
    return Fate("failed", f"reward {report.outcome.kind}: {report.outcome.error}")


def step_digests(
    uids: Sequence[str], stages: Mapping[str, str], *, losses: Sequence[float], weights: Mapping[str, str]
) -> dict[str, str]:
    """Digest of each stage of a step, in the order in which they happen.

    Args:
        uids: prompts of the step.
        stages: digests of what was sampled and computed; empty when no row was left.
        losses: loss and gradient norm of each optimizer step, the critic's first.
        weights: checksum of the weights of each trained role after the step.
    """
    return {
        "data": digest(list(uids)),
        **stages,
        "loss": digest(list(map(float.hex, losses))),
        "weights": weights["actor"],
        **{f"{role}_weights": value for role, value in weights.items() if role != "actor"},
    }
