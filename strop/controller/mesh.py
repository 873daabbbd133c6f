"""Mesh of a worker group: its parallel axes, which workers get the same rows, and which one reports."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the parallel axes of a worker group.

    Workers that differ only in tensor, sequence, context or pipeline coordinate form one data-parallel
    group: they get the same rows, and one of them reports the result. Ranks count with tp fastest, then
    sp, cp, dp, and pp slowest.
    """

    dp: int = 1
    """Data-parallel groups: the number of parts a batch is cut into."""
    tp: int = 1
    """Ranks that share one layer's matrices."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Ranks that share the context of a sequence."""
    sp: int = 1
    """Ranks that share the tokens of a sequence (Ulysses)."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "sp"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh axis {name} has size {getattr(self, name)}; the smallest size is 1")

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.dp * self.tp * self.pp * self.cp * self.sp

    def dp_rank(self, rank: int) -> int:
        """The data-parallel group of a worker: the number of its part of a batch."""
        return self._checked(rank) // (self.tp * self.sp * self.cp) % self.dp

    def has_output(self, rank: int) -> bool:
        """True for the one worker of each data-parallel group whose result counts.

        It is the first one along tp, sp and cp, in the last pipeline stage, where outputs arise.
        """
        inner = self.tp * self.sp * self.cp
        return self._checked(rank) % inner == 0 and rank // (inner * self.dp) == self.pp - 1

    def output_ranks(self) -> list[int]:
        """Ranks whose results count, in the order of their parts of a batch."""
        return sorted((rank for rank in range(self.world_size) if self.has_output(rank)), key=self.dp_rank)

    @property
    def stages_as_dp(self) -> Mesh:
        """The same ranks, with each pipeline stage of a data-parallel group as one of its own: for work in which every
        stage has a whole model, such as generation."""
        return replace(self, dp=self.dp * self.pp, pp=1)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size} workers")
        return rank
