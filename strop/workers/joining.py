"""How a role's worker joins the other processes that hold its model."""

from __future__ import annotations

from strop.controller import Placement
from strop.engines.config import EngineConfig
from strop.engines.parallel import Parallel, join_ranks


def join(placement: Placement, engine: EngineConfig, *, device: str) -> Parallel:
    """The ranks of a role, as the engine sees them; a collective of all its processes.

    Raises:
        ValueError: the group's mesh and the engine's sequence_parallel differ, or an axis of the mesh is one that
            no engine here has.
    """
    mesh = placement.mesh
    if (mesh.tp, mesh.pp, mesh.cp) != (1, 1, 1) or mesh.sp != engine.sequence_parallel:
        raise ValueError(
            f"role {placement.role!r} has the mesh {mesh}, but its engine has the axes dp and sp alone, with "
            f"engine.sequence_parallel={engine.sequence_parallel}: use Mesh(dp=..., sp={engine.sequence_parallel})"
        )
    return join_ranks(
        rank=placement.rank,
        world_size=mesh.world_size,
        meeting=placement.meeting,
        device=device,
        sp_size=engine.sequence_parallel,
        shard_size=engine.shard_size,
    )
