"""What a step leaves in the run folder: sample rows, fates, fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from strop.protocol import DataProto, columns
from strop.run import Fate, digest
from strop.trainer.rollouts import Episode


def sample_row(episode: Episode, *, prompt_text: str, advantage: float | None, fate: Fate) -> dict[str, Any]:
    """One sample as a row of the sample store."""
    trajectory, outcome = episode.trajectory, episode.outcome
    row: dict[str, Any] = {
        "id": episode.id,
        "uid": episode.prompt.uid,
        "sample_index": episode.sample_index,
        "data_source": episode.prompt.data_source,
        "prompt": prompt_text,
        "response": episode.text,
        "ground_truth": episode.prompt.ground_truth,
        "prompt_ids": list(episode.prompt.token_ids),
        "advantage": advantage,
        "fate": fate.name,
        "fate_reason": fate.reason,
    }
    if trajectory is not None:
        row |= {
            "response_ids": list(trajectory.response_ids),
            "response_mask": list(trajectory.sampled),
            "rollout_log_probs": list(trajectory.log_probs),
            "versions": list(trajectory.versions),
            "stop_reason": trajectory.stop_reason,
            "num_turns": trajectory.num_turns,
            "timings": dict(trajectory.timings),
        }
    if outcome is not None:
        row |= {
            "score": outcome.score,
            "outcome": outcome.kind,
            "error": outcome.error,
            "reward_parts": dict(outcome.parts),
        }
    else:
        row["error"] = episode.failure
    return row


def untrained_fate(episode: Episode, *, skipped: str) -> Fate:
    """Why a sample was not trained on.

    Args:
        episode: the sample.
        skipped: why its optimizer step was not taken; empty when it was in none.
    """
    if episode.trajectory is None:
        return Fate("failed", episode.failure)
    if episode.outcome is None:
        return Fate("failed", episode.trajectory.stop_reason)
    if not any(episode.trajectory.sampled):
        return Fate("filtered", "no token of it was sampled")
    if skipped:
        return Fate("filtered", skipped)
    return Fate("failed", f"reward {episode.outcome.kind}: {episode.outcome.error}")


def advantages_by_id(batch: DataProto) -> dict[str, float]:
    """Advantage of each sample of a training batch: the mean over its sampled tokens."""
    tensors = batch.tensors()
    values, masks = columns.rows(tensors["advantages"]), columns.rows(tensors["response_mask"])
    means = [float(v[m.bool()].mean()) for v, m in zip(values, masks, strict=True)]
    return dict(zip(batch.non_tensor_batch["id"], means, strict=True))


def step_digests(
    uids: Sequence[str],
    batch: DataProto | None,
    *,
    log_probs: Tensor | None,
    losses: Sequence[float],
    weights: str,
) -> dict[str, str]:
    """Digest of each stage of a step, in the order in which they happen.

    Args:
        uids: prompts of the step.
        batch: the trained rows; None when no row was left.
        log_probs: [N] the trainer's log-probs at the start of the step, flat.
        losses: loss and gradient norm of each optimizer step.
        weights: checksum of the weights after the step.
    """
    digests = {"data": digest(list(uids)), "loss": digest(list(map(float.hex, losses))), "weights": weights}
    if batch is None:
        return digests
    tensors: Mapping[str, Tensor] = batch.tensors()

    def of(*names: str) -> str:
        parts = []
        for name in names:
            parts += [columns.row_lengths(tensors[name]).numpy(), columns.flat(tensors[name]).numpy()]
        return digest(*parts)

    recorded = columns.flat(tensors["rollout_log_probs"]).numpy()
    return digests | {
        "prompt_tokens": of("prompts"),
        "sampled_tokens": of("responses", "response_mask"),
        "log_probs": digest(recorded) if log_probs is None else digest(recorded, log_probs.numpy()),
        "rewards": of("token_level_rewards"),
        "advantages": of("advantages"),
    }
