"""Weights that are no numbers, refused where they are read: with them every log-prob would be NaN, many steps later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_ALWAYS_FINITE = (torch.float4_e2m1fn_x2,)
"""Types that can hold neither a NaN nor an infinity."""


@torch.no_grad()
def check_finite(tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Refuse weights with a NaN or an infinity; of sharded ones this rank looks at its own part.

    A rank may refuse alone: a worker's error ends the call of its whole group, also where peers wait for it.

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


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of a model by name, each once: all that a file of weights has."""
    names = module.state_dict().keys()
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in names)


def _is_finite(tensor: Tensor) -> bool:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not part.is_floating_point() or part.is_meta or not part.numel() or part.dtype in _ALWAYS_FINITE:
        return True
    if part.dtype.itemsize == 1:  # aminmax takes no float8
        part = part.float()
    return bool(torch.stack(part.aminmax()).isfinite().all())  # both are NaN where a number is
