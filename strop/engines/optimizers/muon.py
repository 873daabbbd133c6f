"""Muon: momentum whose update is orthogonalised, for hidden matrices whole or sharded over ranks.

Concurrency: with sharded parameters `Muon.step` is a collective of the ranks that hold the shards. They work in
rounds: each sends its shards of W matrices to W ranks, orthogonalises the one it received, and sends the rows back.
No rank orthogonalises a matrix twice or holds more than one whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from strop.engines.config import OptimizerConfig
from strop.engines.gradients import local, meeting_device
from strop.engines.optimizers.adamw import Part, adamw_parts
from strop.engines.parallel.ranks import exchanged

NEWTON_SCHULZ_STEPS = 5
"""Iterations; singular values end between about 0.7 and 1.2."""
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic a x + b x^3 + c x^5, with the steepest rise at 0 that still stays bounded."""
_EPS = 1e-7
"""Smallest norm that a matrix is divided by."""


def muon_parts(
    named: Mapping[str, nn.Parameter], config: OptimizerConfig, embeddings: Collection[str]
) -> list[Part]:
    """Muon for the hidden matrices, AdamW for all else.

    Args:
        named: the parameters, by name.
        config: the numbers of both.
        embeddings: names of those of embeddings and head.

    Raises:
        ValueError: no embeddings are named.
    """
    if not embeddings:
        raise ValueError("Muon must know which matrices are embeddings or the head; give their names")
    hidden = [p for name, p in named.items() if p.dim() == 2 and name not in embeddings]
    ids = set(map(id, hidden))
    rest = adamw_parts([p for p in named.values() if id(p) not in ids], config)
    if not hidden:
        return rest
    muon = Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum)
    return [_MuonPart(muon), *rest]


def orthogonalized(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly: U S' V^T in bfloat16 for U S V^T, S' near 1.

    [m, n] -> [m, n]. X <- a X + (b A + c A A) X with A = X X^T, from X = matrix / |matrix|.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (
        matrix.T if is_tall else matrix
    ).bfloat16()  # [small, large]: the product of the small axis is the cheap one
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def update_scale(shape: Sequence[int]) -> float:
    """Factor that gives an orthogonal [m, n] the entries of AdamW's updates: a root mean square of about 0.2.

    Source: Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """
    return 0.2 * math.sqrt(max(shape[0], shape[1]))


class Muon(torch.optim.Optimizer):
    """M <- momentum M + (1 - momentum) G;  W <- (1 - lr decay) W - lr scale(W) orthogonalized(lerp(G, M, momentum)).

    The same steps as torch.optim.Muon with match_rms_adamw, which takes whole matrices only.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with Nesterov's momentum.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step over the parameters that have a gradient."""
        value = None if closure is None else closure()
        for group in self.param_groups:
            teams: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    teams.setdefault(_team(parameter), []).append(parameter)
            for team, parameters in teams.items():
                num_ranks = 1 if team is None else dist.get_world_size(team)
                # Matrices of a round are of similar size, so that no rank waits for a large one.
                parameters.sort(key=lambda p: p.numel(), reverse=True)
                for start in range(0, len(parameters), num_ranks):
                    self._round(parameters[start : start + num_ranks], team, group)
        return value

    def _round(
        self, parameters: Sequence[nn.Parameter], team: dist.ProcessGroup | None, group: dict[str, Any]
    ) -> None:
        """Step of at most as many matrices as there are ranks."""
        updates = [self._with_momentum(p, group["momentum"]).to(meeting_device(p)) for p in parameters]
        if team is None:
            updates = [orthogonalized(update) for update in updates]
        else:
            updates = _orthogonalized_in_team(updates, [p.shape for p in parameters], team)
        for parameter, update in zip(parameters, updates, strict=True):
            shard = local(parameter.data)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.to(shard.device), alpha=-group["lr"] * update_scale(parameter.shape))

    def _with_momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """This rank's shard of what is orthogonalised, in the bfloat16 that it is orthogonalised in."""
        assert parameter.grad is not None, "only parameters with a gradient take part"
        self.materialize(parameter)
        gradient, average = local(parameter.grad), local(self.state[parameter]["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).bfloat16()

    def materialize(self, parameter: nn.Parameter) -> None:
        """Create the zero state of a parameter that has none."""
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.detach())


class _MuonPart(Part):
    optimizer: Muon

    def materialize(self) -> None:
        for parameter in self.parameters:
            self.optimizer.materialize(parameter)


def _team(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of a matrix, in order; None where it is whole.

    Raises:
        ValueError: it is cut in another way.
    """
    if not isinstance(parameter, DTensor):
        return None
    cuts = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    if not cuts:
        return None
    if len(cuts) > 1 or parameter.placements[cuts[0]] != Shard(0):
        raise ValueError(
            f"a matrix of shape {tuple(parameter.shape)} is sharded as {parameter.placements}, but Muon needs whole "
            f"rows on each rank; use optim.name=adamw for this role"
        )
    group: dist.ProcessGroup = parameter.device_mesh.get_group(cuts[0])
    return group


def shard_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Rows of each rank when torch shards [num_rows, ...] over its first axis; the last ranks may have none."""
    step = -(-num_rows // num_ranks)
    return [max(0, min(step, num_rows - rank * step)) for rank in range(num_ranks)]


def _orthogonalized_in_team(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], team: dist.ProcessGroup
) -> list[Tensor]:
    """Rank r of the team orthogonalises matrix r; everybody gets its rows of each.

    Args:
        shards: [rows, n] of each matrix, at most one matrix per rank.
        shapes: the whole matrices'.
    """
    num_ranks, rank = dist.get_world_size(team), dist.get_rank(team)
    rows = [shard_rows(shape[0], num_ranks) for shape in shapes]
    assert [len(shard) for shard in shards] == [r[rank] for r in rows], "shards are cut as torch cuts them"
    mine = shapes[rank] if rank < len(shapes) else torch.Size((0, 0))
    num_out = [shard.numel() for shard in shards] + [0] * (num_ranks - len(shards))
    num_in = [r * mine[1] for r in rows[rank]] if rank < len(shapes) else [0] * num_ranks
    matrix = exchanged(torch.cat([shard.reshape(-1) for shard in shards]), num_out, num_in, team)
    if rank < len(shapes):
        matrix = orthogonalized(matrix.view(mine)).reshape(-1)
    returned = exchanged(matrix, num_in, num_out, team)
    ends = list(itertools.accumulate(num_out))
    return [returned[end - s.numel() : end].view(s.shape) for end, s in zip(ends, shards, strict=False)]
