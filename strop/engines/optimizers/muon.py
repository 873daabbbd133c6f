"""Muon: momentum whose update is orthogonalised, for hidden matrices whole or sharded over ranks.

Concurrency: with sharded parameters `Muon.step` is a collective of the ranks that hold the shards, which are boxes of
rows and columns. They work in rounds: each sends its shards of W matrices to W ranks, orthogonalises the one it
received, and sends the boxes back. No two of them orthogonalise the same matrix, and none holds several whole ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

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
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    embeddings: Collection[str],
    matrix_group: dist.ProcessGroup | None = None,
) -> list[Part]:
    """Muon for the hidden matrices, AdamW for all else.

    Args:
        named: the parameters, by name.
        config: the numbers of both.
        embeddings: names of those of embeddings and head.
        matrix_group: as of `Muon`.

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
    muon = Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        matrix_group=matrix_group,
    )
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

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        matrix_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Args:
        params: matrices, whole or sharded.
        lr, weight_decay, momentum: as above.
        matrix_group: ranks that hold the parts of a matrix that is cut along two axes of their mesh, in the order of
            the mesh; None where none is.
        """
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._matrix_group = matrix_group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step over the parameters that have a gradient."""
        value = None if closure is None else closure()
        for group in self.param_groups:
            teams: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    teams.setdefault(self._team(parameter), []).append(parameter)
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
            rank = dist.get_rank(team)
            boxes = _boxes(parameters[rank]) if rank < len(parameters) else []
            updates = _orthogonalized_in_team(updates, boxes, team)
        for parameter, update in zip(parameters, updates, strict=True):
            shard = local(parameter.data)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(update.to(shard.device), alpha=-group["lr"] * update_scale(parameter.shape))

    def _team(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of a matrix, in the order of its mesh; None where it is whole."""
        cuts = _cut_axes(parameter)
        if not isinstance(parameter, DTensor) or not cuts:
            return None
        if len(cuts) == 1:
            group: dist.ProcessGroup = parameter.device_mesh.get_group(cuts[0])
            return group
        assert self._matrix_group is not None, "ranks that share matrices have a group"
        return self._matrix_group

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


def _cut_axes(parameter: nn.Parameter) -> list[int]:
    """Axes of the mesh along which a parameter is cut."""
    if not isinstance(parameter, DTensor):
        return []
    return [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]


_Box = tuple[slice, ...]
"""Rows and columns of a matrix."""


def _boxes(parameter: nn.Parameter) -> list[_Box]:
    """The part of a matrix that each rank of its team holds, in their order."""
    assert isinstance(parameter, DTensor), "it is sharded"
    mesh, axes = parameter.device_mesh, _cut_axes(parameter)
    here = mesh.get_coordinate()
    assert here is not None, "this rank holds a part"
    boxes: list[_Box] = []
    for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        coordinate = list(here)
        for axis, at in zip(axes, place, strict=True):
            coordinate[axis] = at
        shape, offset = _compute_local_shape_and_global_offset(
            parameter.shape, mesh.shape, coordinate, parameter.placements
        )
        boxes.append(tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True)))
    return boxes


def _orthogonalized_in_team(
    shards: Sequence[Tensor], boxes: Sequence[_Box], team: dist.ProcessGroup
) -> list[Tensor]:
    """Rank r of the team orthogonalises matrix r; everybody gets its box of each.

    Args:
        shards: [rows, columns] of this rank's box of each matrix, at most one matrix per rank.
        boxes: of every rank in the matrix of this one; none where there is none for it.
        team: the ranks.
    """
    num_ranks = dist.get_world_size(team)
    sizes = [tuple(side.stop - side.start for side in box) for box in boxes]
    num_out = [shard.numel() for shard in shards] + [0] * (num_ranks - len(shards))
    num_in = [math.prod(size) for size in sizes] or [0] * num_ranks
    parts = exchanged(torch.cat([shard.reshape(-1) for shard in shards]), num_out, num_in, team)
    if boxes:
        matrix = parts.new_empty([max(box[side].stop for box in boxes) for side in range(2)])
        for box, size, part in zip(boxes, sizes, parts.split_with_sizes(num_in), strict=True):
            matrix[box] = part.view(size)
        matrix = orthogonalized(matrix)
        parts = torch.cat([matrix[box].reshape(-1) for box in boxes])
    returned = exchanged(parts, num_in, num_out, team)
    return [
        part.view(shard.shape)
        for part, shard in zip(returned.split_with_sizes(num_out), shards, strict=False)
    ]
