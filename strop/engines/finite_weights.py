"""Weights that are no numbers, refused where they are read: with them every log-prob would be NaN, many steps later."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def check_finite(tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Refuse weights with a NaN or an infinity; of sharded ones this rank looks at its own part.

    Args:
        tensors: weights by name.
        source: where they are from, for the sentence: `model folder 'x'`.

    Raises:
        ValueError: the sentence names the first of them.
    """
    bad = [name for name, tensor in tensors if not _is_finite(tensor)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(
            f"{source} has a NaN or an infinity in {bad[0]}{more}: the file is damaged, or the training that saved it "
            f"had diverged; give an earlier or another one"
        )


def _is_finite(tensor: Tensor) -> bool:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not part.is_floating_point() or part.is_meta or not part.numel():
        return True
    return bool(torch.stack(part.aminmax()).isfinite().all())  # both are NaN where a number is
