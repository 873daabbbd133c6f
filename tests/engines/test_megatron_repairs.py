"""What strop.engines.megatron.experts repairs is still broken; a test that fails here says which repair can go."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from references.rank_processes import Ranks, run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def broken(ranks: Ranks) -> tuple[bool, bool, bool]:
    """In a process: the name that is missing, the arrays that are exchanged, and torch's refusal of them."""
    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    ranks.join()
    dispatched = inspect.getsource(token_dispatcher.MoEAlltoAllTokenDispatcher)
    takes_arrays = True
    try:
        dist.all_to_all_single(torch.zeros(2), torch.zeros(2), numpy.array([1, 1]), numpy.array([1, 1]))
    except TypeError:
        takes_arrays = False
    return not hasattr(moe_utils, "te_general_gemm"), "as_numpy=True" in dispatched, takes_arrays


def test_what_is_repaired_is_broken() -> None:
    for lacks_name, sends_arrays, takes_arrays in run_ranks(broken, 2, timeout_s=200):
        assert (lacks_name, sends_arrays, takes_arrays) == (True, True, False)
