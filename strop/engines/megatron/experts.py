"""Repairs of megatron-core 0.16.1 for layers with experts, where Transformer Engine is not installed.

Each goes when its test says that megatron-core does without it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor


def repair_experts() -> None:
    """Make routing and dispatch of tokens run."""
    # moe_utils asks for this name, and sets it only when Transformer Engine can be imported.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    token_dispatcher.all_to_all = _with_lists


def _with_lists(group: Any, rows: Tensor, received: Any = None, sent: Any = None) -> Tensor:
    """Rows exchanged by sizes that are lists of int: the dispatcher has arrays of numpy, which torch 2.13 refuses."""
    received, sent = (None if sizes is None else [int(size) for size in sizes] for sizes in (received, sent))
    exchanged: Tensor = all_to_all(group, rows, received, sent)
    return exchanged
