"""What tests ask of a whole batch."""

from __future__ import annotations

from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto
from strop.workers.estimates import batch_advantages


def advantages_of(data: DataProto, algorithm: AlgorithmConfig, *, kl_coef: float = 0.0) -> DataProto:
    """The columns that the actor makes of these rows."""
    others = data.non_tensor_batch
    made = batch_advantages(
        data.tensors(),
        algorithm,
        uids=list(others["uid"]),
        episode_ids=list(others.get("episode_id", ())),
        kl_coef=kl_coef,
    )
    return DataProto.from_dict(made)
