"""What strop repairs in megatron-core is still broken; a test that fails here says which repair can go."""

from __future__ import annotations

import importlib.util

import pytest

from references.rank_processes import Ranks, run_ranks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def lacks_name(ranks: Ranks) -> bool:
    """In a process that nobody has repaired."""
    from megatron.core.transformer.moe import moe_utils

    return not hasattr(moe_utils, "te_general_gemm")


def test_routers_ask_for_a_name_of_transformer_engine() -> None:
    """strop.engines.megatron.layers sets it."""
    assert run_ranks(lacks_name, 1, timeout_s=200) == [True]
